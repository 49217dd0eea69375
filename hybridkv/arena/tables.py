"""Mapping tables of a step: what the ops read to find their units. One staging copy a step.

Does not plan, and does not run anything. The block table is persistent and gets changes only; everything else is made
anew each step, so that a padded row is absent whatever was there before (scenario D4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hybridkv.alloc.organization import StateKind
from hybridkv.arena.seats import ABSENT, Seats, units
from hybridkv.arena.staging import Staging, length
from hybridkv.errors import CorruptionError, UnsupportedError, UsageError
from hybridkv.geometry.specs import RecurrentKind
from hybridkv.units import DELTA_CHUNK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from hybridkv.alloc.cache import HybridCache
    from hybridkv.alloc.checkpoint import State
    from hybridkv.alloc.plan import Plan
    from hybridkv.arena.arena import Arena

    Arrays = dict[str, NDArray[np.int32]]
    Pair = tuple[State, State]


class Step(Protocol):
    """One step: `StepPlan` of a planner, or anything with its facts. Row i computes tokens [start[i], stop[i])."""

    @property
    def handles(self) -> NDArray[np.int64]:
        """Handle of every row's request, `[rows]`."""
        ...

    @property
    def start(self) -> NDArray[np.int64]:
        """First token of every row, `[rows]`."""
        ...

    @property
    def stop(self) -> NDArray[np.int64]:
        """Behind the last token of every row, `[rows]`."""
        ...

    @property
    def in_place(self) -> NDArray[np.bool_]:
        """As in `ExtendedMany`, `[rows]`."""
        ...

    @property
    def plans(self) -> Mapping[int, Plan]:
        """By row, where there is one."""
        ...


class Tables(NamedTuple):
    """Tables of one step, int32 on the arena's device, named like the arguments of the ops that take them.

    With r rows, t tokens, m members and p pieces, padded: `seats`, `positions` (first token), `lengths` (last token
    included) `[r]`; `starts` `[r + 1]`; `token_seats`, `token_positions` `[t]`; `blocks` `[groups, seats, blocks]`.
    For each group: `src_members`, `dst_members` `[groups, r, m]` (the states at start and stop), `boundaries`
    `[groups, r, ends, m]` (after each end of a chunk), `line_src` `[groups, r, p]`, `line_dst` `[groups, r, kept, p]`,
    `line_at` `[r, kept]`, `windows` `[groups, r]`. `max_tokens`: tokens of the longest row.

    `loads` and `saves`: states to convert before and after the step with `Arena.convert`, where running states have a
    dtype of their own. All are views of storage that the next step overwrites.
    """

    seats: Tensor
    positions: Tensor
    lengths: Tensor
    starts: Tensor
    token_seats: Tensor
    token_positions: Tensor
    blocks: Tensor
    src_members: Tensor
    dst_members: Tensor
    boundaries: Tensor
    line_src: Tensor
    line_dst: Tensor
    line_at: Tensor
    windows: Tensor
    max_tokens: int
    loads: tuple[Pair, ...] = ()
    saves: tuple[Pair, ...] = ()


