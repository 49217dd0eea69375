"""Twenty-five problems that public issues report of looped and early-exit models. Numbers are those of depth-batching section 12."""

import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from hybridkv.errors import CorruptionError, UnsupportedError, UsageError  # noqa: E402  (after the skip)
from hybridkv.geometry import LoopLayout, LoopSpec  # noqa: E402
from hybridkv.schedule.depth import (  # noqa: E402
    DepthConfig,
    DepthPlanner,
    DepthRequest,
    KVPool,
    Row,
    Stage,
    StageBatch,
    run_case,
)
from hybridkv.schedule.depth.batch import Queues  # noqa: E402
from hybridkv.schedule.exits import ExitRouter, Threshold  # noqa: E402
from hybridkv.testing.loops import HUGINN, OURO, LoopedEngine, LoopedPager, huginn_toy, ouro_toy  # noqa: E402
from tests.conftest import load_golden  # noqa: E402

torch.set_num_threads(1)
GOLDEN = load_golden("depth_batching")


def toy_run(model, prompts, depths, *, layout, fill="copy", blocks=32, **config):
    """Engine and pager after a run whose requests are kept, so that their KV can be looked at."""
    kept = type("Kept", (LoopedPager,), {"release": lambda _self, _request: None})
    pager = kept(model.laid_out(layout), blocks, 2, model.width, fill=fill)
    settings = {"mode": "refill", "width": 4, "max_loops": model.shape.max_loops, "min_signal": 2} | config
    planner = DepthPlanner(DepthConfig(layout=layout, **settings))
    for name, prompt in prompts.items():
        planner.submit(DepthRequest.recorded(name, len(prompt), depths[name]))
    engine = LoopedEngine(model, pager, prompts, depths=depths)
    engine.run(planner)
    return engine, pager


def planner_of(*requests, **config):
    planner = DepthPlanner(DepthConfig(**{"mode": "refill", "width": 4, "max_loops": 4} | config))
    for request in requests:
        planner.submit(request)
    return planner


def drain(planner, finishes=lambda _batch: ()):
    """Run a planner on recorded depths; returns its batches."""
    batches = []
    while planner.unfinished:
        batch = planner.plan()
        if batch is not None:
            batches.append(batch)
            planner.apply(batch, None, finishes(batch))
    return batches


def batch_of(loop, *rows):
    """A recurrent launch of (request, position, serial) rows."""
    made = tuple(Row(name, position, loop, loop - 1, 1, serial) for name, position, serial in rows)
    return StageBatch(0, Stage.RECURRENT, made, len(made), Queues(len(made), 0, 0, None))


def test_1_a_generic_cache_lacks_loop_planes():
    """sglang PR #32894: decoded KV equals that of a prefill over the same tokens, plane by plane."""
    model = ouro_toy()
    engine, decoded = toy_run(model, {"r": [5, 6]}, {"r": [4, 4, 4]}, layout=LoopLayout.DEPTH_INDEXED)
    whole = engine.tokens["r"][:-1]
    _, filled = toy_run(model, {"r": whole}, {"r": []}, layout=LoopLayout.DEPTH_INDEXED)
    assert decoded.planes.loop.attention_layers == OURO.max_loops * OURO.core
    for loop in range(1, 5):
        for layer in range(OURO.core):
            assert decoded.planes.row(layer, loop - 1) == (loop - 1) * OURO.core + layer
            for a, b in zip(decoded.read("r", 5, layer, loop), filled.read("r", 5, layer, loop), strict=True):
                assert torch.equal(a, b)


def test_2_later_loops_overwrite_earlier_ones():
    """ollama #14252, hivemind #647."""
    for layout, expected in ((LoopLayout.DEPTH_INDEXED, 1.0), (LoopLayout.SINGLE, 4.0)):
        pager = LoopedPager(replace(OURO, layout=layout), 1, 2, 4)
        pager.reserve("r", [1], 1)
        for loop in range(1, 5):
            pager.write("r", 0, 0, loop, (torch.full((4,), float(loop)), torch.zeros(4)))
        keys, _ = pager.read("r", 1, 0, 1)
        assert keys.unique().tolist() == [expected]


