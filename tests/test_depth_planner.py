"""Rules that no golden schedule covers: knobs (D36, D37), codas in flight (D40), explicit exits, what a batch says."""

import pytest

from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.schedule.depth import DepthConfig, DepthPlanner, DepthRequest, KVPool, Stage, run_case

BASE = {
    "mode": "refill", "W": 2, "K": 1, "M": 8, "S": 1, "rho": None, "rmax": 4, "resident": False, "planes": "mixed", "kv": None,
}  # fmt: skip


def stages(case):
    return [entry["stage"] for entry in run_case(case)]


def planner_of(*requests, **config):
    planner = DepthPlanner(DepthConfig(**{"mode": "refill", "width": 4, "max_loops": 4} | config))
    for request in requests:
        planner.submit(request)
    return planner


def step_to(planner, stage):
    while (batch := planner.plan()).stage is not stage:
        planner.apply(batch)
    return batch


def test_idle_order():
    """D36: with the core empty and fewer than K in the coda, prefill goes first, or the coda."""
    case = BASE | {
        "K": 2, "requests": [{"id": "A", "prompt": 1, "depths": [2]}, {"id": "B", "prompt": 1, "depths": [1, 1]}],
    }  # fmt: skip
    case["requests"][1]["arrive"] = 4
    first, coda = (
        stages(case | {"knobs": {"idle_order": order}}) for order in ("prefill_first", "coda_first")
    )
    assert first[:6] == ["prefill", "prelude", "recurrent", "recurrent", "prefill", "prelude"]
    assert coda[:6] == ["prefill", "prelude", "recurrent", "recurrent", "coda", "prefill"]


def test_prefills_in_a_row():
    """D36: with n = 1 a loop runs between two prefills while the core has work."""
    requests = [{"id": f"r{i}", "prompt": 8, "depths": [4]} for i in range(4)]
    case = BASE | {"W": 4, "requests": requests}
    assert stages(case)[:5] == ["prefill", "prelude"] * 2 + ["prefill"]
    limited = stages(case | {"knobs": {"max_prefill_run": 1}})
    assert limited[:6] == ["prefill", "prelude", "recurrent", "prefill", "prelude", "recurrent"]


def test_a_finished_request_leaves_one_launch_late():
    """D37: its slot is taken after the launch that follows its last."""
    requests = [
        {"id": "A", "prompt": 1, "depths": [1]}, {"id": "B", "prompt": 1, "depths": [4]}, {"id": "C", "prompt": 1, "depths": []},
    ]  # fmt: skip

    def launches_until_c(lag):
        trace = run_case(BASE | {"requests": requests, "knobs": {"retire_lag": lag}})
        done = next(i for i, entry in enumerate(trace) if "A" in entry["done"])
        return next(i for i, e in enumerate(trace) if e["rows"][0]["request"] == "C") - done

    assert launches_until_c(0) == 1
    assert launches_until_c(1) == 2


def test_retirements_pending_with_nothing_to_launch():
    """D37: they happen at once; nobody is preempted."""
    trace = run_case(
        BASE
        | {
            "W": 1,
            "requests": [{"id": n, "prompt": 1, "depths": []} for n in "AB"],
            "knobs": {"retire_lag": 1},
        }
    )
    assert [entry["stage"] for entry in trace] == ["prefill", "prefill"]


def test_at_most_two_codas_are_in_flight():
    """D40: the next launch is planned while codas run; with two out and nothing else, the planner waits."""
    planner = planner_of(*(DepthRequest.recorded(f"r{i}", 1, [1 + i] * 2) for i in range(3)), width=3)
    codas = [step_to(planner, Stage.CODA)]
    planner.apply(planner.plan())
    codas.append(planner.plan())
    assert [batch.stage for batch in codas] == [Stage.CODA, Stage.CODA]
    recurrent = planner.plan()
    assert (recurrent.stage, len(recurrent.rows)) == (Stage.RECURRENT, 1)
    planner.apply(recurrent)
    assert planner.queues.coda == 1
    assert planner.plan() is None
    planner.apply(codas[1])
    assert planner.plan().stage is Stage.PRELUDE
    one = planner_of(DepthRequest.recorded("A", 1, [1, 1]), codas_in_flight=1)
    coda = step_to(one, Stage.CODA)
    assert one.plan() is None
    one.apply(coda)
    assert one.plan().stage is Stage.PRELUDE


