"""A discrete-event engine: drives the real planner and the real cache with a workload and a step-time law.

Owns the clock. What it reports is what planner and cache did; only durations are modelled. A total event order: arrivals
up to the clock, plan, the step's duration, commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridkv.alloc.cache import CachePolicy, HybridCache
from hybridkv.alloc.organization import Organization
from hybridkv.alloc.plan import Stats
from hybridkv.alloc.rows import ROW_MASK
from hybridkv.errors import UsageError
from hybridkv.schedule.hybrid import HybridConfig, HybridPlanner, StepPlan
from hybridkv.simulate.law import StepLaw
from hybridkv.simulate.workload import OUTPUT_TOKEN_BASE, Arrival

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Trip:
    """One request's way through the engine; seconds on the engine's clock, NaN until it happens.

    `admitted_s` and `cached_tokens` belong to its first admission, `first_token_s` to its first output token.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    admitted_s: float = float("nan")
    cached_tokens: int = 0
    first_token_s: float = float("nan")
    finished_s: float = float("nan")
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine at one moment. `stats` is the cache's snapshot; depth is the mean over first admissions so far."""

    time_s: float
    running: int
    waiting: int
    stats: Stats
    joint_mean: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step as it ran."""

    start_s: float
    duration_s: float
    decode_rows: int
    prefill_tokens: int


@dataclass(slots=True)
class Run:
    """Everything one simulation leaves. `steps` holds the first `steps_kept` steps only; `step_count` all of them."""

    trips: list[Trip]
    samples: list[Sample] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    step_count: int = 0
    decode_rows: int = 0
    prefill_tokens: int = 0
    final: Stats | None = None


def simulate(
    organization: Organization,
    pages: dict[str, int],
    arrivals: Sequence[Arrival],
    *,
    policy: CachePolicy,
    config: HybridConfig,
    law: StepLaw | None = None,
    isolate: bool = False,
    samples: int = 300,
    steps_kept: int = 5000,
    progress: Progress | None = None,
) -> Run:
    """Run a workload to its end. `isolate` gives each request a salt of its own (ISOLATE of the paper).

    `progress(finished, total)` is called now and then. O(steps) memory for the first `steps_kept` steps only.
    """
    return Engine(organization, pages, arrivals, policy, config, law or StepLaw(), isolate=isolate).run(
        samples, steps_kept, progress
    )


class Engine:
    """One run of one workload. The parts of a step in the order in which they happen."""

    def __init__(
        self,
        organization: Organization,
        pages: dict[str, int],
        arrivals: Sequence[Arrival],
        policy: CachePolicy,
        config: HybridConfig,
        law: StepLaw,
        *,
        isolate: bool,
    ) -> None:
        if not arrivals:
            raise UsageError("arrivals must hold at least one request, got none")
        self.planner = HybridPlanner(HybridCache(organization, pages=pages, policy=policy), config)
        self.arrivals, self.law, self.isolate = arrivals, law, isolate
        self.result = Run([Trip(a.arrival_s, a.input_tokens, a.output_tokens) for a in arrivals])
        self.clock = self.depths = 0.0
        self.submitted = self.admitted = self.finished = self.sampled = 0
        self._prompt = np.zeros(64, np.int64)  # original prompt length by row

    def run(self, samples: int, steps_kept: int, progress: Progress | None) -> Run:
        """Until every request is done."""
        run, total = self.result, len(self.arrivals)
        every = max(1e-9, (self.arrivals[-1].arrival_s - self.arrivals[0].arrival_s) / max(1, samples))
        next_sample = self.clock = self.arrivals[0].arrival_s
        while self.finished < total:
            self._submit()
            step = self.planner.plan()
            if not len(step.handles):
                self.clock = self.arrivals[self.submitted].arrival_s
                continue
            decode_rows, prefill_tokens = step.decode_rows, step.prefill_tokens
            duration = self.law.seconds(decode_rows, prefill_tokens)
            if run.step_count < steps_kept:
                run.steps.append(Step(self.clock, duration, decode_rows, prefill_tokens))
            self._start(step)
            self.clock += duration
            self._finish(step)
            run.step_count += 1
            run.decode_rows += decode_rows
            run.prefill_tokens += prefill_tokens
            if self.clock >= next_sample:
                run.samples.append(self._sample())
                next_sample = self.clock + every
                if progress is not None:
                    progress(self.finished, total)
        run.samples.append(self._sample())
        run.final = self.planner.cache.stats()
        return run

    def _submit(self) -> None:
        while self.submitted < len(self.arrivals) and self.arrivals[self.submitted].arrival_s <= self.clock:
            arrival = self.arrivals[self.submitted]
            salt = self.submitted if self.isolate else None
            r = self.planner.submit(self.submitted, arrival.tokens(), arrival.output_tokens, salt)
            if r.row >= len(self._prompt):
                self._prompt = np.resize(self._prompt, 2 * r.row)
            self._prompt[r.row] = r.prompt_tokens
            self.submitted += 1

    def _start(self, step: StepPlan) -> None:
        for r in step.admitted:
            trip = self.result.trips[r.id]  # type: ignore[index]  # ids are positions here
            if np.isnan(trip.admitted_s):
                trip.admitted_s, trip.cached_tokens = self.clock, r.cached
                self.admitted += 1
                self.depths += r.cached
        for r in step.preempted:
            self.result.trips[r.id].preemptions += 1  # type: ignore[index]

    def _finish(self, step: StepPlan) -> None:
        """Sample, notice first tokens, commit, notice the end."""
        rows = step.handles & ROW_MASK
        for i in np.flatnonzero(step.samples & (step.stop == self._prompt[rows])).tolist():
            trip = self.result.trips[self.planner.cache.at(int(step.handles[i])).id]  # type: ignore[index]
            if np.isnan(trip.first_token_s):
                trip.first_token_s = self.clock
        for r in self.planner.commit(step, self._tokens(len(rows))):
            self.result.trips[r.id].finished_s = self.clock  # type: ignore[index]
            self.finished += 1

    def _tokens(self, count: int) -> NDArray[np.int64]:
        """Output tokens that no prompt and no other output contains."""
        self.sampled += count
        return OUTPUT_TOKEN_BASE + np.arange(self.sampled - count, self.sampled) % OUTPUT_TOKEN_BASE

    def _sample(self) -> Sample:
        planner = self.planner
        mean = self.depths / self.admitted if self.admitted else 0.0
        return Sample(self.clock, len(planner.running), len(planner.waiting), planner.cache.stats(), mean)
