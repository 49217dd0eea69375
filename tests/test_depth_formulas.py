"""Formulas against the goldens: gates, buckets, bounds, B*, fits."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.alloc.planes import PlaneTable
from hybridkv.errors import UsageError
from hybridkv.geometry import AttentionSpec, LoopLayout, LoopSpec, ModelGeometry
from hybridkv.schedule.bounds import COSTS, flop_bound, prefill_corrected
from hybridkv.schedule.buckets import bucket_of, bucket_sizes
from hybridkv.schedule.depth import run_case
from hybridkv.schedule.exits import (
    ExitRouter,
    Hazard,
    PreLoop,
    Recorded,
    Threshold,
    effective_depth,
    first_signal,
)
from hybridkv.schedule.latency import LATENCIES, StepCost, fit_step, solve_step
from tests.conftest import load_golden

GOLDEN = load_golden("depth_batching")
FORMULAS = GOLDEN["formulas"]
ONE_LINE = GOLDEN["one_line"]
NAMES = {"ouro_1_4b": "ouro-1.4b", "ouro_2_6b": "ouro-2.6b", "huginn_2_4_2": "huginn-3.5b", "huginn_1_4_1": "huginn-1-4-1", "huginn_0_4_0": "huginn-0-4-0"}  # fmt: skip


@pytest.mark.parametrize(
    "row", FORMULAS["flop_bound"]["values"], ids=lambda row: f"{row['model']}-{row['mean_depth']}"
)
def test_flop_bound(row):
    costs = COSTS[NAMES[row["model"]]]
    assert (costs.outside, costs.per_loop, costs.max_loops) == (row["f0"], row["fr"], row["rmax"])
    assert costs.bound(row["mean_depth"]) == pytest.approx(
        row["bound"], abs=FORMULAS["flop_bound"]["tolerance"]
    )


@pytest.mark.parametrize("row", FORMULAS["prefill_corrected"]["values"], ids=str)
def test_prefill_corrected_bound(row):
    corrected = prefill_corrected(row["bound"], row["prefill_share"], row["first_share"])
    assert corrected == pytest.approx(row["corrected"], abs=FORMULAS["prefill_corrected"]["tolerance"])


@pytest.mark.parametrize("row", FORMULAS["b_star"]["values"], ids=str)
def test_b_star(row):
    cost = StepCost(row["delta"], row["gamma"], row["kappa"])
    assert cost.b_star(row["context"]) == pytest.approx(row["b_star"], abs=FORMULAS["b_star"]["tolerance"])
    preset = LATENCIES[NAMES[row["model"]]].loop
    assert preset.b_star(row["context"]) == pytest.approx(row["b_star"], abs=FORMULAS["b_star"]["tolerance"])


@pytest.mark.parametrize("row", FORMULAS["solve_step"]["values"], ids=str)
def test_solve_step(row):
    cost = solve_step(1.0, (128, row["b_star_128"]), (8192, row["b_star_8192"]))
    near = pytest.approx
    rel = FORMULAS["solve_step"]["relative_tolerance"]
    assert 1 / cost.gamma == near(row["delta_over_gamma"], rel=rel)
    assert 1 / cost.kappa == near(row["delta_over_kappa"], rel=rel)
    assert (cost.b_star(512), cost.b_star(2048)) == near((row["b_star_512"], row["b_star_2048"]), rel=rel)


def test_two_b_star_that_no_step_has():
    with pytest.raises(UsageError, match="gamma must be positive"):
        solve_step(1.0, (128, 140), (8192, 2.1))
    with pytest.raises(UsageError, match=r"B\* must fall with context"):
        solve_step(1.0, (128, 3), (8192, 140))


@given(st.floats(0.1, 10), st.floats(0.001, 0.1), st.floats(1e-6, 1e-3), st.integers(0, 2**32))
def test_a_fit_finds_the_law_behind_rows(delta, gamma, kappa, seed):
    law = StepCost(delta, gamma, kappa)
    exact = [(b, c, law.time(b, b * c)) for b in (1, 8, 32, 64) for c in (128, 512, 8192)]
    fit = fit_step(exact)
    assert (fit.cost.delta, fit.cost.gamma, fit.cost.kappa) == pytest.approx((delta, gamma, kappa), rel=1e-5)
    assert fit.r_squared == pytest.approx(1)
    assert np.abs(fit.residuals).max() < 1e-9 * max(t for *_, t in exact)
    noise = np.random.default_rng(seed).normal(0, 0.01, len(exact))
    noisy = fit_step([(b, c, t + e) for (b, c, t), e in zip(exact, noise, strict=True)])
    assert noisy.residuals.std() <= noise.std() * 1.0001
    assert abs(noisy.residuals.sum()) < 1e-6 * sum(t for *_, t in exact)


def test_a_fit_needs_variation():
    with pytest.raises(UsageError, match="measured must vary in rows and in context, got 2 rows of rank 2"):
        fit_step([(1, 128, 1.0), (2, 128, 2.0)])


def test_bounds_refuse_nonsense():
    with pytest.raises(UsageError, match=r"mean_depth must be in \(0, 4\], got 5"):
        flop_bound(1, 1, 4, 5)
    with pytest.raises(UsageError, match=r"prefill_share must be in \[0, 1\], got 1.5"):
        prefill_corrected(2, 1.5)
    with pytest.raises(UsageError, match=r"first_share must be below 1 / bound = 0\.5, got 0\.5"):
        prefill_corrected(2, 0.1, 0.5)


def test_buckets():
    golden = ONE_LINE["buckets"]
    assert list(bucket_sizes(golden["width"])) == golden["sizes"]
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(5) == (1, 2, 4, 5)
    assert bucket_sizes(600)[-4:] == (512, 544, 576, 600)
    assert bucket_sizes(300)[-4:] == (256, 272, 288, 300)
    with pytest.raises(UsageError, match=r"rows must be in 1..64, got 65"):
        bucket_of(bucket_sizes(64), 65)


@given(st.integers(1, 1100), st.data())
def test_a_bucket_is_the_smallest_that_holds(width, data):
    sizes = bucket_sizes(width)
    rows = data.draw(st.integers(1, width))
    bucket = bucket_of(sizes, rows)
    assert rows <= bucket
    assert not [size for size in sizes if rows <= size < bucket]


def test_hazard_gate():
    golden = ONE_LINE["hazard"]
    logits = [math.log(h / (1 - h)) for h in golden["hazards"]]
    gate = Hazard(golden["q"])
    survival, fired = gate.step(gate.step(gate.start, logits[0])[0], logits[1])
    assert 1 - survival == pytest.approx(golden["cdf_at_2"])
    assert fired
    assert first_signal(gate, logits) == golden["signal"]
    floor = golden["rmin_signal"]
    assert effective_depth(2, golden["rmax"], floor=floor) == golden["depth"]
    assert effective_depth(2, golden["rmax"], floor=floor, delay=1) == golden["depth_lookahead"]
    assert first_signal(Hazard(1.0), [50.0] * 9) is None
    assert Hazard(0.5).step(1.0, -800.0)[0] == pytest.approx(1.0)


def test_a_gate_accumulates_below_the_floor():
    """D2: early loops count towards the sum although their signals are not heeded."""
    assert first_signal(Hazard(0.5), [math.log(0.3 / 0.7)] * 2) == 2
    assert effective_depth(first_signal(Hazard(0.25), [math.log(0.3 / 0.7)] * 3), 4, floor=3) == 3


def test_threshold_gate():
    assert first_signal(Threshold(0.5), [math.nan, 0.5, 0.49]) == 3
    assert first_signal(Threshold(0.5), [math.nan, 0.6]) is None
    assert effective_depth(2, 16, delay=1) == 3


@pytest.mark.parametrize("row", ONE_LINE["distribution"], ids=str)
def test_pre_loop_distribution(row):
    signal = PreLoop(row["q"]).signal(row["pdf"])
    assert effective_depth(signal, len(row["pdf"]), floor=row["floor"], delay=row["delay"]) == row["depth"]
    assert PreLoop(1.0).signal(row["pdf"]) is None


def test_recorded_gate():
    assert first_signal(Recorded(), [3.0] * 9) == 3
    assert first_signal(Recorded(), [math.nan] * 9) is None


@pytest.mark.parametrize("lookahead", [False, True])
@given(
    st.lists(st.lists(st.floats(-3, 3), min_size=6, max_size=6), min_size=1, max_size=6),
    st.floats(0.05, 1.1),
    st.booleans(),
)
def test_a_router_gives_effective_depths(lookahead, readings, q, early):
    """Row by row the online depth is that of D2, whoever shares the batch."""
    from tests.test_depth_scenarios import batch_of

    gate, rows = Hazard(q), [(f"r{i}", i, i) for i in range(len(readings))]
    router = ExitRouter(gate, max_loops=6, min_signal=2, lookahead=lookahead)
    router.begin(batch_of(1, *rows))
    depths, inside = {}, rows
    for loop in range(1, 7):
        batch = batch_of(loop, *inside)
        if not inside:
            break
        if lookahead and early:
            gone = router.exits(batch)
            router.observe(batch, [readings[i][loop - 1] for _, i, _ in inside])
        else:
            router.observe(batch, [readings[i][loop - 1] for _, i, _ in inside])
            gone = router.exits(batch)
        depths |= dict.fromkeys(gone, loop)
        inside = [row for row in inside if row[0] not in gone]
    for name, i, _ in rows:
        signal = first_signal(gate, readings[i])
        assert depths[name] == effective_depth(signal, 6, floor=2, delay=int(lookahead))


@pytest.mark.parametrize("row", ONE_LINE["fill_last_exited"], ids=str)
def test_last_exited_fill(row):
    depth = row["exit_depth"]
    for layout in LoopLayout:
        loop = LoopSpec(prelude=0, core=1, coda=0, max_loops=row["rmax"], layout=layout)
        attention = AttentionSpec(layers=1, kv_heads=1, key_dim=8, value_dim=8)
        geometry = ModelGeometry(name="core", layers=1, attention=attention, recurrent=None, loop=loop)
        fill = PlaneTable(geometry).fill(0, depth)
        if layout is not LoopLayout.LAST_EXITED or not row["target_planes"]:
            assert fill is None
        else:
            assert fill.source.tolist() == [row["source_plane"]]
            assert fill.destinations.ravel().tolist() == row["target_planes"]


def test_reserve_admission():
    golden = ONE_LINE["reserve"]
    requests = [
        {"id": r["id"], "prompt": r["prompt"], "depths": [4] * (r["outputs"] - 1)} for r in golden["requests"]
    ]
    case = {
        "mode": "refill", "W": 3, "K": 1, "M": 64, "S": 1, "rho": 0.5, "rmax": 4, "resident": False, "planes": "mixed",
        "kv": {"blocks": golden["blocks"], "block_tokens": golden["block_tokens"], "preemption": "none", "admission": "reserve"},
        "requests": requests,
    }  # fmt: skip
    trace = run_case(case)
    assert [row["request"] for row in trace[0]["rows"]] == golden["admitted"]
    later = [entry for entry in trace if entry["stage"] == "prefill"][1]
    assert [row["request"] for row in later["rows"]] == [golden["refused"]]
    assert not [entry for entry in trace if entry["stage"] == "stall"]
