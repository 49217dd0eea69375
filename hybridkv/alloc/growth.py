"""How a running request comes by storage, and gives it back: the demand of a step, reserving, undoing, letting go.

Works on one request and the storage; knows no index. The tables in `requests` say who holds what.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.alloc.checkpoint import Checkpoint, State
from hybridkv.alloc.organization import StateKind
from hybridkv.alloc.plan import Copy, Plan, Write
from hybridkv.alloc.policy.placement import NEVER
from hybridkv.alloc.requests import Request, Undo
from hybridkv.alloc.rows import RowTable
from hybridkv.alloc.storage import Storage, Wanted

ATTENTION = StateKind.ATTENTION


class Growth:
    """Storage operations of one cache's requests."""

    def __init__(self, storage: Storage, rows: RowTable, *, replay: bool) -> None:
        self.storage, self.rows, self.replay = storage, rows, replay
        self.block_tokens = storage.organization.block_tokens
        self.attention = bool(storage.attention)
        self.recurrent = storage.organization.geometry.recurrent is not None
        self.shared_planes = False  # until the first alias
        # replay decode: the recurrent state advances at the ends of chunks only, what follows lies in the window
        self.chunk = storage.organization.geometry.chunk_tokens if replay else 1
        self.rolls_back = replay and not storage.organization.geometry.conv_bytes  # a line keeps no history

    def wanted(self, r: Request, start: int, stop: int, reserve: int = 0) -> Wanted:
        """What a step over [start, stop) must take, in the order in which `reserve` attaches it.

        Attention blocks up to `reserve`, where that is more.
        """
        blocks = -(-max(stop, reserve) // self.block_tokens) - r.blocks if self.attention else 0
        checkpoints = live = window = 0
        if self.recurrent:
            kept = r.kept_between(start, stop)
            checkpoints = len(kept)
            if self.storage.live:
                live = int(r.live is None)
            else:
                ends_open = not kept or kept[-1] < stop
                checkpoints += ends_open - (r.open is not None)
            window = int(self.replay and r.window is None)
        s = self.storage
        return (
            (s.attention, max(0, blocks)),
            (s.checkpoint, checkpoints),
            (s.live, live),
            (s.window, window),
        )

    def alone(self, tokens: int) -> Wanted:
        """What a lone request of `tokens` tokens holds at most, in steps that end at kept boundaries."""
        s, grid = self.storage, self.storage.organization.grid_tokens
        states = min(2, -(-tokens // grid)) if self.recurrent else 0
        return (
            (s.attention, -(-tokens // self.block_tokens)),
            (s.checkpoint, 1 if s.live else states),
            (s.live, int(bool(s.live))),
            (s.window, int(self.replay)),
        )

    def coming(self, r: Request, start: int, stop: int, reserve: int) -> Wanted:
        """What steps up to `reserve` will need at once behind a first one that ends at `stop`: one more checkpoint when
        they pass a boundary, unless the one that was hit comes free by then.
        """
        passes = self.recurrent and stop < reserve and r.next_kept(start) < reserve
        return (
            (self.storage.checkpoint, int(passes and (r.source is None or not self.storage.sole(r.source)))),
        )

    def reserve(self, r: Request, start: int, stop: int, wanted: Wanted, *, admitted: bool = False) -> Plan:
        """Take what is `wanted`, record how to undo it, put the step in flight, and say what it reads and writes.

        `storage.shortage` has said that it fits.
        """
        before = (r.blocks, r.open, r.opened_at, tuple(r.boundaries), r.live, r.window)
        self.storage.lost.clear()
        taken = self.storage.take(wanted)
        if count := wanted[0][1]:
            self._add_blocks(r, taken[0][ATTENTION][:, :, 0].T, count)
        if self.recurrent:
            self._attach(r, start, stop, taken)
        step = self.rows.push_one(r.row, stop)
        r.journal.append(Undo(step, admitted, *before, taken, self.storage.lost[:]))
        self.set_limit(r)
        return self.plan(r, start, stop)

    def _add_blocks(self, r: Request, units: np.ndarray, count: int) -> None:
        groups, width = units.shape[0], r.table.shape[1]
        if r.blocks + count > width or r.table.shape[0] != groups:
            wider = np.full((groups, max(r.blocks + count, 2 * width)), -1, np.int32)
            wider[:, : r.blocks] = r.table[:, : r.blocks] if r.blocks else 0
            r.table = wider
        r.table[:, r.blocks : r.blocks + count] = units
        r.blocks += count

    def _attach(self, r: Request, start: int, stop: int, taken: list[dict[StateKind, np.ndarray]]) -> None:
        """Boundaries get their destinations in order; what is left over is the running state."""
        count = len(next(iter(taken[1].values()), ()))
        fresh = [Checkpoint(0, {kind: ids[i] for kind, ids in taken[1].items()}) for i in range(count)]
        separate = bool(self.storage.live)
        queue = fresh if separate or r.open is None else [r.open, *fresh]
        opened_at = start
        for position in r.kept_between(start, stop):
            state = queue.pop(0)
            state.position = opened_at = position
            r.boundaries.append(state)
        if not separate:
            if queue and queue[0] is not r.open:
                self.rows.opened_at[r.row] = opened_at
            r.open = queue[0] if queue else None
        elif taken[2]:
            r.live = State(0, {kind: ids[0] for kind, ids in taken[2].items()})
            self.rows.opened_at[r.row] = start
        if taken[3]:
            r.window = State(0, {kind: ids[0] for kind, ids in taken[3].items()})

    def set_limit(self, r: Request) -> None:
        """Up to where steps need neither storage nor bookkeeping."""
        limit = r.blocks * self.block_tokens if self.attention else NEVER
        if self.recurrent:
            planned = r.planned
            running = (
                r.open is not None or r.live is not None
            ) and planned > r.opened_at  # else a step reads elsewhere
            limit = min(limit, r.next_kept(planned) - 1 if running else planned)
        self.rows.limit[r.row] = limit

    def renew(self, r: Request) -> None:
        """The next step names everything again: what the last plan named is no longer true."""
        self.set_limit(r)
        self.rows.limit[r.row] = min(int(self.rows.limit[r.row]), r.planned)

    def fold(self, position: int) -> int:
        """What the recurrent state at `position` has absorbed."""
        return position - position % self.chunk

    def plan(self, r: Request, start: int, stop: int, copies: tuple[Copy, ...] = ()) -> Plan:
        """What the newest step of `r` reads and writes."""
        table = r.table[
            :, : r.blocks
        ]  # also what is reserved behind `stop`: a later step may need no plan of its own
        if not self.recurrent:
            return Plan(r.handle, start, stop, table, copies=copies)
        writes = tuple(Write(b.position, b) for b in r.boundaries if start < b.position <= stop)
        running = r.live or r.open
        if self.storage.live:
            source = line = running if start > r.opened_at else r.source
            destination = running
        else:
            source, line = self.state_at(r, self.fold(start)), self.state_at(r, start)
            destination = writes[-1].state if writes and writes[-1].position == stop else running
        return Plan(r.handle, start, stop, table, source, line, destination, writes, r.window, copies)

    def state_at(self, r: Request, position: int) -> Checkpoint | None:
        """The checkpoint that holds, or will hold, the state at `position`; None for the zeros at the start."""
        if position == (r.source.position if r.source is not None else 0):
            return r.source
        return next((b for b in r.boundaries if position <= b.position), r.open)

    def undo(self, r: Request, undo: Undo) -> None:
        """Give back what one step took, as if it had never been planned. Newest first."""
        r.blocks, r.open, opened_at, boundaries, r.live, r.window = undo[2:8]
        r.boundaries = [b for b in boundaries if b.position > r.computed]  # the others were committed since
        self.rows.opened_at[r.row] = opened_at
        self.storage.untake(undo.taken)

    def retreat(self, r: Request, position: int) -> None:
        """Everything in flight behind `position` is dropped; the state in progress there runs on.

        Only for states: attention blocks stay reserved.
        """
        behind = [b for b in r.boundaries if b.position > position]
        r.boundaries = [b for b in r.boundaries if b.position <= position]
        if not self.storage.live and behind:
            dropped = behind[1:] + ([r.open] if r.open is not None else [])
            r.open = behind[0]
            start = r.boundaries[-1] if r.boundaries else r.source
            self.rows.opened_at[r.row] = start.position if start else 0
        else:
            dropped = behind
        self.storage.release(dropped)

    def drop_blocks(self, r: Request, keep: int) -> None:
        """Give back attention blocks from index `keep` on, deepest first."""
        if r.blocks > keep:
            self.storage.gains += 1
            units = np.ascontiguousarray(r.table[:, keep : r.blocks][:, ::-1].T).ravel()
            self.storage.by_kind[ATTENTION].release(self.once(units))
            r.blocks = keep
            r.published = min(r.published, keep)

    def once(self, units: NDArray[np.int32]) -> NDArray[np.int32]:
        """Units of a table, each once, in their order: a page that several planes share has one reference (D42)."""
        if not self.shared_planes:
            return units
        return units[np.sort(np.unique(units, return_index=True)[1])]

    def let_go(self, r: Request) -> None:
        """Give back everything, deepest first, so that the deepest is reclaimed first (research note 3.2)."""
        source = r.source
        unfinished = [s for s in r.states() if s is not source]
        self.storage.release(unfinished)
        if source is not None:
            self.drop_blocks(r, source.position // self.block_tokens)
            self.storage.release([source])
        self.drop_blocks(r, 0)
        r.clear()
