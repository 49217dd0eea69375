"""The step planner of continuous depth batching: rules D11-D18 and D25-D41 as a pure state machine.

Owns the order of launches. Does not know time, tensors or page ids; how deep a token goes comes from recorded depths
or with `apply`. The same calls give the same batches and the same trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.errors import OutOfMemory, UnsupportedError, UsageError
from hybridkv.schedule.buckets import bucket_of, bucket_sizes
from hybridkv.schedule.depth.admission import build_prefill
from hybridkv.schedule.depth.batch import NO_PLANE, Counts, Entry, EventRow, Queues, Row, Stage, StageBatch
from hybridkv.schedule.depth.config import IdleOrder, Mode, Planes, Preemption
from hybridkv.schedule.depth.routing import ROUTES, Flight
from hybridkv.schedule.depth.rows import loops_of_next, new_row, rows_at
from hybridkv.schedule.depth.state import Live, State

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from hybridkv.schedule.depth.config import DepthConfig, DepthRequest, RequestId

NOBODY: tuple[RequestId, ...] = ()


class DepthPlanner:
    """Plans one launch at a time for requests whose tokens may leave the shared core at different loops.

    Every batch that `plan` returns goes to `apply` once, when its results are known. Only codas may be outstanding
    while the next launch is planned, at most `codas_in_flight` of them (D40). `trace`, if given, receives every entry
    of D43 in order; the planner keeps none.

    Args:
        config: parameters; `planner.config` holds them as clamped (D5).
        trace: called with each entry.
    """

    def __init__(self, config: DepthConfig, trace: Callable[[Entry], None] | None = None) -> None:
        self.config = config.clamped()
        self._trace = trace
        self._state = State(self.config)
        self._flights: dict[int, Flight] = {}
        self._codas = 0
        self._number = 0
        sizes = bucket_sizes(self.config.width)
        self._bucket = [0, *(bucket_of(sizes, rows) for rows in range(1, self.config.width + 1))]
        core = self.config.core
        self._plane = [NO_PLANE, *(core.plane_of(loop) for loop in range(1, core.max_loops + 1))]

    # Requests

    def submit(self, request: DepthRequest) -> None:
        """Add a request to the tail of `waiting`. One that can never fit is refused (D6)."""
        self._check(request)
        self._state.waiting.append(self._state.register(request))

    def seat(self, requests: Sequence[DepthRequest]) -> None:
        """Make requests resident with complete prompts and no first tokens: a resident case (D9)."""
        if requests and self.config.pool is not None:
            raise UsageError("pool must be None for resident requests, got a pool")
        if len(self._state.residents) + len(requests) > self.config.width:
            raise UsageError(
                f"resident requests must be at most {self.config.width}, got {len(requests)} more"
            )
        if len({request.id for request in requests}) < len(requests):
            raise UsageError("resident requests must have distinct ids, got one twice")
        for request in requests:
            self._check(request)
            if request.decode_tokens < 1:
                raise UsageError(f"decode_tokens of resident {request.id!r} must be at least 1, got 0")
        for request in requests:
            live = self._state.register(request)
            self._state.fill(live, live.prompt)
            self._state.pre.append(live)

    def end(self, requests: Collection[RequestId]) -> None:
        """Say that an earlier token ended these requests (D41). Staged successors are dropped, what runs emits nothing."""
        self._check_finishes(requests)
        for request in requests:
            self._end(self._state.live[request])

    def _end(self, live: Live) -> None:
        live.ended = True
        self._state.ended.add(live)

    def _check(self, request: DepthRequest) -> None:
        if request.id in self._state.live:
            raise UsageError(f"request id must be unused, got {request.id!r}, which is still live")
        request.check(self.config)

    # What the engine may ask

    @property
    def unfinished(self) -> int:
        """Requests that were submitted and have not left."""
        return len(self._state.live)

    @property
    def residents(self) -> int:
        """Requests that hold a slot, those of D37 included."""
        return len(self._state.residents)

    @property
    def launches(self) -> int:
        """Launches that have completed; events do not count (D9, D37)."""
        return self._state.launches

    @property
    def idle(self) -> bool:
        """Nothing waits and nobody is resident: the next arrivals join at once (D9)."""
        return not self._state.residents and not self._state.queued

    @property
    def queues(self) -> Queues:
        """Queue sizes now."""
        s = self._state
        return Queues(len(s.core), len(s.coda), s.queued, None if s.pool is None else s.free)

    # Planning

    def plan(self) -> StageBatch | None:
        """The next launch or event, or None where nothing can run before a coda completes or a request arrives.

        Raises OutOfMemory where only a preemption could help and the policy is none, and UnsupportedError where a
        recompute would change KV (D33, D35). Costs O(rows).
        """
        if len(self._flights) > self._codas:
            raise UsageError(
                "plan must follow apply of the batch before it, got a launch that is still outstanding"
            )
        s = self._state
        while True:
            s.release_due()
            if s.ended:
                s.drop_ended()
            for live in s.secure():
                self._event(Stage.STALL, live)
            if s.offloaded and (restored := self._restore()):
                return self._launch(Stage.RESTORE, restored, rows_at(restored, 0))
            batch = self._step()
            if batch is not None:
                return batch
            if not s.release_all():
                break
        if self._codas or self.idle:
            return None
        return self._preempt()

    def _step(self) -> StageBatch | None:
        """The first step of the mode's list that applies (D16-D18)."""
        s, config = self._state, self.config
        free_coda = self._codas < config.codas_in_flight
        if config.mode is Mode.REFILL:
            if s.ready:
                return self._prelude()
            early = config.idle_order is IdleOrder.CODA_FIRST and not s.core and s.coda
            if free_coda and (len(s.coda) >= config.min_coda or early):
                return self._coda()
            if batch := self._prefill():
                return batch
            if s.core:
                return self._recurrent()
            return self._coda() if s.coda and free_coda else None
        if config.mode is Mode.NOREFILL:
            if s.core:
                return self._recurrent()
            if s.coda and free_coda:
                return self._coda()
            return self._prefill() or (self._prelude() if s.ready else None)
        return self._prefill() or (self._decode() if s.ready else None)

    def _launch(
        self,
        stage: Stage,
        lives: list[Live],
        rows: list[Row],
        bucket: int | None = None,
        plane: int | None = None,
    ) -> StageBatch:
        batch = StageBatch(self._number, stage, tuple(rows), bucket, self.queues, plane)
        self._flights[self._number] = Flight(batch, lives)
        self._number += 1
        return batch

    def _prefill(self) -> StageBatch | None:
        chunks = build_prefill(self._state)
        if not chunks:
            return None
        full = self.config.max_loops
        rows = [
            new_row(Row, (live.id, start, full, NO_PLANE, tokens, live.serial))
            for live, start, tokens in chunks
        ]
        return self._launch(Stage.PREFILL, [live for live, _, _ in chunks], rows)

    def _prelude(self) -> StageBatch:
        s = self._state
        lives, s.ready = s.ready, []
        rows = rows_at(lives, 0)
        return self._launch(Stage.PRELUDE, lives, rows, self._bucket[len(rows)])

    def _recurrent(self) -> StageBatch:
        s = self._state
        lives, plane = s.core, None
        if self.config.planes is Planes.MIXED:
            s.core = []
        else:
            loop = loops_of_next(lives, self.config)
            s.core = [live for live in lives if live.loop != loop]
            lives = [live for live in lives if live.loop == loop]
            plane = self._plane[loop + 1]
        planes = self._plane
        rows = [
            new_row(Row, (live.id, live.kv, live.loop + 1, planes[live.loop + 1], 1, live.serial))
            for live in lives
        ]
        return self._launch(Stage.RECURRENT, lives, rows, self._bucket[len(rows)], plane)

    def _coda(self) -> StageBatch:
        s = self._state
        lives, s.coda = s.coda, []
        self._codas += 1
        rows = [new_row(Row, (live.id, live.kv, live.loop, NO_PLANE, 1, live.serial)) for live in lives]
        return self._launch(Stage.CODA, lives, rows, self._bucket[len(rows)])

    def _decode(self) -> StageBatch:
        s, full = self._state, self.config.max_loops
        lives, s.ready = s.ready, []
        rows = rows_at(lives, full)
        return self._launch(Stage.DECODE, lives, rows, self._bucket[len(rows)])

    def _restore(self) -> list[Live]:
        restored: list[Live] = []
        while (live := self._state.restore()) is not None:
            restored.append(live)
            self._event(Stage.RESTORE, live)
        return restored

    def _preempt(self) -> StageBatch:
        """Make room when nothing else can run (D33)."""
        s, pool = self._state, self.config.pool
        if not s.stalled or pool is None or pool.preemption is Preemption.NONE:
            raise OutOfMemory(
                f"free blocks must reach 1 for the next token, got {s.free} with {len(s.residents)} residents and "
                "nothing that could run; choose a preemption policy, or admission reserve",
                pool="blocks",
                needed=1,
                obtainable=s.free,
            )
        live, recompute = s.victim(), pool.preemption is Preemption.RECOMPUTE
        if recompute and not pool.allow_semantic_change and live.changed_by_full_depth(self.config.max_loops):
            raise UnsupportedError(
                f"recompute must not change KV, got {live.id!r}, whose tokens left before loop {self.config.max_loops}; "
                "preempt by offload, or set allow_semantic_change"
            )
        rows = rows_at([live], 0)
        s.preempt(live)
        left = tuple(live.depths) if recompute and live.depths is not None else ()
        self._event(
            Stage.PREEMPT, live, EventRow(live.id, rows[0].position, live.prompt, left) if recompute else None
        )
        return self._launch(Stage.PREEMPT, [live], rows)

    # Results

    def apply(
        self,
        batch: StageBatch,
        exits: Iterable[RequestId] | None = None,
        finishes: Collection[RequestId] = NOBODY,
    ) -> Entry | None:
        """Take the results of a batch. Returns its trace entry, or None for an event, whose entry `plan` has traced.

        Args:
            batch: what `plan` returned, unchanged.
            exits: rows of a recurrent launch that leave the core; rows at full depth always do. None replays recorded
                depths. With lookahead these are the signals of the loop before (D39).
            finishes: requests whose token of this launch ends them by content; others that are named ended with an
                earlier token, as with `end` (D41). The end by length needs no mention.
        """
        flight = self._flights.get(batch.number)
        if flight is None or flight.batch is not batch:
            raise UsageError(
                f"batch must be planned and not yet applied, got number {batch.number} ({batch.stage})"
            )
        leaving = None if exits is None else set(exits)
        if leaving:
            self._check_exits(batch, leaving)
        if finishes:
            self._check_finishes(finishes)
        del self._flights[batch.number]
        if batch.stage in {Stage.RESTORE, Stage.PREEMPT}:
            self.end(finishes)
            return None
        s = self._state
        s.launches += 1
        self._codas -= batch.stage is Stage.CODA
        done = ROUTES[batch.stage](s, flight, leaving, set(finishes))
        for request in finishes:
            live = s.live.get(request)
            if live is not None and not live.finished:
                self._end(live)
        counts = Counts(len(batch.rows), done.tokens, done.loops, done.emitted, *self.queues)
        entry = Entry(batch.stage, batch.rows, done.exits, done.done, counts)
        if self._trace is not None:
            self._trace(entry)
        return entry

    def _check_exits(self, batch: StageBatch, exits: set[RequestId]) -> None:
        if batch.stage is not Stage.RECURRENT:
            raise UsageError(f"exits must be empty for a {batch.stage} launch, got {sorted(exits)}")
        strangers = exits.difference(row.request for row in batch.rows)
        if strangers:
            raise UsageError(f"exits must name rows of the launch, got {sorted(strangers)}")

    def _check_finishes(self, finishes: Collection[RequestId]) -> None:
        if len(set(finishes)) < len(finishes):
            raise UsageError(f"finishes must name each request once, got {sorted(finishes)}")
        for request in finishes:
            live = self._state.live.get(request)
            if live is None or live.finished or live.ended:
                raise UsageError(
                    f"finishes must name live requests, got {request!r}, which has finished or never was"
                )

    def _event(self, stage: Stage, live: Live, row: EventRow | None = None) -> None:
        if self._trace is not None:
            row = row or EventRow(live.id, live.kv)
            self._trace(Entry(stage, (row,), (), (), Counts(1, 0, 0, 0, *self.queues)))
