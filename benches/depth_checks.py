"""The thirty shape checks of depth-batching section 10, as one table: what is claimed, its band, what was seen.

A band is written once and never widened: a check that misses it is reported as missed.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from benches.depth_lab import Lab, bare, idle_latency, knee
from hybridkv.geometry import LoopLayout, LoopSpec
from hybridkv.schedule.bounds import COSTS, flop_bound, prefill_corrected
from hybridkv.schedule.depth import DepthConfig, DepthRequest, Stage, play_case
from hybridkv.schedule.exits import effective_depth
from hybridkv.schedule.latency import LATENCIES, PrefillCost, StepCost, fit_step
from hybridkv.simulate.depth import simulate
from hybridkv.simulate.depth_workload import (
    HUGINN_DEPTHS,
    OURO_DEPTHS,
    WORKLOADS,
    Arrivals,
    DepthMix,
    Lengths,
    Workload,
    draw_workload,
)
from hybridkv.testing.depth_cases import draw_case

OURO, HUGINN = "ouro-1.4b", "huginn-3.5b"
ALL = ("alpaca", "sharegpt", "arxiv")
WIDTHS = (16, 32, 64, 128, 256, 512)


class Seen(NamedTuple):
    """One measured value, and the band that it must lie in."""

    what: str
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        return self.low <= self.value <= self.high


class Check(NamedTuple):
    """A numbered claim. `quick` ones take a second and run with the tests."""

    number: int
    claim: str
    measure: Callable[[Lab], Iterator[Seen]]
    quick: bool


CHECKS: list[Check] = []
INF = float("inf")


def check(number: int, claim: str, *, quick: bool = False):
    def add(measure):
        CHECKS.append(Check(number, claim, measure, quick))
        return measure

    return add


def falling(name: str, values: list[float]) -> Seen:
    """The smallest step down of a sequence that must fall."""
    return Seen(f"{name}: smallest step down", min(a - b for a, b in pairwise(values)), 0, INF)


@check(1, "Ouro refill K=1 over the bound E, three workloads")
def _(lab):
    for workload in ALL:
        yield Seen(workload, lab.bench(OURO, workload).share("refill"), 0.95, 1.00)


@check(2, "Ouro refill speedup over CB")
def _(lab):
    for workload, low, high in (("alpaca", 1.45, 1.58), ("sharegpt", 1.45, 1.58), ("arxiv", 1.28, 1.36)):
        yield Seen(workload, lab.bench(OURO, workload).speedup("refill"), low, high)


@check(3, "Ouro no-refill gains 1.08 to 1.28, less than refill on all workloads")
def _(lab):
    for workload in ALL:
        bench = lab.bench(OURO, workload)
        yield Seen(workload, bench.speedup("norefill"), 1.08, 1.28)
        yield Seen(
            f"{workload}: refill - no-refill", bench.speedup("refill") - bench.speedup("norefill"), 0, INF
        )


@check(4, "Huginn no-refill at least 5 % above refill K=1 on all workloads")
def _(lab):
    for workload in ALL:
        bench = lab.bench(HUGINN, workload)
        yield Seen(workload, bench.speedup("norefill") / bench.speedup("refill"), 1.05, INF)


@check(5, "Huginn no-refill over E")
def _(lab):
    for workload in ALL:
        yield Seen(workload, lab.bench(HUGINN, workload).share("norefill"), 0.83, 0.96)


@check(6, "Huginn at W=64: K=W/4 above K=W/8 above K=1, and K=W/4 above K=W/2")
def _(lab):
    for workload in ("alpaca", "sharegpt"):
        one, eighth, quarter, half = (
            lab.bench(HUGINN, workload).speedup("refill", k) for k in (1, 8, 16, 32)
        )
        yield Seen(f"{workload}: W/4 - W/8", quarter - eighth, 0, INF)
        yield Seen(f"{workload}: W/8 - 1", eighth - one, 0, INF)
        yield Seen(f"{workload}: W/4 - W/2", quarter - half, 0, INF)


@check(7, "Huginn K=W/4 within 5 % of no-refill")
def _(lab):
    for workload in ALL:
        bench = lab.bench(HUGINN, workload)
        yield Seen(
            workload, bench.speedup("refill", bench.width // 4) / bench.speedup("norefill"), 0.95, 1.05
        )


@check(8, "Ouro K=1 at least as good as every larger K (ties within 0.1 %)")
def _(lab):
    for workload in ALL:
        bench = lab.bench(OURO, workload)
        best = max(bench.speedup("refill", bench.width // part) for part in (8, 4, 2))
        yield Seen(workload, bench.speedup("refill") / best, 0.999, INF)


@check(9, "Huginn cut to 0-4-0: K=1 within 2 % of the best K")
def _(lab):
    bench = lab.bench("huginn-0-4-0")
    best = max(bench.speedup("refill", k) for k in (1, 8, 16, 32))
    yield Seen("K=1 over best", bench.speedup("refill") / best, 0.98, 1.0)


@check(10, "K=1 over E: 0-4-0 at least 0.93, 2-4-2 at most 0.80")
def _(lab):
    yield Seen("0-4-0", lab.bench("huginn-0-4-0").share("refill"), 0.93, 1.0)
    yield Seen("2-4-2", lab.bench(HUGINN).share("refill"), 0, 0.80)


@check(11, "boundary share of GPU time: Huginn K=1 about 32 %, K=16 about 16 %; Ouro K=1 about 4 %")
def _(lab):
    for name, model, k, low, high in (
        ("Huginn K=1", HUGINN, 1, 0.30, 0.34),
        ("Huginn K=16", HUGINN, 16, 0.14, 0.18),
        ("Ouro K=1", OURO, 1, 0.03, 0.05),
    ):
        steady = lab.bench(model).run("refill", k).steady
        yield Seen(name, steady.share(steady.boundary), low, high)


@check(12, "at full depth no-refill equals CB; refill within 0.1 % of CB, never above")
def _(lab):
    for name, model, loops in (("Ouro", OURO, 4), ("Huginn", HUGINN, 16)):
        for workload in ("alpaca", "sharegpt"):
            bench = lab.bench(model, workload, depths=DepthMix(loops, (1.0,)))
            yield Seen(f"{name} {workload} no-refill", bench.speedup("norefill"), 1 - 1e-9, 1 + 1e-9)
            yield Seen(f"{name} {workload} refill", bench.speedup("refill"), 0.999, 1 + 1e-9)


@check(13, "Ouro speedup falls with mean depth: 1.540, 1.388, 1.226, 1.071, 1.000 at 2.4, 2.7, 3.1, 3.6, 4.0")
def _(lab):
    mixes = (
        (OURO_DEPTHS.weights, 1.540), ((0.5, 0.3, 0.2), 1.388), ((0.3, 0.3, 0.4), 1.226), ((0.1, 0.2, 0.7), 1.071),
        ((0.0, 0.0, 1.0), 1.000),
    )  # fmt: skip
    seen = []
    for weights, expected in mixes:
        seen.append(lab.bench(OURO, depths=DepthMix(2, weights)).speedup("refill"))
        mean = sum(depth * weight for depth, weight in enumerate(weights, 2))
        yield Seen(f"mean depth {mean:.1f}", seen[-1], expected - 0.02, expected + 0.02)
    yield falling("speedup", seen)


@check(14, "Ouro: refill minus no-refill narrows with W, 0.41 at 16 to 0.08 at 512")
def _(lab):
    gaps = [
        lab.bench(OURO, width=w).speedup("refill") - lab.bench(OURO, width=w).speedup("norefill")
        for w in WIDTHS
    ]
    yield falling("gap", gaps)
    yield Seen("W=16", gaps[0], 0.37, 0.45)
    yield Seen("W=512", gaps[-1], 0.04, 0.12)


@check(15, "Huginn: K=W/4 minus K=1 shrinks from W=32 up: 0.26, 0.21, 0.15, 0.09, 0.05; 0.24 at 16")
def _(lab):
    gaps = [
        lab.bench(HUGINN, width=w).speedup("refill", w // 4) - lab.bench(HUGINN, width=w).speedup("refill")
        for w in WIDTHS
    ]
    yield falling("gap from W=32", gaps[1:])
    for width, gap, expected in zip(WIDTHS, gaps, (0.24, 0.26, 0.21, 0.15, 0.09, 0.05), strict=True):
        yield Seen(f"W={width}", gap, expected - 0.03, expected + 0.03)


@check(16, "ArXiv has the largest prefill share (Ouro about .37) and the lowest E")
def _(lab):
    benches = {workload: lab.bench(OURO, workload) for workload in ALL}
    yield Seen("alpha, ArXiv", benches["arxiv"].alpha, 0.35, 0.39)
    others = [benches["alpaca"], benches["sharegpt"]]
    yield Seen("alpha, ArXiv - next", benches["arxiv"].alpha - max(b.alpha for b in others), 0, INF)
    yield Seen("E, next - ArXiv", min(b.bound for b in others) - benches["arxiv"].bound, 0, INF)


@check(17, "Ouro's prefill share grows with W on ShareGPT, .049 at 16 to .116 at 512")
def _(lab):
    shares = [lab.bench(OURO, width=w).alpha for w in WIDTHS]
    yield falling("alpha, from W=512 down", shares[::-1])
    yield Seen("W=16", shares[0], 0.039, 0.059)
    yield Seen("W=512", shares[-1], 0.096, 0.136)


@check(18, "S is best near W/8 to W/4: Ouro Alpaca tokens/s 1876, 2800, 3052, 3082, 2807, 699 at S = 1 to 64")
def _(lab):
    expected = {1: 1876, 4: 2800, 8: 3052, 16: 3082, 32: 2807, 64: 699}
    seen = {slots: lab.bench(OURO, "alpaca").run("refill", 1, slots).throughput for slots in expected}
    yield Seen("best S", max(seen, key=seen.__getitem__), 8, 16)
    for slots, tokens in seen.items():
        yield Seen(f"S={slots}", tokens, 0.9 * expected[slots], 1.1 * expected[slots])


@check(19, "mean recurrent batch over W: refill K=1 above 0.9, no-refill 0.5 to 0.7")
def _(lab):
    for name, model in (("Ouro", OURO), ("Huginn", HUGINN)):
        bench = lab.bench(model)
        yield Seen(f"{name} refill", bench.run("refill").steady.mean_rows(Stage.RECURRENT) / 64, 0.9, 1.0)
        yield Seen(
            f"{name} no-refill", bench.run("norefill").steady.mean_rows(Stage.RECURRENT) / 64, 0.5, 0.7
        )


@check(20, "mean coda batch: K=1 Ouro about 25, Huginn about 6; no-refill about 60")
def _(lab):
    for name, model, low, high in (("Ouro", OURO, 22, 28), ("Huginn", HUGINN, 5, 7)):
        bench = lab.bench(model)
        yield Seen(f"{name} K=1", bench.run("refill").steady.mean_rows(Stage.CODA), low, high)
        yield Seen(f"{name} no-refill", bench.run("norefill").steady.mean_rows(Stage.CODA), 57, 64)


@check(21, "bucket padding costs below 2 % of the time")
def _(lab):
    for name, model in (("Ouro", OURO), ("Huginn", HUGINN)):
        for mode in ("norefill", "refill"):
            steady = lab.bench(model).run(mode).steady
            yield Seen(f"{name} {mode}", steady.share(steady.padding), 0, 0.02)


@check(22, "lookahead never lowers a depth, raises each by at most 1, leaves rmax tokens alone", quick=True)
def _(_lab):
    raised = {
        (sync, effective_depth(signal, loops, floor=floor, delay=1) - sync, loops)
        for loops in range(1, 17)
        for floor in range(1, loops + 1)
        for signal in (None, *range(1, loops + 1))
        for sync in (effective_depth(signal, loops, floor=floor),)
    }
    yield Seen("smallest raise", min(by for _, by, _ in raised), 0, 0)
    yield Seen("largest raise", max(by for _, by, _ in raised), 1, 1)
    yield Seen("largest raise at rmax", max(by for depth, by, loops in raised if depth == loops), 0, 0)


@check(23, "rows, tokens and coda rows do not depend on mode, K, S and M: 200 random cases", quick=True)
def _(_lab):
    import random

    differing = 0
    for seed in range(200):
        rng = random.Random(f"check 23, {seed}")
        case = {**draw_case(rng), "kv": None, "knobs": None}
        totals = set()
        for mode, k, slots, tokens in (
            ("refill", 1, 1, 8192),
            ("refill", case["K"], case["S"], 3),
            ("norefill", 1, 1, 5),
        ):
            entries = []
            play_case({**case, "mode": mode, "K": k, "S": slots, "M": max(tokens, case["W"])}, entries.append)
            rows = sum(e.counts.rows for e in entries if e.stage is Stage.RECURRENT)
            codas = sum(e.counts.rows for e in entries if e.stage is Stage.CODA)
            totals.add((rows, codas, sum(e.counts.emitted for e in entries)))
        differing += len(totals) > 1
    yield Seen("cases that differ", differing, 0, 0)


@check(24, "B*(L) falls with L; regressing simulated loop times on B returns 140 at L = 128", quick=True)
def _(_lab):
    loop = LATENCIES[OURO].loop
    yield falling("B*", [loop.b_star(context) for context in (128, 512, 2048, 8192)])
    times = []
    for rows in (1, 8, 16, 32, 64, 96, 128):
        requests = tuple(DepthRequest.recorded(f"r{row}", 126, bytes([4])) for row in range(rows))
        config = DepthConfig(mode="refill", width=rows, max_loops=4, prefill_tokens=126 * rows)
        seen = []
        simulate(Arrivals(requests, (0.0,) * rows), config, LATENCIES[OURO], seen.append)
        times += [(rows, launch.duration_s * 1e3) for launch in seen if launch.batch.stage is Stage.RECURRENT]
    slope, intercept = np.polyfit(*np.array(times).T, 1)
    # 126 prompt tokens and the one being computed: contexts of 127
    yield Seen("intercept over slope", intercept / slope, 139, 141)
    fit = fit_step(
        [(b, context, loop.time(b, b * context)) for b in (1, 16, 64) for context in (128, 2048, 8192)]
    )
    yield Seen("B* at 128 of a fit over contexts", fit.cost.b_star(128), 139, 141)


@check(
    25,
    "T(r) is linear, R2 >= .999; intercept 0.40 ms (Ouro), 2.8 / 3.3 ms (Huginn at 128 / 8192)",
    quick=True,
)
def _(_lab):
    for name, model, context, expected in (
        ("Ouro at 128", OURO, 128, 0.40),
        ("Huginn at 128", HUGINN, 128, 2.8),
        ("Huginn at 8192", HUGINN, 8192, 3.3),
    ):
        latency = LATENCIES[model]
        depths = [1, 2, 3, 4] if model == OURO else [2, 4, 8, 12, 16]
        times = [token_time(latency, depth, context) for depth in depths]
        slope, intercept = np.polyfit(depths, times, 1)
        missed = np.array(times) - (slope * np.array(depths) + intercept)
        yield Seen(f"{name}: R2", 1 - float((missed**2).sum() / np.var(times) / len(times)), 0.999, 1)
        yield Seen(f"{name}: intercept, ms", intercept, expected - 0.05, expected + 0.05)


def token_time(latency, depth: int, context: int) -> float:
    """Milliseconds of one decode token at a depth, alone."""
    seen = []
    request = DepthRequest.recorded("r", context - 1, bytes([depth]))
    config = DepthConfig(mode="refill", width=1, max_loops=latency.max_loops)
    simulate(Arrivals((request,), (0.0,)), config, latency, seen.append)
    return 1e3 * sum(launch.duration_s for launch in seen if launch.batch.stage is not Stage.PREFILL)


@check(26, "E <= S <= rmax / mean depth; the last two equal only for F0 = 0", quick=True)
def _(_lab):
    gaps, equal, over = [], [], []
    for costs in COSTS.values():
        for mean in np.linspace(1, costs.max_loops, 25)[:-1]:
            bound = costs.bound(float(mean))
            gaps.append(costs.max_loops / mean - bound)
            equal.append(
                abs(flop_bound(0, costs.per_loop, costs.max_loops, float(mean)) - costs.max_loops / mean)
            )
            over += [bound - prefill_corrected(bound, alpha) for alpha in (0.0, 0.1, 0.5, 1.0)]
    yield Seen("smallest rmax / depth - S", min(gaps), 1e-6, INF)
    yield Seen("the same for F0 = 0", max(equal), 0, 1e-9)
    yield Seen("smallest S - E", min(over), -1e-12, INF)


def limit_runs(loop: StepCost, boundary: float) -> dict[str, float]:
    """Speedups of Ouro's mix on short prompts where prefill is free."""
    latency = bare(
        LATENCIES[OURO], loop=loop, prelude=StepCost(0), coda=StepCost(boundary), prefill=PrefillCost(0, 0, 0)
    )
    workload = Workload(Lengths(8, 0.1, 4, 16), Lengths(100, 0.1, 50, 200), 600, 64)
    arrivals = draw_workload(workload, OURO_DEPTHS, seed=1)
    rates = {}
    for mode in ("cb", "norefill", "refill"):
        config = DepthConfig(mode=mode, width=64, max_loops=4)
        rates[mode] = simulate(arrivals, config, latency, buckets=False).throughput
    return {mode: rate / rates["cb"] for mode, rate in rates.items()}