class StepTables:
    """Persistent tables for at most `rows` rows and `tokens` tokens a step, and requests of `context` tokens.

    Equal padded sizes give equal addresses, so that a captured graph finds its tables. A step costs O(rows) in array
    operations, and for each row with a plan O(groups) calls and one pass over its block table.

    `seats`: requests that run at once, `rows` if not given. `updates`: changed blocks that travel with one copy; a step
    with more takes another one for each as many. `check`: 1 refuses units outside their pools; 2 also two rows that
    write one unit (I8).
    """

    def __init__(
        self,
        arena: Arena,
        cache: HybridCache,
        *,
        rows: int,
        tokens: int,
        context: int,
        seats: int = 0,
        updates: int = 4096,
        check: int = 1,
    ) -> None:
        o, g = arena.organization, arena.organization.geometry
        if cache.organization != o:
            raise UsageError(f"cache must have the arena's organization {o.name!r}, got another one")
        for name, value in (("rows", rows), ("tokens", tokens), ("context", context), ("updates", updates)):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        self.arena, self.cache, self.check = arena, cache, check
        self.rows, self.tokens, self.context = rows, tokens, context
        self.chunk = g.chunk_tokens if g.recurrent is not None else 1
        self.recurrent = StateKind.LIVE if cache.storage.live else StateKind.SSM
        _check_kinds(arena, self.recurrent, replay=cache.growth.replay)
        blocks = -(-context // o.block_tokens)
        self._seats = Seats(o, seats or rows, blocks, self.recurrent)
        self._groups = g.recurrent_groups
        widest = self._shapes(rows, tokens, -(-tokens // self.chunk), 2 + tokens // o.grid_tokens)
        self._staging = Staging(length(widest), updates, arena.device)
        shape = (g.attention_groups, self._seats.count, blocks)
        self.blocks = torch.full(shape, ABSENT, dtype=torch.int32, device=arena.device)

    @property
    def copies(self) -> int:
        """Copies to the device so far."""
        return self._staging.copies

    def update(self, step: Step, *, rows: int = 0, tokens: int = 0) -> Tables:
        """Fill the tables for a step, padded to `rows` and `tokens`, and start their copy to the device.

        What does not fit, or a seat too few, is refused before anything changes. After `abandon`, `truncate`, `fork` and
        `alias` nothing need be said here: the cache names everything anew in the next plan.
        """
        spans = step.stop - step.start
        count, total, longest = len(spans), int(spans.sum()), int(spans.max(initial=0))
        rows, tokens = rows or count, tokens or total
        self._check_step(step, count, total, rows, tokens)
        seats = self._seats.take(step.handles, self.cache.rows)
        ends = max(1, -(-longest // self.chunk))
        kept = max((len(_lines(p)) for p in step.plans.values()), default=0)
        kept = max(kept, 2 if self.recurrent is StateKind.LIVE else 1)  # what a step that decodes may need
        arrays = self._staging.begin(self._shapes(rows, tokens, ends, kept), ABSENT)
        _fill_spans(arrays, step, seats, total)
        loads: list[Pair] = []
        saves: list[Pair] = []
        if self._groups:
            self._fill_states(arrays, step, seats)
            for i, plan in step.plans.items():
                self._fill_plan(arrays, i, plan, loads, saves)
        where, named = self._seats.changes(seats, step.plans)
        if self.check and step.plans:  # what else is named was looked at before
            self._check_units(arrays, named)
        self._to_entries(arrays)
        if len(named):
            named = self.arena.entries(StateKind.ATTENTION, named)
        views = self._staging.send(self.blocks, where, named)
        return Tables(**views, blocks=self.blocks, max_tokens=longest, loads=tuple(loads), saves=tuple(saves))

    # ----------------------------------------------------------------------------------------------- filling
    def _shapes(self, rows: int, tokens: int, ends: int, kept: int) -> dict[str, tuple[int, ...]]:
        g, m, p = self._groups, self._seats.running.shape[2], self._seats.lines.shape[2]
        return {
            "seats": (rows,), "positions": (rows,), "lengths": (rows,), "starts": (rows + 1,),
            "token_seats": (tokens,), "token_positions": (tokens,), "src_members": (g, rows, m),
            "dst_members": (g, rows, m), "boundaries": (g, rows, ends, m), "line_src": (g, rows, p),
            "line_dst": (g, rows, kept, p), "line_at": (rows, kept), "windows": (g, rows),
        }  # fmt: skip

    def _fill_states(self, arrays: Arrays, step: Step, seats: NDArray[np.int64]) -> None:
        """Every row as if it had no plan: on what its last one named."""
        known, n = self._seats, len(seats)
        for i, plan in step.plans.items():
            known.remember(int(seats[i]), plan)
        running, lines = known.running[:, seats], known.lines[:, seats]
        arrays["src_members"][:, :n] = np.where(step.in_place[:, None], running, known.left[:, seats])
        arrays["dst_members"][:, :n] = running
        arrays["line_src"][:, :n] = arrays["line_dst"][:, :n, 0] = lines
        arrays["line_at"][:] = 0
        arrays["line_at"][:n, 0] = step.stop - step.start
        if known.windows.shape[2]:
            arrays["windows"][:, :n] = known.windows[:, seats, 0]
        end = step.stop // self.chunk - step.start // self.chunk - 1
        some = np.flatnonzero(end >= 0)
        arrays["boundaries"][:, some, end[some]] = running[:, some]

    def _fill_plan(self, arrays: Arrays, i: int, plan: Plan, loads: list[Pair], saves: list[Pair]) -> None:
        """A row that reads elsewhere, or keeps boundaries on its way."""
        kind, start, source, target = self.recurrent, plan.start, plan.source, plan.destination
        if source is not None and target is not None and kind is StateKind.LIVE and kind not in source.units:
            loads.append((source, target))
            source = target
        if plan.source is not target:
            arrays["src_members"][:, i] = units(source, kind)
        if plan.line is not target:
            arrays["line_src"][:, i] = units(plan.line, self._seats.line)
        if not plan.writes:
            return
        ends, line_dst, line_at = (arrays[name] for name in ("boundaries", "line_dst", "line_at"))
        for k, (position, state) in enumerate(_lines(plan)):
            line_dst[:, i, k], line_at[i, k] = units(state, self._seats.line), position - start
        for position, state in plan.writes:
            if kind is StateKind.LIVE:
                assert target is not None
                saves.append((target, state))
            else:
                ends[:, i, position // self.chunk - start // self.chunk - 1] = units(state, kind)

    def _to_entries(self, arrays: Arrays) -> None:
        """Unit ids to mapping entries."""
        for name, kind in self._kinds():
            lying = self.arena.layout.units[kind]
            if arrays[name].size and lying.granule != lying.page_stride:  # else entries are page ids
                arrays[name][:] = self.arena.entries(kind, arrays[name])

    def _kinds(self) -> tuple[tuple[str, StateKind], ...]:
        r, line = self.recurrent, self._seats.line
        named = {"src_members": r, "dst_members": r, "boundaries": r, "line_src": line, "line_dst": line}
        kinds = (*named.items(), ("windows", StateKind.WINDOW))
        return tuple(pair for pair in kinds if pair[1] in self.arena.layout.units)

    # ----------------------------------------------------------------------------------------------- checking
    def _check_step(self, step: Step, count: int, total: int, rows: int, tokens: int) -> None:
        for name, got, room, most in (
            ("rows", count, rows, self.rows),
            ("tokens", total, tokens, self.tokens),
        ):
            if not got <= room <= most:
                raise UsageError(f"{name} must be in {got}..{most} (of the step, of the tables), got {room}")
        if count and (longest := int(step.stop.max())) > self.context:
            raise UsageError(f"stop must be at most {self.context} (context of the tables), got {longest}")
        if count and int((step.stop - step.start).min()) < 1:
            raise UsageError("stop must be above start in every row, got an empty row")
        if self.recurrent is StateKind.LIVE:
            for plan in step.plans.values():
                if any(w.position != plan.stop for w in plan.writes):
                    raise UnsupportedError(
                        f"stop must be the kept boundary where running states have a dtype of their own, got {plan.stop} "
                        f"behind {plan.writes[0].position}; cut prompts at boundaries"
                    )

    def _check_units(self, arrays: Arrays, blocks: NDArray[np.int32]) -> None:
        """Ids exist, and with `check` 2 no unit is written twice (I8)."""
        kinds = (*self._kinds(), ("blocks", StateKind.ATTENTION)) if len(blocks) else self._kinds()
        for name, kind in kinds:
            ids = blocks if name == "blocks" else arrays[name]
            if not ids.size:
                continue
            limit = self.arena.layout.units[kind].total
            if int(ids.max()) >= limit:
                known = f"{limit} units of {self.arena.organization.name}"
                raise CorruptionError("I5", f"{name} names {int(ids.max())} of {known}")
            if self.check > 1 and name in ("dst_members", "line_dst", "windows"):
                _check_apart(name, ids.reshape(ids.shape[0], ids.shape[1], -1))


def _check_apart(name: str, ids: NDArray[np.int32]) -> None:
    groups, rows, width = ids.shape
    owner = np.broadcast_to(np.arange(rows)[None, :, None], ids.shape)[ids >= 0]
    used = ids[ids >= 0]
    order = np.argsort(used, kind="stable")
    same = used[order][1:] == used[order][:-1]
    if (same & (owner[order][1:] != owner[order][:-1])).any():
        twice = int(used[order][1:][same][0])
        raise CorruptionError("I8", f"two rows write unit {twice} of {name} ({groups} groups of {width})")


def _lines(plan: Plan) -> list[tuple[int, State | None]]:
    """Positions at which a row's convolution state is kept, and in what; the last is where the step ends."""
    kept: list[tuple[int, State | None]] = [*plan.writes]
    return kept if kept and kept[-1][1] is plan.destination else [*kept, (plan.stop, plan.destination)]


def _fill_spans(arrays: Arrays, step: Step, seats: NDArray[np.int64], total: int) -> None:
    """Which tokens each row has, and where they stand."""
    n, spans = len(seats), step.stop - step.start
    arrays["seats"][:n], arrays["positions"][:n], arrays["lengths"][:n] = seats, step.start, step.stop
    arrays["positions"][n:] = arrays["lengths"][n:] = 0
    starts = arrays["starts"]
    starts[0], starts[n + 1 :] = 0, total
    np.cumsum(spans, out=starts[1 : n + 1])
    arrays["token_seats"][:total] = np.repeat(seats, spans)
    first = np.repeat(step.start - starts[:n], spans)
    arrays["token_positions"][:total] = first + np.arange(total)


def _check_kinds(arena: Arena, recurrent: StateKind, *, replay: bool) -> None:
    """What the ops ask of an organization, where a step could not say it better."""
    o, g = arena.organization, arena.organization.geometry
    line = o.placements.get(StateKind.CONV)
    if recurrent is StateKind.LIVE and line is not None and line.within is not None:
        raise UnsupportedError(
            f"conv must have units of its own where running states have their own dtype, got it within {line.within.value!r} "
            f"in {o.name!r}"
        )
    if replay and (members := arena.members(StateKind.WINDOW)) > 1:
        raise UnsupportedError(
            f"window must fit one page, got {members} pages in {o.name!r}; a smaller chunk_tokens than {g.chunk_tokens} helps"
        )
    delta = g.recurrent is not None and g.recurrent.kind is RecurrentKind.GATED_DELTA_NET
    if replay and delta and g.chunk_tokens != DELTA_CHUNK:
        raise UnsupportedError(
            f"chunk_tokens must be {DELTA_CHUNK} for the gated delta rule, got {g.chunk_tokens}"
        )