def test_3_more_loops_than_trained():
    """ollama #14252, comment."""
    with pytest.raises(UsageError, match=re.escape("depths of 'A' must be in 1..4, got 5")):
        planner_of(DepthRequest.recorded("A", 1, [5]))
    planner = planner_of(DepthRequest(id="A", prompt=1, decode_tokens=2))
    loops = [row.loop for batch in drain(planner) if batch.stage is Stage.RECURRENT for row in batch.rows]
    assert loops == [1, 2, 3, 4] * 2


def test_4_an_engine_without_early_exit():
    """vLLM PR #27794: the gate is loaded and never asked. Without the capability the planner runs CB."""
    planner = planner_of(DepthRequest.recorded("A", 1, [2, 2]), early_exit=False)
    assert planner.config.mode == "cb"
    assert {batch.stage for batch in drain(planner)} == {Stage.PREFILL, Stage.DECODE}


def test_5_an_exit_criterion_averaged_over_the_batch():
    """seal-rg PR #11: one of two rows signals, one leaves."""
    router = ExitRouter(Threshold(0.5), max_loops=4)
    launch = batch_of(1, ("A", 3, 0), ("B", 3, 1))
    router.begin(launch)
    router.observe(launch, [0.1, 0.9])
    assert router.exits(launch) == ["A"]


def test_6_deeper_kv_of_batch_mates():
    """seal-rg docstring: A leaves at 2 beside B at 5, and nothing of B's depth is written for A."""
    prompts, depths = {"A": [1], "B": [2]}, {"A": [2], "B": [5]}
    _, indexed = toy_run(huginn_toy(), prompts, depths, layout=LoopLayout.DEPTH_INDEXED)
    _, filled = toy_run(huginn_toy(), prompts, depths, layout=LoopLayout.LAST_EXITED)
    for layer in range(HUGINN.prelude, HUGINN.prelude + HUGINN.core):
        for loop in (3, 4, 5, 6):
            with pytest.raises(
                CorruptionError, match=f"position 1 must have written plane {loop - 1} before"
            ):
                indexed.read("A", 2, layer, loop)
            assert torch.equal(filled.read("A", 2, layer, loop)[0][1], filled.read("A", 2, layer, 2)[0][1])


def test_7_missing_positions_are_never_dropped():
    """seal-rg cache, strategy "full"."""
    pager = LoopedPager(replace(OURO, layout=LoopLayout.DEPTH_INDEXED), 2, 2, 4)
    pager.reserve("r", [1, 2, 3], 3)
    for position in (0, 2):
        pager.write("r", position, 1, 3, (torch.ones(4), torch.ones(4)))
    with pytest.raises(CorruptionError, match="position 1 must have written plane 2 before loop 3 reads it"):
        pager.read("r", 3, 1, 3)
    assert len(pager.read("r", 1, 1, 3)[0]) == 1


def test_8_the_exit_test_looks_at_row_0_only():
    """EE-LLM."""
    router = ExitRouter(Threshold(0.5), max_loops=4)
    launch = batch_of(1, ("A", 3, 0), ("B", 3, 1))
    router.begin(launch)
    router.observe(launch, [0.9, 0.1])
    assert router.exits(launch) == ["B"]


def test_9_skipped_layers_are_not_zero_filled():
    """TIDE: every deeper plane holds the exit plane, bit for bit."""
    model = huginn_toy()
    for depth in range(1, 7):
        _, pager = toy_run(model, {"A": [1, 2]}, {"A": [depth]}, layout=LoopLayout.LAST_EXITED)
        for layer in range(HUGINN.prelude, HUGINN.prelude + HUGINN.core):
            exit_plane = pager.read("A", 3, layer, depth)[0][2]
            assert bool(exit_plane.any())
            assert all(torch.equal(pager.read("A", 3, layer, d)[0][2], exit_plane) for d in range(depth, 7))
        assert pager.copied == (6 - depth) * HUGINN.core


