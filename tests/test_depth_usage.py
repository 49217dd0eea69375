"""Wrong use of the depth planner: a clear error, and nothing has changed."""

import re

import pytest

from hybridkv.errors import OutOfMemory, UnsupportedError, UsageError
from hybridkv.schedule.depth import DepthConfig, DepthPlanner, DepthRequest, KVPool, Stage, run_case
from hybridkv.schedule.depth.state import Live

CASE = {
    "mode": "refill", "W": 2, "K": 1, "M": 8, "S": 1, "rho": None, "rmax": 4, "resident": False, "planes": "mixed",
    "kv": None, "requests": [{"id": "A", "prompt": 3, "depths": [2, 4]}],
}  # fmt: skip
POOL = {"blocks": 4, "block_tokens": 2, "preemption": "none"}


def request(name="A", prompt=3, depths=(2, 4)):
    return DepthRequest.recorded(name, prompt, depths)


def planner(**changes):
    return DepthPlanner(DepthConfig(**{"mode": "refill", "width": 2, "max_loops": 4} | changes))


def snapshot(planner):
    """Everything that a planner holds, as plain values."""

    def plain(value):
        if isinstance(value, Live):
            return [value.id, *(plain(getattr(value, slot)) for slot in Live.__slots__)]
        if isinstance(value, dict):
            return [(key, plain(item)) for key, item in value.items()]
        if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
            return repr(value) if not hasattr(value, "__dict__") else None
        return [plain(item) for item in value]

    state = {name: plain(value) for name, value in vars(planner._state).items()}
    return state, list(planner._flights), planner._codas, planner._number


def advance(planner, stage):
    """Apply launches until one of `stage` is planned; that one stays outstanding."""
    while (batch := planner.plan()).stage is not stage:
        planner.apply(batch)
    return batch