def test_an_end_while_its_coda_is_in_flight_emits_nothing():
    planner = planner_of(DepthRequest.recorded("A", 1, [1] * 3), DepthRequest.recorded("B", 1, [2]))
    coda = step_to(planner, Stage.CODA)
    planner.end(["A"])
    entry = planner.apply(coda)
    assert (entry.counts.emitted, entry.done) == (0, ())
    assert planner.unfinished == 1


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.PRELUDE, Stage.RECURRENT])
def test_an_end_at_any_time_frees_everything(stage):
    """Also a way to cancel: waiting, mid-prompt, staged or inside a launch."""
    pool = KVPool(blocks=9, block_tokens=2, preemption="offload")
    planner = planner_of(
        *(DepthRequest.recorded(f"r{i}", 5, [2, 2]) for i in range(4)), pool=pool, width=2, prefill_tokens=3
    )
    batch = step_to(planner, stage)
    planner.end(["r0", "r1", "r2", "r3"])
    planner.apply(batch)
    assert planner.plan() is None
    assert (planner.unfinished, planner.queues.free, planner.idle) == (0, 9, True)
    planner.submit(DepthRequest.recorded("r0", 1, []))
    assert planner.plan().stage is Stage.PREFILL


def test_explicit_exits_replace_recorded_depths():
    planner = planner_of(
        DepthRequest(id="A", prompt=3, decode_tokens=2), DepthRequest(id="B", prompt=1, decode_tokens=1)
    )
    first = step_to(planner, Stage.RECURRENT)
    assert [(row.request, row.position, row.loop, row.plane) for row in first.rows] == [
        ("A", 3, 1, 0),
        ("B", 1, 1, 0),
    ]
    assert (first.bucket, first.queues.core, first.plane) == (2, 0, None)
    entry = planner.apply(first, ["B"])
    assert entry.exits == ("B",)
    coda = planner.plan()
    assert [(row.request, row.loop) for row in coda.rows] == [("B", 1)]
    assert planner.apply(coda).done == ("B",)
    loops = []
    while planner.unfinished:
        batch = planner.plan()
        loops += [row.loop for row in batch.rows if batch.stage is Stage.RECURRENT]
        planner.apply(batch, []) if batch.stage is Stage.RECURRENT else planner.apply(batch)
    assert loops == [2, 3, 4, 1, 2, 3, 4]


def test_finishes_of_the_launch_itself():
    planner = planner_of(DepthRequest.recorded("A", 1, [1] * 9), DepthRequest.recorded("B", 1, [1] * 9))
    prefill = planner.plan()
    assert planner.apply(prefill, finishes=["B"]).done == ("B",)
    entry = planner.apply(step_to(planner, Stage.CODA), finishes=["A"])
    assert (entry.done, entry.counts.emitted, planner.unfinished) == (("A",), 1, 0)


def test_preemptions_and_restores_are_batches():
    pool = KVPool(blocks=5, block_tokens=2, preemption="offload")
    planner = planner_of(
        DepthRequest.recorded("A", 2, [1, 2, 1, 2, 1]), DepthRequest.recorded("B", 2, [2, 1, 2, 1, 2]),
        pool=pool, width=2, open_slots=1,
    )  # fmt: skip
    preempt = step_to(planner, Stage.PREEMPT)
    assert [(row.request, row.position) for row in preempt.rows] == [("A", 4)]
    with pytest.raises(UsageError, match="plan must follow apply"):
        planner.plan()
    assert planner.apply(preempt) is None
    restore = step_to(planner, Stage.RESTORE)
    assert [(row.request, row.position) for row in restore.rows] == [("A", 4)]
    launches = planner.launches
    planner.apply(restore)
    assert planner.launches == launches


@pytest.mark.parametrize("early", [False, True])
def test_recompute_looks_at_exits_that_came_with_apply(early):
    """D35 without recorded depths: what left early counts, not what might have."""
    pool = KVPool(blocks=5, block_tokens=2, preemption="recompute")
    planner = planner_of(
        *(DepthRequest(id=name, prompt=2, decode_tokens=5) for name in "AB"), pool=pool, width=2, open_slots=1
    )

    def serve():
        seen = set()
        while planner.unfinished:
            batch = planner.plan()
            seen.add(batch.stage)
            first = batch.stage is Stage.RECURRENT and {row.loop for row in batch.rows} == {2}
            planner.apply(batch, [row.request for row in batch.rows] if first and early else None)
        return seen

    if early:
        with pytest.raises(UnsupportedError, match="recompute must not change KV"):
            serve()
    else:
        assert Stage.PREEMPT in serve()


def test_a_planner_that_idles_takes_new_work():
    planner = planner_of(DepthRequest.recorded("A", 1, [1]))
    while planner.unfinished:
        planner.apply(planner.plan())
    assert planner.plan() is None
    planner.submit(DepthRequest.recorded("A", 1, [1]))
    batch = planner.plan()
    assert batch.rows[0].serial == 1
    assert batch.graph == (Stage.PREFILL, None, None)