def test_10_exits_are_executed_not_just_reported():
    """TIDE: as many loops run as the exit depth says."""
    model, ran = ouro_toy(), Counter()
    run_loop = model.loop

    def counted(hidden, request, position, loop, pager):
        ran[request, position] += 1
        return run_loop(hidden, request, position, loop, pager)

    model.loop = counted
    toy_run(model, {"A": [1, 2], "B": [3]}, {"A": [2, 4], "B": [3, 2]}, layout=LoopLayout.SINGLE)
    assert ran == {("A", 0): 4, ("A", 1): 4, ("A", 2): 2, ("A", 3): 4, ("B", 0): 4, ("B", 1): 3, ("B", 2): 2}


def test_11_a_plan_is_a_pure_function():
    """vllm-rlt: runs diverged at equal depths. Two planners, interleaved, agree at every step."""
    rng = random.Random(11)
    requests = [DepthRequest(id=f"r{i}", prompt=rng.randint(1, 9), decode_tokens=6) for i in range(12)]
    pool = KVPool(blocks=12, block_tokens=2, preemption="offload")
    one, two = (planner_of(*requests, pool=pool) for _ in range(2))
    while one.unfinished:
        a, b = one.plan(), two.plan()
        assert a == b
        exits = (
            [row.request for row in a.rows if (row.position + row.loop) % 3 == 0]
            if a.stage is Stage.RECURRENT
            else None
        )
        assert one.apply(a, exits) == two.apply(b, exits)


def test_12_chunk_borders_under_shared_kv():
    """vllm-rlt: position by position chunking changes nothing; loop by loop within a chunk it does, and is not used."""
    model, prompt = ouro_toy(), [3, 1, 4, 1, 5, 9]

    def last_state(chunk, depth_major):
        pager = LoopedPager(replace(OURO, layout=LoopLayout.SINGLE), 8, 2, model.width)
        pager.reserve("r", prompt, len(prompt))
        hidden = {}
        for start in range(0, len(prompt), chunk):
            span = range(start, start + chunk)
            steps = (
                [(p, loop) for loop in range(1, 5) for p in span]
                if depth_major
                else [(p, loop) for p in span for loop in range(1, 5)]
            )
            for position, loop in steps:
                if loop == 1:
                    hidden[position] = model.enter(prompt[position], "r", position, pager)
                state, _ = model.loop(hidden[position], "r", position, loop, pager)
                hidden[position] = hidden[position][0], state
        return hidden[5][1]

    whole, halves, thirds = (last_state(chunk, depth_major=False) for chunk in (6, 3, 2))
    assert torch.equal(whole, halves)
    assert torch.equal(whole, thirds)
    deep = [last_state(chunk, depth_major=True) for chunk in (6, 3, 2)]
    assert not torch.allclose(deep[0], deep[1])
    assert not torch.allclose(deep[1], deep[2])


