"""Discrete-event simulation of a depth planner: offline or with arrivals, timed by a latency model.

Owns the clock, the steady window and the sums that reports are made of. Does not know how launches are chosen, and
starts the next launch when the last one ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hybridkv.errors import UsageError
from hybridkv.schedule.bounds import COSTS, prefill_corrected
from hybridkv.schedule.depth import DepthConfig, DepthPlanner, Entry, Mode, Stage, StageBatch
from hybridkv.schedule.latency import LATENCIES, LatencyModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hybridkv.simulate.depth_workload import Arrivals

_POSITION = itemgetter(1)


class LaunchSeen(NamedTuple):
    """One completed launch, with its time."""

    batch: StageBatch
    entry: Entry
    start_s: float
    duration_s: float
    context: int


class Observer(Protocol):
    """Watches a simulation."""

    def __call__(self, seen: LaunchSeen) -> None: ...


@dataclass(slots=True)
class Sums:
    """What happened over a span of time. `padding` is the time that bucket padding cost."""

    seconds: float = 0.0
    tokens: int = 0
    time: dict[Stage, float] = field(default_factory=dict[Stage, float])
    rows: dict[Stage, int] = field(default_factory=dict[Stage, int])
    launches: dict[Stage, int] = field(default_factory=dict[Stage, int])
    boundary: float = 0.0
    padding: float = 0.0

    def add(self, seen: LaunchSeen, boundary: float, padding: float) -> None:
        """Count one launch."""
        stage, rows = seen.batch.stage, len(seen.batch.rows)
        self.seconds += seen.duration_s
        self.tokens += seen.entry.counts.emitted
        self.time[stage] = self.time.get(stage, 0.0) + seen.duration_s
        self.rows[stage] = self.rows.get(stage, 0) + rows
        self.launches[stage] = self.launches.get(stage, 0) + 1
        self.boundary += boundary
        self.padding += padding

    def mean_rows(self, *stages: Stage) -> float:
        """Rows of an average launch of these stages; 0 without any."""
        launches = sum(self.launches.get(stage, 0) for stage in stages)
        return sum(self.rows.get(stage, 0) for stage in stages) / launches if launches else 0.0

    def share(self, part: float) -> float:
        """`part` of the time."""
        return part / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class DepthRun:
    """A finished simulation. `window` is the steady part: from 2W completions on, while prompts wait."""

    whole: Sums
    window: Sums
    span_s: float
    online: bool
    latency_s: dict[str, float]
    normalized: dict[str, float]
    """End-to-end latency over output tokens, by request."""

    @property
    def steady(self) -> Sums:
        """The steady window; the whole run where it is too short to have one, or where requests arrive over time."""
        return self.window if self.window.tokens and not self.online else self.whole

    @property
    def throughput(self) -> float:
        """Output tokens per second: in the steady window, or over the span if requests arrive over time."""
        return self.steady.tokens / (self.span_s if self.online else self.steady.seconds)

    @property
    def prefill_share(self) -> float:
        """Alpha: the share of GPU time that prefill takes."""
        return self.steady.share(self.steady.time.get(Stage.PREFILL, 0.0))

    @property
    def normalized_latency(self) -> float:
        """Mean seconds per output token, waiting included."""
        return sum(self.normalized.values()) / len(self.normalized)


class Price(NamedTuple):
    """Milliseconds of a launch, and the parts of it that are boundary layers and padding."""

    total: float
    boundary: float
    padding: float


def price(latency: LatencyModel, batch: StageBatch, context: int, mean_prompt: float) -> Price:
    """What one launch costs: padded rows compute, real rows read KV."""
    rows = len(batch.rows)
    padded = batch.bucket or rows
    if batch.stage is Stage.RECURRENT:
        return Price(latency.loop.time(padded, context), 0.0, latency.loop.gamma * (padded - rows))
    if batch.stage is Stage.PREFILL:
        return Price(latency.prefill.time(sum(row.tokens for row in batch.rows), mean_prompt), 0.0, 0.0)
    if batch.stage is Stage.DECODE:
        total, boundary = latency.decode(padded, context), latency.boundary(padded, context)
        return Price(total, boundary, total - latency.decode(rows, context))
    cost = latency.prelude if batch.stage is Stage.PRELUDE else latency.coda
    total = cost.time(padded, context)
    return Price(total, total, cost.gamma * (padded - rows))


def simulate(
    arrivals: Arrivals,
    config: DepthConfig,
    latency: LatencyModel,
    observe: Observer | None = None,
    *,
    buckets: bool = True,
) -> DepthRun:
    """Run requests to their end. Events (stall, restore, preempt) take no time; `buckets` pads rows to graph sizes."""
    if latency.max_loops != config.max_loops:
        raise UsageError(f"max_loops must be the latency model's {latency.max_loops}, got {config.max_loops}")
    return _Simulation(arrivals, config, latency, observe, buckets=buckets).run()


class _Simulation:
    def __init__(
        self,
        arrivals: Arrivals,
        config: DepthConfig,
        latency: LatencyModel,
        observe: Observer | None,
        *,
        buckets: bool,
    ) -> None:
        self.buckets = buckets
        self.online = max(arrivals.times) > 0
        self.planner = DepthPlanner(config)
        self.latency = latency
        self.observe = observe
        order = sorted(range(len(arrivals.requests)), key=arrivals.times.__getitem__)
        self.pending = [(arrivals.times[i], arrivals.requests[i]) for i in reversed(order)]
        self.arrived = {r.id: (time, r.prompt, r.decode_tokens + 1) for time, r in self.pending}
        self.clock = 0.0
        self.whole = Sums()
        self.window = Sums()
        self.open = self.closed = False
        self.latencies: dict[str, float] = {}

    def run(self) -> DepthRun:
        while self.pending or self.planner.unfinished:
            while self.pending and self.pending[-1][0] <= self.clock:
                self.planner.submit(self.pending.pop()[1])
            batch = self.planner.plan()
            if batch is None:
                self.clock = self.pending[-1][0]
                continue
            entry = self.planner.apply(batch)
            if entry is not None:
                self._count(batch, entry)
        normalized = {name: seconds / self.arrived[name][2] for name, seconds in self.latencies.items()}
        return DepthRun(self.whole, self.window, self.clock, self.online, self.latencies, normalized)

    def _count(self, batch: StageBatch, entry: Entry) -> None:
        rows = len(batch.rows)
        context = mean_prompt = 0
        if batch.stage is Stage.PREFILL:
            mean_prompt = sum(self.arrived[row.request][1] for row in batch.rows) / rows
        else:
            context = sum(map(_POSITION, batch.rows)) + rows
        cost = price(
            self.latency, batch if self.buckets else batch._replace(bucket=None), context, mean_prompt
        )
        seen = LaunchSeen(batch, entry, self.clock, cost.total / 1000, context)
        self._move_window(batch)
        self.whole.add(seen, cost.boundary / 1000, cost.padding / 1000)
        if self.open and not self.closed:
            self.window.add(seen, cost.boundary / 1000, cost.padding / 1000)
        self.clock += seen.duration_s
        for name in entry.done:
            self.latencies[name] = self.clock - self.arrived[name][0]
        if self.observe is not None:
            self.observe(seen)

    def _move_window(self, batch: StageBatch) -> None:
        waiting = batch.queues.waiting > 0
        if not self.open:
            self.open = waiting and len(self.latencies) >= 2 * self.planner.config.width
        elif not waiting:
            self.closed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthRow:
    """One line of a report, in the columns that other tools rely on."""

    mode: str
    k: int | None
    seed: int
    requests: int
    tokens: int
    span_s: float
    throughput: float
    speedup: float
    bound: float
    share_of_bound: float
    recurrent_batch: float
    coda_batch: float
    boundary_share: float
    prefill_share: float
    rate: float | None = None
    normalized_latency_s: float | None = None


def config_for(mode: str, width: int, max_loops: int, k: int = 1) -> DepthConfig:
    """Section 9's planner: M = 8192, S unset, no pool."""
    return DepthConfig(mode=Mode(mode), width=width, max_loops=max_loops, min_coda=k)


