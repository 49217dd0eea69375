"""Simulations that the shape checks share: each runs once, however many checks look at it."""

from dataclasses import replace
from functools import cached_property

from hybridkv.schedule.depth import DepthConfig
from hybridkv.schedule.latency import LATENCIES
from hybridkv.simulate.depth import DepthRun, bound_of, simulate
from hybridkv.simulate.depth_workload import WORKLOADS, Arrivals, Depths, default_depths, draw_workload

SEED = 0


class Bench:
    """One model on one workload at one width; runs and bounds on demand."""

    def __init__(
        self, model: str, workload: str, width: int | None = None, depths: Depths | None = None
    ) -> None:
        self.model = model
        self.latency = LATENCIES[model]
        self.width = width or WORKLOADS[workload].width
        self._workload = WORKLOADS[workload]
        self.depths = depths or default_depths(self.latency.max_loops)
        self._runs: dict[tuple, DepthRun] = {}

    @cached_property
    def arrivals(self) -> Arrivals:
        # a steady window needs more than three widths of requests; narrow batches need fewer for the same precision
        default = self.width == self._workload.width
        requests = self._workload.requests if default else max(300, 4 * self.width)
        return draw_workload(self._workload, self.depths, SEED, requests=requests)

    def run(self, mode: str, k: int = 1, slots: int | None = None) -> DepthRun:
        key = mode, k if mode == "refill" else 1, slots
        if key not in self._runs:
            config = DepthConfig(
                mode=mode,
                width=self.width,
                max_loops=self.latency.max_loops,
                min_coda=max(1, k),
                open_slots=slots,
            )
            self._runs[key] = simulate(self.arrivals, config, self.latency)
        return self._runs[key]

    def speedup(self, mode: str, k: int = 1) -> float:
        return self.run(mode, k).throughput / self.run("cb").throughput

    @property
    def alpha(self) -> float:
        return self.run("cb").prefill_share

    @property
    def bound(self) -> float:
        return bound_of(self.model, self.arrivals, self.run("cb"))

    def share(self, mode: str, k: int = 1) -> float:
        return self.speedup(mode, k) / self.bound


class Lab:
    """Every bench that was asked for."""

    def __init__(self) -> None:
        self._benches: dict[tuple, Bench] = {}

    def bench(
        self, model: str, workload: str = "sharegpt", width: int | None = None, depths: Depths | None = None
    ) -> Bench:
        width = width or WORKLOADS[workload].width
        key = model, workload, width, depths
        if key not in self._benches:
            self._benches[key] = Bench(*key)
        return self._benches[key]


def knee(arrivals: Arrivals, latency, config: DepthConfig, limit_s: float) -> float:
    """Largest rate at which normalized latency stays within a limit, to 2 %."""
    capacity = len(arrivals.requests) / simulate(arrivals, config, latency).span_s
    low, high = capacity / 2, capacity * 2
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        seen = simulate(arrivals.poisson(middle, SEED), config, latency).normalized_latency
        low, high = (middle, high) if seen <= limit_s else (low, middle)
    return low


def idle_latency(arrivals: Arrivals, latency, config: DepthConfig) -> float:
    """Seconds per output token of an engine that hardly anybody asks."""
    return simulate(arrivals.poisson(0.5, SEED), config, latency).normalized_latency


def bare(latency, **parts):
    """A latency model with some costs replaced."""
    return replace(latency, **parts)
