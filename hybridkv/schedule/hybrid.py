"""Continuous batching for hybrid models: what the next step computes.

Owns the waiting queue, the running set and the token budget; asks `HybridCache` for storage. A plan is a function of what
was submitted and committed: no clock, no randomness (I12). Step order: decodes, prompts in progress, admissions.

Rules: section 3 of the memory-organization reference. Prompts are cut at kept boundaries, where a state must be
materialized; headroom binds waiting and preempted requests only; the youngest running request is preempted first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.alloc.cache import HybridCache
from hybridkv.alloc.plan import Plan, Refused
from hybridkv.alloc.requests import Request, Status
from hybridkv.alloc.rows import ROW_MASK
from hybridkv.errors import OutOfMemory, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """`token_budget`: tokens of a step. `max_running`: sequences that run at once (the paper's cap).

    `cut_at_boundaries`: a prompt chunk ends at the next kept boundary; otherwise the engine writes boundary states from
    inside a chunk. `reserve_prompt`: an admission takes the attention blocks of its whole prompt, so that prompts in
    progress do not run out of storage together. `in_flight`: steps planned before the first of them is committed.
    """

    token_budget: int = 2048
    max_running: int = 63
    cut_at_boundaries: bool = True
    reserve_prompt: bool = True
    in_flight: int = 1

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_running", "in_flight"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")


class StepPlan(NamedTuple):
    """One step. Row i computes tokens [start[i], stop[i]) of the request with handle `handles[i]`.

    `samples`: the row's last position is the newest token known, so the step yields one more. `in_place`, `plans`: as
    in `ExtendedMany`, admissions included. `admitted`, `preempted`: requests that started or went back to waiting.
    `blocked`: why the next waiting request was not admitted, None when nothing asked.
    """

    handles: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    samples: NDArray[np.bool_]
    in_place: NDArray[np.bool_]
    plans: dict[int, Plan]
    admitted: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()
    blocked: Refused | None = None

    @property
    def decode_rows(self) -> int:
        """Rows that compute one token and sample the next."""
        return int((self.samples & (self.stop - self.start == 1)).sum())

    @property
    def prefill_tokens(self) -> int:
        """Tokens of all other rows."""
        return int((self.stop - self.start).sum()) - self.decode_rows


EMPTY = np.empty(0, np.int64)
NO_ROWS = np.empty(0, np.bool_)


class HybridPlanner:
    """Plans steps over one cache. O(rows) array operations a step, plus O(1) calls per row that changes."""

    def __init__(self, cache: HybridCache, config: HybridConfig | None = None) -> None:
        self.cache, self.config = cache, config or HybridConfig()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self._final: dict[Hashable, int] = {}  # tokens a request knows when it is done
        rows = len(cache.rows.handle)
        self._goal = np.zeros(rows, np.int64)  # positions to compute: all tokens but the last sampled one
        self._prompt_end = np.zeros(rows, np.int64)
        self._handles: NDArray[np.int64] | None = EMPTY
        self._blocked: tuple[int, int, Refused] | None = (
            None  # who was refused last, and what had been given back
        )

    def submit(
        self,
        request_id: Hashable,
        token_ids: Sequence[int] | NDArray[Any],
        max_new_tokens: int,
        salt: int | None = None,
    ) -> Request:
        """A new request at the end of the queue. `OutOfMemory` if it could never run here, however long it waits."""
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        total = len(token_ids) + max_new_tokens
        if refused := self.cache.fits(total):
            raise OutOfMemory(
                f"request {request_id!r} of {total} tokens must fit the pools, got {refused.obtainable} pages in "
                f"{refused.pool!r} where {refused.needed} are needed",
                pool=refused.pool,
                needed=refused.needed,
                obtainable=refused.obtainable,
            )
        r = self.cache.request(request_id, token_ids, salt)
        self._final[request_id] = total
        self.waiting.append(r)
        return r

    def plan(self) -> StepPlan:
        """The next step; its storage is reserved. Empty when nothing can run. Commit or abandon it."""
        parts = [p for p in (self._decodes(), self._prompts()) if p is not None]
        preempted: list[Request] = []
        for part in parts:
            self._make_fit(part, parts, preempted)
        left = self.config.token_budget - sum(int((p.stop - p.start).sum()) for p in parts)
        admitted, blocked = ([], None) if preempted else self._admit(left)
        if admitted:
            parts.append(self._started(admitted))
        return self._joined(parts, tuple(r for r, _ in admitted), tuple(preempted), blocked)

    def commit(self, step: StepPlan, new_tokens: NDArray[Any] | Sequence[int] | None = None) -> list[Request]:
        """The step has completed; `new_tokens` holds a sampled token per row, ignored where `samples` is False.

        Returns the requests that are done and were released.
        """
        if new_tokens is None:
            if step.samples.any():
                raise UsageError(f"new_tokens must hold a token for {int(step.samples.sum())} rows, got None")
        else:
            new_tokens = np.where(step.samples, new_tokens, -1)
        self.cache.commit_many(step.handles, step.stop, new_tokens)
        rows = step.handles & ROW_MASK
        over = self.cache.rows.computed[rows] >= self._goal[rows]
        if not over.any():
            return []
        handles = set(step.handles[over].tolist())
        done = [r for r in self.running if r.handle in handles]
        for r in done:
            self.finish(r)
        return done

    def abandon(self, step: StepPlan) -> None:
        """The step never ran: storage and queues are as before it, except that preempted requests still wait."""
        for handle in reversed(step.handles.tolist()):
            r = self._by_handle(handle)
            self.cache.abandon(r)
            if r.status is Status.WAITING:
                self.running.remove(r)
                self.waiting.appendleft(r)
        self._handles = self._blocked = None

    def finish(self, r: Request) -> None:
        """The request ends now: its last token was sampled, it was cancelled, or it timed out."""
        if r.status is Status.RUNNING:
            self.running.remove(r)
            self._handles = None
        else:
            self.waiting.remove(r)
        del self._final[r.id]
        self.cache.release(r)

    # ----------------------------------------------------------------------------------------------- parts
    def _decodes(self) -> _Part | None:
        """One token for every running request whose prompt is computed."""
        handles = self._running_handles()
        if not len(handles):
            return None
        t, rows = self.cache.rows, handles & ROW_MASK
        planned = t.planned[rows]
        ready = (planned >= self._prompt_end[rows]) & (planned < self._goal[rows])
        ready &= t.tail[rows] - t.head[rows] < self.config.in_flight
        if not ready.all():
            handles, planned = handles[ready], planned[ready]
        if not len(handles):
            return None
        handles, planned = handles[: self.config.token_budget], planned[: self.config.token_budget]
        return self._extended(handles, planned + 1)

    def _prompts(self) -> _Part | None:
        """The next chunk of every prompt in progress, oldest first, while the budget lasts."""
        handles = self._running_handles()
        t, rows = self.cache.rows, handles & ROW_MASK
        unfinished = t.planned[rows] < self._prompt_end[rows]
        if not unfinished.any():
            return None
        left = self.config.token_budget - int((~unfinished).sum())
        chosen: list[int] = []
        stops: list[int] = []
        for handle in handles[unfinished].tolist():
            r = self._by_handle(handle)
            if left <= 0 or self.cache.rows.flights(r.row) >= self.config.in_flight:
                continue
            start = r.planned
            stop = min(start + left, int(self._prompt_end[r.row]))
            if self.config.cut_at_boundaries and self.cache.growth.recurrent:
                stop = min(stop, r.next_kept(start))
            chosen.append(handle)
            stops.append(stop)
            left -= stop - start
        return self._extended(np.array(chosen, np.int64), np.array(stops, np.int64)) if chosen else None

    def _extended(self, handles: NDArray[np.int64], stops: NDArray[np.int64]) -> _Part:
        got = self.cache.extend_many(handles, stops)
        return _Part(handles, got.start, got.stop, got.in_place, got.plans, got.refused)

    def _make_fit(self, part: _Part, parts: list[_Part], preempted: list[Request]) -> None:
        """Preempt the youngest until every row of `part` that still runs has its storage.

        A row that asks for several states at once is first cut at its next kept boundary, where one does: else a lone
        request could be refused for ever (F1).
        """
        self._shorten(part)
        while part.refused:
            victim = self.running.pop()
            self._handles = None
            for other in parts:
                other.drop(victim.handle)
            self.cache.preempt(victim)
            self.waiting.appendleft(victim)
            preempted.append(victim)
            for i in list(part.refused):
                answer = self.cache.extend(self._by_handle(int(part.handles[i])), int(part.stop[i]))
                if isinstance(answer, Refused):
                    break
                part.plans[i] = answer.plan
                del part.refused[i]

    def _shorten(self, part: _Part) -> None:
        for i in list(part.refused):
            r = self._by_handle(int(part.handles[i]))
            end = r.next_kept(int(part.start[i]))
            if end < int(part.stop[i]) and not isinstance(answer := self.cache.extend(r, end), Refused):
                part.stop[i], part.plans[i] = end, answer.plan
                del part.refused[i]

    def _admit(self, left: int) -> tuple[list[tuple[Request, Plan]], Refused | None]:
        """Start waiting requests in order; the first that does not fit ends it, so that nobody is overtaken.

        One that was refused is asked again once something was given back or a checkpoint was published.
        """
        admitted: list[tuple[Request, Plan]] = []
        cfg = self.config
        while self.waiting and left > 0 and len(self.running) < cfg.max_running:
            r = self.waiting[0]
            gains = self.cache.storage.gains
            if self._blocked is not None and self._blocked[:2] == (r.handle, gains) and self.running:
                return admitted, self._blocked[2]
            reserve = r.length if cfg.reserve_prompt else 0
            answer = self.cache.admit(r, budget=left, cut=cfg.cut_at_boundaries, reserve=reserve)
            if isinstance(answer, Refused) and not cfg.cut_at_boundaries:
                answer = self.cache.admit(r, budget=left, cut=True, reserve=reserve)
            if isinstance(answer, Refused):
                self._blocked = (r.handle, self.cache.storage.gains, answer)
                return admitted, answer
            self.waiting.popleft()
            self.running.append(r)
            self._handles = None
            if r.row >= len(self._goal):
                self._goal = np.resize(self._goal, 2 * r.row)
                self._prompt_end = np.resize(self._prompt_end, 2 * r.row)
            self._goal[r.row] = self._final[r.id] - 1
            self._prompt_end[r.row] = r.length
            admitted.append((r, answer.plan))
            left -= answer.plan.stop - answer.plan.start
        return admitted, None

    def _started(self, admitted: list[tuple[Request, Plan]]) -> _Part:
        return _Part(
            np.array([r.handle for r, _ in admitted], np.int64),
            np.array([p.start for _, p in admitted], np.int64),
            np.array([p.stop for _, p in admitted], np.int64),
            np.zeros(len(admitted), np.bool_),
            {i: plan for i, (_, plan) in enumerate(admitted)},
            {},
        )

    def _joined(
        self,
        parts: list[_Part],
        admitted: tuple[Request, ...],
        preempted: tuple[Request, ...],
        blocked: Refused | None,
    ) -> StepPlan:
        parts = [p.compact() for p in parts]
        if not parts:
            return StepPlan(EMPTY, EMPTY, EMPTY, NO_ROWS, NO_ROWS, {}, admitted, preempted, blocked)
        if len(parts) == 1:
            only = parts[0]
            handles, start, stop, in_place, plans = (
                only.handles,
                only.start,
                only.stop,
                only.in_place,
                only.plans,
            )
        else:
            handles, start, stop, in_place = (
                np.concatenate([getattr(p, name) for p in parts])
                for name in ("handles", "start", "stop", "in_place")
            )
            plans: dict[int, Plan] = {}
            base = 0
            for p in parts:
                plans |= {base + i: plan for i, plan in p.plans.items()}
                base += len(p.handles)
        samples = stop >= self._prompt_end[handles & ROW_MASK]
        return StepPlan(handles, start, stop, samples, in_place, plans, admitted, preempted, blocked)

    def _running_handles(self) -> NDArray[np.int64]:
        if self._handles is None:
            self._handles = np.fromiter((r.handle for r in self.running), np.int64, len(self.running))
        return self._handles

    def _by_handle(self, handle: int) -> Request:
        return self.cache.at(handle)


@dataclass(slots=True)
class _Part:
    """Rows of one phase of a step while it is being planned."""

    handles: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    in_place: NDArray[np.bool_]
    plans: dict[int, Plan]
    refused: dict[int, Refused]
    dropped: set[int] | None = None

    def drop(self, handle: int) -> None:
        """The request runs no more; its row, if it has one here, is left out."""
        for i in np.flatnonzero(self.handles == handle).tolist():
            self.dropped = (self.dropped or set()) | {i}
            self.refused.pop(i, None)
            self.plans.pop(i, None)

    def compact(self) -> _Part:
        """Without dropped rows."""
        if not self.dropped:
            return self
        kept = [i for i in range(len(self.handles)) if i not in self.dropped]
        plans = {new: self.plans[old] for new, old in enumerate(kept) if old in self.plans}
        return _Part(self.handles[kept], self.start[kept], self.stop[kept], self.in_place[kept], plans, {})