def test_13_recompute_after_early_exits():
    """vllm-rlt, looped_cdb: full depth would change KV."""
    pool = {"blocks": 5, "block_tokens": 2, "preemption": "recompute", "allow_semantic_change": False}
    with pytest.raises(
        UsageError, match="preemption must be none or offload with layout last_exited, got recompute"
    ):
        planner_of(pool=KVPool(**pool), layout=LoopLayout.LAST_EXITED)
    case = {**CASES["G9-refill-offload"], "kv": pool, "layout": "single"}
    with pytest.raises(UnsupportedError, match="recompute must not change KV"):
        run_case(case)
    trace = run_case({**case, "kv": {**pool, "allow_semantic_change": True}})
    assert sum(entry["stage"] == "preempt" for entry in trace) >= 1
    full = [{**r, "depths": [4] * 5} for r in case["requests"]]
    assert sum(entry["counts"]["emitted"] for entry in run_case({**case, "requests": full})) == 12


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_14_the_replay_cursor_after_a_preemption(policy):
    """looped_cdb: depths 10 to 14, two consumed and one pending."""
    case = {
        "mode": "norefill", "W": 2, "K": 1, "M": 64, "S": 1, "rho": None, "rmax": 16, "resident": False, "planes": "mixed",
        "kv": {"blocks": 9, "block_tokens": 1, "preemption": policy, "allow_semantic_change": True},
        "requests": [
            {"id": "A", "prompt": 1, "depths": [10, 11, 12, 13, 14]}, {"id": "B", "prompt": 4, "depths": [16] * 5},
        ],
    }  # fmt: skip
    trace = run_case(case)
    event = next(entry["rows"][0] for entry in trace if entry["stage"] == "preempt")
    assert (event["request"], event["kv_tokens"]) == ("A", 3)
    if policy == "recompute":
        assert (event["prompt"], event["depths_left"]) == (4, [13, 14])
    exits = [
        row["loop"]
        for e in trace
        for row in e["rows"]
        if e["stage"] == "recurrent" and row["request"] == "A" and "A" in e["exits"]
    ]
    assert exits == ([10, 11, 13, 14] if policy == "recompute" else [10, 11, 12, 13, 14])


def test_15_the_offload_victim_comes_back():
    """looped_cdb tests."""
    trace = run_case(CASES["G9-refill-offload"])
    assert [e["stage"] for e in trace if e["stage"] in {"preempt", "restore"}] == ["preempt", "restore"]
    assert trace[-1]["counts"]["free"] == 5
    assert {name for entry in trace for name in entry["done"]} == {"A", "B"}


@pytest.mark.parametrize("mode", ["norefill", "refill", "cb"])
def test_16_a_late_end_with_a_staged_successor(mode):
    """looped_cdb, vllm-rlt: the end is known one launch late."""
    pool = KVPool(blocks=8, block_tokens=2, preemption="offload")
    planner = planner_of(
        DepthRequest.recorded("A", 3, [2] * 5), DepthRequest.recorded("B", 3, [4] * 2), mode=mode, pool=pool
    )
    emitted, rows_after, ended = 1, 0, None
    while planner.unfinished:
        batch = planner.plan()
        if batch is None:
            continue
        rows_after += (
            ended is not None
            and batch.stage is Stage.RECURRENT
            and "A" in {row.request for row in batch.rows}
        )
        if ended == "heard next":
            planner.end(["A"])
            ended = "told"
        entry = planner.apply(batch)
        if batch.stage in {Stage.CODA, Stage.DECODE} and "A" in {row.request for row in batch.rows}:
            emitted += 1 if ended is None else 0
            assert ended is None or entry.counts.emitted == len(batch.rows) - 1
            ended = ended or "heard next"
    assert emitted == 2
    assert rows_after <= (0 if mode == "refill" else 1)
    assert planner.queues.free == 8


def test_16_an_old_signal_after_the_id_was_used_again():
    router = ExitRouter(Threshold(0.5), max_loops=4)
    old, new = batch_of(1, ("A", 3, 0)), batch_of(1, ("A", 3, 9))
    router.begin(old)
    router.forget(["A"])
    router.observe(old, [0.1])
    router.begin(new)
    router.observe(old, [0.1])
    assert router.exits(new) == []
    router.observe(new, [0.1])
    assert router.exits(new) == ["A"]


