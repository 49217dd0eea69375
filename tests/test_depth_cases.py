"""What holds for every case: the sums of section 6, K = W, replay, and launch for launch what a second reader of the rules gets."""

import json
import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.schedule.depth import DepthPlanner, Entry, config_of, play_case, run_case
from hybridkv.schedule.depth.cases import request_of
from hybridkv.schedule.depth.config import OVERTAKEN_AT_MOST
from hybridkv.schedule.exits import effective_depth
from hybridkv.testing.depth_cases import check_case, check_fullest_coda, draw_case
from tests.depth_reference import reference_trace

CASES = 20_000
QUICK = 3_200


def case_of(seed):
    return draw_case(random.Random(f"depth {seed}"))


def check_against_reference(case):
    """Shows the first entry that differs: a diff of two whole traces takes minutes to draw."""
    got, wanted = run_case(case), reference_trace(case)
    for number, (mine, other) in enumerate(zip(got, wanted, strict=False)):
        if mine != other:
            raise AssertionError(f"entry {number} is {mine}, the reference has {other}")
    assert len(got) == len(wanted)


def check_seeds(seeds):
    for seed in seeds:
        case = case_of(seed)
        try:
            check_case(case)
            check_fullest_coda(case)
            check_against_reference(case)
        except Exception as error:
            error.add_note(f"seed {seed}: {json.dumps(case)}")
            raise


@pytest.mark.parametrize("shard", range(8))
def test_drawn_cases(shard):
    check_seeds(range(shard, QUICK, 8))


@pytest.mark.nightly
@pytest.mark.parametrize("shard", range(8))
def test_all_drawn_cases(shard):
    seeds = range(shard, CASES, 8)
    check_seeds(seeds)
    print(f"shard {shard}: {len(seeds)} of {CASES} cases hold")


def test_drawn_cases_reach_the_rare_paths():
    seen = Counter()
    for seed in range(600):
        case = case_of(seed)
        for entry in run_case(case):
            recompute = entry["stage"] == "preempt" and "prompt" in entry["rows"][0]
            seen["recompute" if recompute else entry["stage"]] += 1
            seen["chunked"] += (
                entry["stage"] == "prefill" and entry["counts"]["emitted"] < entry["counts"]["rows"]
            )
    assert (
        min(seen[name] for name in ("stall", "restore", "preempt", "recompute", "decode", "chunked")) >= 20
    ), seen


@given(st.randoms(use_true_random=False))
def test_blocks_and_slots_add_up(rng):
    """Property 6, 8: after every entry, with a look at who holds what."""
    case = draw_case(rng)
    config = config_of(case)

    def audit(_entry):
        s = planner._state
        everyone = s.live.values()
        assert s.free + sum(live.blocks for live in everyone) == (config.pool.blocks if config.pool else 0)
        assert len(s.residents) + len(s.offloaded) <= planner.config.width
        assert all(live.overtaken <= OVERTAKEN_AT_MOST for live in everyone)
        assert s.decoding == sum(live.filled == live.prompt for live in s.residents.values())
        staged = [live for queue in (s.pre, s.stalled, s.ready, s.core, s.coda) for live in queue]
        assert len(staged) == len({live.id for live in staged}) <= s.decoding

    planner = DepthPlanner(config, audit)
    if case["resident"]:
        return
    for item in case["requests"]:
        planner.submit(request_of(item, planner.config))
    while planner.unfinished:
        batch = planner.plan()
        if batch is not None:
            planner.apply(batch)
    assert planner.queues[:3] == (0, 0, 0)


@given(st.randoms(use_true_random=False))
def test_parameters_never_change_who_emits_how_much(rng):
    """Property 9: each request emits 1 + D tokens under any mode, K, S and M."""
    case = draw_case(rng)
    outputs = []
    for mode, k, slots, tokens in (
        ("cb", 1, 1, 8192),
        ("norefill", 1, None, 3),
        ("refill", case["W"], 1, 2),
        ("refill", 1, None, 7),
    ):
        emitted = Counter()

        def count(entry: Entry, emitted=emitted):
            if entry.stage in {"coda", "decode"}:
                emitted.update(row.request for row in entry.rows)

        play_case({**case, "mode": mode, "K": k, "S": slots, "M": tokens, "kv": None}, count)
        outputs.append(emitted)
    assert all(emitted == outputs[0] for emitted in outputs)
    assert outputs[0] == Counter({r["id"]: len(r["depths"]) for r in case["requests"] if r["depths"]})


@given(st.randoms(use_true_random=False))
def test_refill_with_k_1_needs_no_more_loops(rng):
    """Property 5, an observation: over resident cases it never failed."""
    case = {
        **draw_case(rng),
        "kv": None,
        "resident": True,
        "planes": "mixed",
        "M": 8192,
        "K": 1,
        "knobs": None,
    }
    case["requests"] = [
        {**r, "depths": r["depths"] or [1], "arrive": 0} for r in case["requests"][: case["W"]]
    ]
    loops = {
        mode: sum(entry["counts"]["loops"] for entry in run_case({**case, "mode": mode}))
        for mode in ("refill", "norefill")
    }
    assert loops["refill"] <= loops["norefill"]


@given(st.integers(1, 20), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 20)))
def test_lookahead_raises_a_depth_by_at_most_one(max_loops, floor, signal):
    sync = effective_depth(signal, max_loops, floor=floor)
    ahead = effective_depth(signal, max_loops, floor=floor, delay=1)
    assert sync <= ahead <= min(sync + 1, max_loops)
    assert ahead > 1 or max_loops == 1


def test_replay_is_byte_equal_in_another_process():
    """No schedule may depend on the order of a set or a hash."""
    program = (
        "import json, random\n"
        "from hybridkv.schedule.depth import run_case\n"
        "from hybridkv.testing.depth_cases import draw_case\n"
        "print(json.dumps([run_case(draw_case(random.Random(f'depth {s}'))) for s in range(60)]))\n"
    )
    here = json.dumps([run_case(case_of(seed)) for seed in range(60)])
    assert here == json.dumps([run_case(case_of(seed)) for seed in range(60)])
    for salt in ("1", "77"):
        run = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": salt, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert run.stdout.strip() == here