@check(
    27,
    "memory-bound limit: no-refill gains (tau0 + rmax delta) / (tau0 + E[deepest of a wave] delta), refill near S",
)
def _(_lab):
    delta, boundary, rows = 4.7, 0.4, 64
    at_most = np.cumsum(OURO_DEPTHS.weights) ** rows
    deepest = float(np.dot(np.diff(at_most, prepend=0), [2, 3, 4]))
    seen = limit_runs(StepCost(delta), boundary)
    expected = (boundary + 4 * delta) / (boundary + deepest * delta)
    yield Seen("no-refill over its limit", seen["norefill"] / expected, 0.99, 1.01)
    yield Seen("refill over S", seen["refill"] / flop_bound(boundary, delta, 4, 2.4), 0.94, 1.0)


@check(28, "compute-bound limit: refill = no-refill = S")
def _(_lab):
    seen = limit_runs(StepCost(0, 0.02), 0.0)
    for mode in ("norefill", "refill"):
        yield Seen(f"{mode} over S", seen[mode] / (4 / 2.4), 0.99, 1.01)


@check(
    29,
    "online knees: refill > no-refill > CB for Ouro; refill about no-refill > CB for Huginn; equal at full depth",
)
def _(_lab):
    ouro, huginn, full = OURO_DEPTHS, HUGINN_DEPTHS, DepthMix(4, (1.0,))
    for name, model, k, depths, refill, norefill in (
        ("Ouro", OURO, 1, ouro, (1, INF), (1, INF)),
        ("Huginn", HUGINN, 16, huginn, (0.95, 1.05), (1, INF)),
        ("Ouro at full depth", OURO, 1, full, (0.95, 1.05), (0.95, 1.05)),
    ):
        latency = LATENCIES[model]
        arrivals = draw_workload(WORKLOADS["alpaca"], depths, 0, requests=800)
        configs = [
            DepthConfig(mode=mode, width=64, max_loops=latency.max_loops, min_coda=k)
            for mode in ("cb", "norefill", "refill")
        ]
        limit = 3 * idle_latency(
            arrivals, latency, configs[0]
        )  # one limit for all: curves are read at equal latency
        knees = [knee(arrivals, latency, config, limit) for config in configs]
        yield Seen(f"{name}: refill / no-refill", knees[2] / knees[1], *refill)
        yield Seen(f"{name}: no-refill / CB", knees[1] / knees[0], *norefill)


@check(
    30,
    "single-slot KV holds about rmax times more Ouro residents at equal bytes, 8.5 times more Huginn",
    quick=True,
)
def _(_lab):
    for name, model, expected in (("Ouro", OURO, 4.0), ("Huginn", HUGINN, 8.5)):
        costs = COSTS[model]
        shape = {
            "prelude": costs.prelude,
            "core": costs.core,
            "coda": costs.coda,
            "max_loops": costs.max_loops,
        }
        indexed, single = (
            LoopSpec(**shape, layout=layout).attention_layers
            for layout in (LoopLayout.DEPTH_INDEXED, LoopLayout.SINGLE)
        )
        yield Seen(name, indexed / single, expected - 0.05, expected + 0.05)
