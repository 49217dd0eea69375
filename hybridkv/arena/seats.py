"""Who sits in which row of the block table, and what the last plan of each request named.

Rows of a step without a plan compute on what is remembered here. Holds unit ids, on the host; knows no tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hybridkv.alloc.organization import Organization, StateKind
from hybridkv.alloc.rows import ROW_MASK
from hybridkv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from hybridkv.alloc.checkpoint import State
    from hybridkv.alloc.plan import Plan
    from hybridkv.alloc.rows import RowTable

    Seated = NDArray[np.int64]

ABSENT = -1


def host(organization: Organization, kind: StateKind) -> StateKind:
    """The kind whose units hold states of `kind`."""
    place = organization.placements.get(kind)
    return kind if place is None or place.within is None else place.within


def units(state: State | None, kind: StateKind) -> NDArray[np.int32] | int:
    """Ids of a state, int32 `[groups, members]`, or absent."""
    return ABSENT if state is None else state.units.get(kind, ABSENT)


class Seats:
    """`count` seats. Arrays hold a column for each.

    left     recurrent state, where a step does not work in place   running   the running state
    lines    whose units hold the running convolution state         windows   the replay window
    """

    def __init__(self, organization: Organization, count: int, blocks: int, recurrent: StateKind) -> None:
        g, places = organization.geometry, organization.placements
        self.count, self.recurrent, self.line = count, recurrent, host(organization, StateKind.CONV)
        widths = {k: places[k].pages or 1 for k in (recurrent, self.line, StateKind.WINDOW) if k in places}

        def absent(kind: StateKind) -> NDArray[np.int32]:
            return np.full((g.recurrent_groups, count, widths.get(kind, 0)), ABSENT, np.int32)

        self.left, self.running, self.lines = absent(recurrent), absent(recurrent), absent(self.line)
        self.windows = absent(StateKind.WINDOW)
        self.table = np.full((g.attention_groups, count, blocks), ABSENT, np.int32)
        self._used = np.zeros(count, np.int64)  # blocks of each seat's row that are not absent
        self._handles = np.full(count, ABSENT, np.int64)
        self._by_row = np.full(64, ABSENT, np.int64)

    def take(self, handles: NDArray[np.int64], rows: RowTable) -> Seated:
        """The seat of every request. New ones take seats of requests that run no more; refused where all run."""
        at = handles & ROW_MASK
        if (more := int(at.max(initial=0)) + 1 - len(self._by_row)) > 0:
            self._by_row = np.pad(self._by_row, (0, more + len(self._by_row)), constant_values=ABSENT)
        seats = self._by_row[at]
        new = np.flatnonzero((seats < 0) | (self._handles[seats] != handles))
        if len(new):
            free = np.flatnonzero(self._handles == ABSENT)
            if len(new) > len(free):
                free = np.flatnonzero(~rows.running(self._handles) & ~np.isin(self._handles, handles))
            if len(new) > len(free):
                raise UsageError(f"seats must be at least the running requests, got {self.count}")
            seats[new] = free[: len(new)]
            self._by_row[at[new]] = seats[new]
            self._handles[seats[new]] = handles[new]
        return seats

    def remember(self, seat: int, plan: Plan) -> None:
        """What later rows without a plan compute on."""
        self.left[:, seat] = units(plan.left(), self.recurrent)
        self.running[:, seat] = units(plan.destination, self.recurrent)
        self.lines[:, seat] = units(plan.destination, self.line)
        self.windows[:, seat] = units(plan.window, StateKind.WINDOW)

    def changes(
        self, seats: Seated, plans: Mapping[int, Plan]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Entries of the block table that the plans change: flat positions, and the units that lie there now."""
        groups, _, blocks = self.table.shape
        first: list[int] = []  # in group 0; behind it so many more
        counts: list[int] = []
        found: list[NDArray[np.int32]] = []
        for i, plan in plans.items() if groups else ():
            seat, named = int(seats[i]), plan.attention
            row, used, count = self.table[:, seat], int(self._used[seat]), named.shape[1]
            start = used
            if count < used or (row[:, :used] != named[:, :used]).any():  # another request, or cut, or copied
                start, used = 0, max(count, used)
            if start == count == used:
                continue
            row[:, start:count], row[:, count:used] = named[:, start:], ABSENT
            first.append(seat * blocks + start)
            counts.append(max(count, used) - start)
            found.append(row[:, start : start + counts[-1]])
            self._used[seat] = count
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        ends = np.cumsum(counts)
        flat = np.repeat(np.array(first) - ends + counts, counts) + np.arange(ends[-1])
        where = flat + np.arange(groups)[:, None] * (self.count * blocks)
        return where.ravel(), np.concatenate(found, axis=1).ravel()