def test_17_row_data_follows_the_row():
    """R-KV PR #25: a batch is condensed, and per-request data must move along."""
    router = ExitRouter(Threshold(0.5), max_loops=6, lookahead=True)
    first = batch_of(1, ("A", 3, 0), ("B", 7, 1), ("C", 5, 2))
    router.begin(first)
    router.observe(first, [0.9, 0.1, 0.9])
    second = batch_of(2, ("C", 5, 2), ("B", 7, 1), ("A", 3, 0))
    assert router.exits(second) == ["B"]
    router.observe(second, [0.1, 0.9, 0.9])
    assert router.exits(batch_of(3, ("A", 3, 0), ("C", 5, 2))) == ["C"]
    planner = planner_of(
        *(DepthRequest.recorded(f"r{i}", i + 1, [1 + (i + t) % 4 for t in range(4)]) for i in range(4))
    )
    at = {}
    for batch in drain(planner):
        for row in batch.rows:
            if batch.stage is Stage.RECURRENT:
                assert row.plane == row.loop - 1
                assert at.get((row.request, row.position), 0) == row.loop - 1
                at[row.request, row.position] = row.loop


@pytest.mark.parametrize("planes", ["mixed", "aged"])
def test_18_graphs_do_not_multiply_by_depth(planes):
    """sglang PR #25745: a graph is a stage and a bucket, and a plane only where a launch has one."""
    requests = [DepthRequest.recorded(f"r{i}", 1, [1 + (i + t) % 4 for t in range(9)]) for i in range(40)]
    batches = drain(planner_of(*requests, width=16, planes=planes))
    graphs = {batch.graph for batch in batches if batch.bucket is not None}
    assert {bucket for _, bucket, _ in graphs} <= {1, 2, 4, 8, 12, 16}
    assert len(graphs) <= 3 * 6 if planes == "mixed" else len(graphs) <= 2 * 6 + 4 * 6
    assert {plane for stage, _, plane in graphs if stage is Stage.RECURRENT} <= (
        {None} if planes == "mixed" else {0, 1, 2, 3}
    )


def test_19_the_pool_is_sized_from_the_right_layer_count():
    """sglang-omni PR #1910."""
    for row in GOLDEN["formulas"]["kv_bytes_per_token"]["values"]:
        loop = LoopSpec(
            prelude=row["prelude_layers"], core=row["core_layers"], coda=row["coda_layers"], layout=row["layout"],
            max_loops={"ouro": 4, "huginn": 16}[row["model"].split("_")[0]],
        )  # fmt: skip
        assert loop.planes == row["planes"]
        assert (
            loop.attention_layers * 2 * row["kv_heads"] * row["head_dim"] * row["item_bytes"]
            == row["bytes_per_token"]
        )
    for layout in LoopLayout:
        pager = LoopedPager(replace(HUGINN, layout=layout), 5, 2, 16)
        layers = 2 + pager.loop.planes * 4 + 2
        assert pager.kv.numel() == 5 * 2 * layers * 2 * 16
        row, plane = pager.planes.row, pager.loop.plane_of
        rows = {row(layer, plane(loop)) for layer in range(2, 6) for loop in range(1, 7)}
        assert sorted(rows | {row(layer) for layer in (0, 1, 6, 7)}) == list(range(layers))


def test_20_shared_planes_follow_their_owner():
    """vLLM PR #43185: under `single` all loops are plane 0 of one table."""
    single = replace(HUGINN, layout=LoopLayout.SINGLE)
    assert {single.plane_of(loop) for loop in range(1, 7)} == {0}
    _, pager = toy_run(ouro_toy(), {"A": [1, 2, 3]}, {"A": [4, 2]}, layout=LoopLayout.SINGLE)
    assert {pager.planes.groups(loop) for loop in range(1, 5)} == {range(1)}
    assert pager.tables["A"].shape == (1, 3)
    assert pager.held == 3