BAD_CASES = {
    "K above W": ({"K": 3}, "min_coda must be at most the width 2, got 3"),
    "S above W": ({"S": 3}, "open_slots must be at most the width 2, got 3"),
    "rho of 1": ({"rho": 1.0}, "headroom must be in [0, 1), got 1.0"),
    "negative rho": ({"rho": -0.1}, "headroom must be in [0, 1), got -0.1"),
    "W of 0": ({"W": 0}, "width must be a positive integer, got 0"),
    "K of 0": ({"K": 0}, "min_coda must be a positive integer, got 0"),
    "M of 0": ({"M": 0}, "prefill_tokens must be a positive integer, got 0"),
    "S of 0": ({"S": 0}, "open_slots must be a positive integer, got 0"),
    "rmax of 0": ({"rmax": 0}, "max_loops must be a positive integer, got 0"),
    "mode": ({"mode": "fill"}, "mode must be one of cb, norefill, refill, got 'fill'"),
    "planes": ({"planes": "any"}, "planes must be one of mixed, aged, fifo, got 'any'"),
    "knob": ({"knobs": {"lag": 1}}, "knobs must be among age_bound, idle_order, max_prefill_run, retire_lag, got lag"),
    "lag of 2": ({"knobs": {"retire_lag": 2}}, "retire_lag must be 0 or 1, got 2"),
    "depth beyond rmax": ({"requests": [{"id": "A", "prompt": 3, "depths": [2, 5]}]}, "depths of 'A' must be in 1..4, got 5"),
    "depth of 0": ({"requests": [{"id": "A", "prompt": 3, "depths": [0]}]}, "depths of 'A' must be in 1..4, got 0"),
    "signal of 0": ({"requests": [{"id": "A", "prompt": 3, "signals": [0]}]}, "signal must be a loop of at least 1 or None, got 0"),
    "empty prompt": ({"requests": [{"id": "A", "prompt": 0, "depths": []}]}, "prompt of 'A' must be a positive integer, got 0"),
    "one id twice": ({"requests": CASE["requests"] * 2}, "requests must have distinct ids, got one twice"),
    "resident, pool": ({"resident": True, "kv": POOL}, "pool must be None for resident requests, got a pool"),
    "resident, D of 0": (
        {"resident": True, "requests": [{"id": "A", "prompt": 3, "depths": []}]},
        "decode_tokens of resident 'A' must be a positive integer, got 0",
    ),
    "recompute of last_exited": (
        {"layout": "last_exited", "kv": {**POOL, "preemption": "recompute"}},
        "preemption must be none or offload with layout last_exited, got recompute",
    ),
    "first_then_shared with depth 1": ({"layout": "first_then_shared"}, "min_depth must be at least 2 with layout first_then_shared, got 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CASES)
def test_bad_cases_are_refused(name):
    changes, message = BAD_CASES[name]
    with pytest.raises(UsageError, match="^" + re.escape(message)):
        run_case(CASE | changes)


def test_a_pool_too_small_for_one_request():
    small = CASE | {"kv": {**POOL, "blocks": 2}}
    with pytest.raises(OutOfMemory, match="request 'A' must need at most 2 blocks, got 3") as caught:
        run_case(small)
    assert (caught.value.needed, caught.value.obtainable) == (3, 2)
    reserved = CASE | {"kv": {**POOL, "blocks": 3, "block_tokens": 1, "admission": "reserve"}}
    with pytest.raises(OutOfMemory, match="at most 3 blocks, got 6"):
        run_case(reserved)


def test_refused_requests_leave_no_trace():
    p = planner(pool=KVPool(blocks=4, block_tokens=2, preemption="offload"))
    p.submit(request())
    before = snapshot(p)
    for bad, error, message in (
        (request(), UsageError, "request id must be unused, got 'A', which is still live"),
        (request("B", depths=(9,)), UsageError, "depths of 'B' must be in 1..4, got 9"),
        (request("B", prompt=90), OutOfMemory, "request 'B' must need at most 4 blocks, got 46"),
        (DepthRequest(id="B", prompt=1, decode_tokens=3, depths=[1]), UsageError, "depths of 'B' must have 3 entries, got 1"),
    ):  # fmt: skip
        with pytest.raises(error, match=re.escape(message)):
            p.submit(bad)
    with pytest.raises(UsageError, match="pool must be None for resident requests"):
        p.seat([request("C")])
    assert snapshot(p) == before
    q = planner(width=1)
    for bad, message in (
        ([request("A"), request("B")], "resident requests must be at most 1, got 2 more"),
        ([request("A", depths=())], "decode_tokens of resident 'A' must be at least 1, got 0"),
    ):
        with pytest.raises(UsageError, match=message):
            q.seat(bad)
    assert q.idle
    assert q.unfinished == 0


def test_refused_results_leave_no_trace():
    p = planner()
    p.submit(request("A"))
    p.submit(request("B"))
    batch = advance(p, Stage.RECURRENT)
    before = snapshot(p)
    for exits, finishes, message in (
        (["Z"], (), "exits must name rows of the launch, got ['Z']"),
        (None, ["Z"], "finishes must name live requests, got 'Z', which has finished or never was"),
        (None, ["A", "A"], "finishes must name each request once, got ['A', 'A']"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            p.apply(batch, exits, finishes)
        assert snapshot(p) == before
    with pytest.raises(UsageError, match="plan must follow apply"):
        p.plan()
    with pytest.raises(UsageError, match="batch must be planned and not yet applied"):
        p.apply(batch._replace(rows=batch.rows[:1]))
    assert snapshot(p) == before
    p.apply(batch)
    with pytest.raises(UsageError, match="batch must be planned and not yet applied, got number"):
        p.apply(batch)


def test_exits_belong_to_recurrent_launches():
    p = planner()
    p.submit(request("A"))
    batch = advance(p, Stage.PRELUDE)
    before = snapshot(p)
    with pytest.raises(UsageError, match="exits must be empty for a prelude launch, got"):
        p.apply(batch, ["A"])
    assert snapshot(p) == before


@pytest.mark.parametrize("lag", [0, 1])
def test_nobody_finishes_twice(lag):
    p = planner(retire_lag=lag)
    p.submit(request("A"))
    p.submit(request("B", depths=(2, 4, 4)))
    p.apply(advance(p, Stage.CODA), finishes=["A"])
    before = snapshot(p)
    for call in (lambda: p.end(["A"]), lambda: p.end(["B", "A"])):
        with pytest.raises(UsageError, match="finishes must name live requests, got 'A'"):
            call()
    assert snapshot(p) == before
    p.end(["B"])
    with pytest.raises(UsageError, match="finishes must name live requests, got 'B'"):
        p.end(["B"])
    while p.unfinished:
        batch = p.plan()
        assert batch is None or not {row.request for row in batch.rows}


def test_without_a_policy_running_out_is_an_error():
    golden = CASE | {
        "W": 2, "M": 64, "kv": {"blocks": 5, "block_tokens": 2, "preemption": "none"},
        "requests": [{"id": "A", "prompt": 2, "depths": [1, 2, 1, 2, 1]}, {"id": "B", "prompt": 2, "depths": [2, 1, 2, 1, 2]}],
    }  # fmt: skip
    with pytest.raises(
        OutOfMemory, match="free blocks must reach 1 for the next token, got 0 with 2 residents"
    ):
        run_case(golden)
    with pytest.raises(
        UnsupportedError, match="recompute must not change KV, got 'A', whose tokens left before loop 4"
    ):
        run_case(golden | {"kv": {**golden["kv"], "preemption": "recompute"}})


def test_widths_are_clamped_in_order():
    clamped = planner(width=64, prefill_tokens=16, min_coda=32, open_slots=48).config
    assert (clamped.width, clamped.min_coda, clamped.open_slots) == (16, 16, 16)
    assert planner(width=64, prefill_tokens=16).config.open_slots == 2
    assert planner(width=7).config.open_slots == 1
    wide, narrow = ({**CASE, "W": width, "M": 2} for width in (6, 2))
    assert run_case(wide) == run_case(narrow)