def compare(
    model: str,
    arrivals: Arrivals,
    runs: Sequence[tuple[str, int]],
    *,
    width: int,
    seed: int = 0,
    rate: float | None = None,
    observe: Callable[[str], Observer | None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[DepthRow]:
    """Simulate each (mode, K) of `runs` and set it against continuous batching and its bound.

    `observe` gives each run, by name, an observer or None; `progress` hears how many runs of how many are done.
    """
    latency = LATENCIES[model]
    results: dict[tuple[str, int], DepthRun] = {}
    for mode, k in runs:
        config = config_for(mode, width, latency.max_loops, k)
        watch = observe(f"{mode}-k{k}" if mode == "refill" else mode)
        results[mode, k] = simulate(arrivals, config, latency, watch)
        progress(len(results), len(runs))
    base = next((run for (mode, _), run in results.items() if mode == "cb"), None)
    base = base or simulate(arrivals, config_for("cb", width, latency.max_loops), latency)
    bound = bound_of(model, arrivals, base)
    return [
        _row(arrivals, run, base, bound, mode=mode, k=k, seed=seed, rate=rate)
        for (mode, k), run in results.items()
    ]


def bound_of(model: str, arrivals: Arrivals, base: DepthRun) -> float:
    """E: the FLOP bound, less what prefill takes under CB (section 7)."""
    flop = COSTS[model].bound(arrivals.mean_depth(COSTS[model].max_loops))
    return prefill_corrected(flop, base.prefill_share, len(arrivals.requests) / arrivals.tokens)


def _row(
    arrivals: Arrivals,
    run: DepthRun,
    base: DepthRun,
    bound: float,
    *,
    mode: str,
    k: int,
    seed: int,
    rate: float | None,
) -> DepthRow:
    speedup = run.throughput / base.throughput
    return DepthRow(
        mode=mode,
        k=k if mode == "refill" else None,
        seed=seed,
        requests=len(arrivals.requests),
        tokens=run.whole.tokens,
        span_s=run.span_s,
        throughput=run.throughput,
        speedup=speedup,
        bound=bound,
        share_of_bound=speedup / bound,
        recurrent_batch=run.steady.mean_rows(Stage.RECURRENT, Stage.DECODE),
        coda_batch=run.steady.mean_rows(Stage.CODA, Stage.DECODE),
        boundary_share=run.steady.share(run.steady.boundary),
        prefill_share=run.prefill_share,
        rate=rate,
        normalized_latency_s=run.normalized_latency if rate is not None else None,
    )
