"""A small engine: runs the batches of a depth planner on a toy model and its pager.

Owns tokens, hidden states and who has heard of an end. Prompts run position by position, so that chunking cannot
change a bit; whatever differs between two schedules is then the fault of a planner, a pager or an engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.errors import CorruptionError, UsageError
from hybridkv.schedule.depth import Preemption, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from hybridkv.schedule.depth import DepthPlanner, Row, StageBatch
    from hybridkv.schedule.exits import ExitRouter
    from hybridkv.testing.loops.models import LoopedToy
    from hybridkv.testing.loops.pager import LoopedPager, Saved


class LoopedEngine:
    """Runs a planner's batches. `tokens` holds prompts and what was generated.

    Exits are those recorded in `depths`, or come from `router`. A full-depth decode computes every loop, but a row's
    state and KV stop changing at its recorded depth, so that all modes mean the same. `eos` ends a request; with
    `late` the planner hears of it one launch later (D41).
    """

    def __init__(
        self,
        model: LoopedToy,
        pager: LoopedPager,
        prompts: Mapping[str, Sequence[int]],
        *,
        depths: Mapping[str, Sequence[int]] | None = None,
        router: ExitRouter | None = None,
        eos: int | None = None,
        late: bool = False,
    ) -> None:
        if (depths is None) == (router is None):
            raise UsageError("depths or router must be given, got both or neither")
        self.model, self.pager = model, pager
        self.depths, self.router, self.eos, self.late = depths, router, eos, late
        self.tokens = {request: list(prompt) for request, prompt in prompts.items()}
        self.prompts = {request: len(prompt) for request, prompt in prompts.items()}
        self.loops_run: dict[tuple[str, int], int] = {}
        """Loops that each decode token ran, by request and position."""
        self._hidden: dict[str, tuple[Tensor, Tensor]] = {}
        self._logits: dict[str, float] = {}
        self._saved: dict[str, Saved] = {}
        self._over: set[str] = set()

    def run(self, planner: DepthPlanner) -> dict[str, list[int]]:
        """Run everything that was submitted; returns the tokens generated for each request."""
        while planner.unfinished:
            batch = planner.plan()
            if batch is not None:
                self.step(planner, batch)
            elif planner.unfinished:
                raise CorruptionError("I11", f"{planner.unfinished} requests are left, but nothing can run")
        return {request: tokens[self.prompts[request] :] for request, tokens in self.tokens.items()}

    def step(self, planner: DepthPlanner, batch: StageBatch) -> None:
        """Compute one batch and apply it."""
        heard = sorted(self._over)
        for row in batch.rows:
            self._compute(batch.stage, row, planner)
        if self.late:
            planner.end(heard)
        finishes = heard if self.late else sorted(self._over)
        entry = planner.apply(batch, self._exits(batch), () if self.late else finishes)
        done = {*finishes, *(entry.done if entry is not None else ())}
        self._over -= done
        for request in sorted(done & self.pager.requests.keys()):
            self.pager.release(request)
        if self.router is not None:
            self.router.forget(done)

    def _exits(self, batch: StageBatch) -> list[str] | None:
        if self.router is None:
            return None
        if batch.stage is Stage.PRELUDE:
            self.router.begin(batch)
        if batch.stage is not Stage.RECURRENT:
            return None
        self.router.observe(batch, [self._logits[row.request] for row in batch.rows])
        return self.router.exits(batch)

    def _compute(self, stage: Stage, row: Row, planner: DepthPlanner) -> None:
        match stage:
            case Stage.PREFILL:
                self._prefill(row)
            case Stage.PRELUDE:
                self._reserve(row, 1)
                self._enter(row, row.position)
            case Stage.RECURRENT:
                self._loop(row, row.position, row.loop)
            case Stage.CODA:
                self._leave(row, row.loop)
            case Stage.DECODE:
                self._decode(row)
            case Stage.PREEMPT:
                saved = self.pager.offload(row.request)
                if planner.config.pool is not None and planner.config.pool.preemption is Preemption.OFFLOAD:
                    self._saved[row.request] = saved
            case _:
                self.pager.restore(row.request, self._saved.pop(row.request))

    def _prefill(self, row: Row) -> None:
        """Prompt tokens at full depth. The last one of a complete prompt emits."""
        self._reserve(row, row.tokens)
        emitted = 0
        for position in range(row.position, row.position + row.tokens):
            self._enter(row, position)
            for loop in range(1, self.model.shape.max_loops + 1):
                self._loop(row, position, loop)
            emitted = self.model.leave(self._hidden[row.request][1], row.request, position, self.pager)
        if row.position + row.tokens == len(self.tokens[row.request]):
            self._emit(row.request, emitted)
        self.pager.commit(row.request, self.tokens[row.request])

    def _decode(self, row: Row) -> None:
        self._reserve(row, 1)
        self._enter(row, row.position)
        depth = self._recorded(row.request)
        for loop in range(1, depth + 1):
            self._loop(row, row.position, loop)
        self._leave(row, depth)

    def _recorded(self, request: str) -> int:
        if self.depths is None:
            return self.model.shape.max_loops
        return self.depths[request][len(self.tokens[request]) - self.prompts[request] - 1]

    def _reserve(self, row: Row, tokens: int) -> None:
        self.pager.reserve(row.request, self.tokens[row.request], row.position + tokens)

    def _enter(self, row: Row, position: int) -> None:
        token = self.tokens[row.request][position]
        self._hidden[row.request] = self.model.enter(token, row.request, position, self.pager)

    def _loop(self, row: Row, position: int, loop: int) -> None:
        hidden = self._hidden[row.request]
        state, logit = self.model.loop(hidden, row.request, position, loop, self.pager)
        self._hidden[row.request] = hidden[0], state
        self._logits[row.request] = logit

    def _leave(self, row: Row, depth: int) -> None:
        self.pager.leave(row.request, row.position, depth)
        token = self.model.leave(self._hidden.pop(row.request)[1], row.request, row.position, self.pager)
        if row.request not in self._over:
            self.loops_run[row.request, row.position] = depth
            self._emit(row.request, token)
        self.pager.commit(row.request, self.tokens[row.request])

    def _emit(self, request: str, token: int) -> None:
        self.tokens[request].append(token)
        if token == self.eos:
            self._over.add(request)