def test_21_one_plane_per_launch_starves():
    """looped_cdb scheduler: with planes aged, B leaves within a bounded number of launches."""
    case = {
        "mode": "refill", "W": 2, "K": 1, "M": 8, "S": 1, "rho": None, "rmax": 4, "resident": True, "kv": None,
        "requests": [{"id": "A", "prompt": 1, "depths": [2] * 100}, {"id": "B", "prompt": 1, "depths": [3]}],
    }  # fmt: skip

    def loops_until_b_left(planes):
        loops = 0
        for entry in run_case({**case, "planes": planes}):
            loops += entry["stage"] == "recurrent"
            if "B" in entry["exits"]:
                return loops
        return None

    assert loops_until_b_left("aged") <= 3 + 3 * (8 + 4 - 1)
    assert loops_until_b_left("fifo") > 200


def test_22_a_long_prompt_among_short_ones():
    """looped_cdb admission: overtaken at most eight times."""
    requests = [{"id": "keep", "prompt": 6, "depths": [4] * 20}, {"id": "long", "prompt": 24, "depths": [4]}]
    requests += [{"id": f"s{i}", "prompt": 2, "depths": [1] * (1 + i % 3)} for i in range(50)]
    case = {
        "mode": "refill", "W": 4, "K": 1, "M": 64, "S": 1, "rho": None, "rmax": 4, "resident": False, "planes": "mixed",
        "kv": {"blocks": 14, "block_tokens": 2, "preemption": "offload"}, "requests": requests,
    }  # fmt: skip
    order = [
        row["request"] for entry in run_case(case) if entry["stage"] == "prefill" for row in entry["rows"]
    ]
    assert order[0] == "keep"
    assert order.index("long") - 1 == 8


def test_23_the_planner_costs_what_its_rows_cost():
    """seal-rg #33: lines executed, not time. Waiting requests cost nothing, 1,024 rows at most 17 times 64."""

    def lines(rows, waiting):
        planner = planner_of(
            *(DepthRequest(id=f"r{i}", prompt=1, decode_tokens=9) for i in range(rows + waiting)), width=rows
        )
        while (batch := planner.plan()).stage is not Stage.RECURRENT:
            planner.apply(batch)
        planner.apply(batch)
        count = 0

        def trace(_frame, event, _arg):
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            planner.apply(planner.plan())
        finally:
            sys.settrace(before)
        return count

    assert abs(lines(64, 0) - lines(64, 5_000)) <= 4
    assert lines(1024, 0) <= 17 * lines(64, 0)
    assert lines(64, 0) <= 64 * 16


def test_24_first_then_shared_planes():
    """llama.cpp #18680, beellama.cpp #100."""
    shared = replace(OURO, layout=LoopLayout.FIRST_THEN_SHARED)
    assert [shared.plane_of(loop) for loop in range(1, 5)] == [0, 1, 1, 1]
    with pytest.raises(UsageError, match="min_depth must be at least 2 with layout first_then_shared, got 1"):
        planner_of(layout=LoopLayout.FIRST_THEN_SHARED)
    with pytest.raises(UsageError, match=re.escape("depths of 'A' must be in 2..4, got 1")):
        planner_of(DepthRequest.recorded("A", 1, [1]), layout=LoopLayout.FIRST_THEN_SHARED, lookahead=True)


def test_25_no_planner_depends_on_a_model_library():
    """Ouro on transformers 4.55 and 5.x: a matter of adapters. Planner and simulator run where torch cannot be imported."""
    program = (
        "import sys\n"
        "for name in ('torch', 'triton', 'transformers', 'matplotlib', 'rich'): sys.modules[name] = None\n"
        "import hybridkv.schedule.depth, hybridkv.schedule.latency, hybridkv.schedule.bounds, hybridkv.schedule.exits\n"
        "import hybridkv.simulate.depth, hybridkv.simulate.depth_plot, hybridkv.simulate.depth_timeline\n"
        "import hybridkv.cli.depth, hybridkv.testing.depth_cases\n"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


CASES = {case["name"]: case["case"] for case in GOLDEN["cases"]}


def test_every_scenario_has_a_test():
    numbers = {int(match.group(1)) for name in globals() if (match := re.match(r"test_(\d+)_", name))}
    assert numbers == set(range(1, 26))
