"""Who sits in which row of the block table, and what the last plan of each request named.

Rows of a step without a plan compute on what is remembered here. Holds unit ids, on the host; knows no tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hybridkv.alloc.organization import Organization, StateKind
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
        self._of: dict[int, int] = {}

    def take(self, handles: NDArray[np.int64], rows: RowTable) -> Seated:
        """The seat of every request. New ones take seats of requests that run no more; refused where all run."""
        names = handles.tolist()
        new = [h for h in names if h not in self._of]
        if len(new) > self.count - len(self._of):
            gone = ~rows.running(self._handles) & ~np.isin(self._handles, handles)
            if len(new) > gone.sum():
                raise UsageError(f"seats must be at least the running requests, got {self.count}")
            for handle in self._handles[gone].tolist():
                self._of.pop(handle, None)
            self._handles[gone] = ABSENT
        if new:
            for handle, seat in zip(new, np.flatnonzero(self._handles == ABSENT).tolist(), strict=False):
                self._of[handle] = seat
                self._handles[seat] = handle
        return np.fromiter((self._of[h] for h in names), np.int64, len(names))

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
        where: list[NDArray[np.int64]] = []
        what: list[NDArray[np.int32]] = []
        groups, _, blocks = self.table.shape
        for i, plan in plans.items() if groups else ():
            seat, named = int(seats[i]), plan.attention
            count = max(named.shape[1], int(self._used[seat]))
            now = np.full((groups, count), ABSENT, np.int32)
            now[:, : named.shape[1]] = named
            row = self.table[:, seat, :count]
            group, block = np.nonzero(now != row)
            where.append((group * self.count + seat) * blocks + block)
            what.append(now[group, block])
            row[:] = now
            self._used[seat] = named.shape[1]
        if not where:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        return np.concatenate(where), np.concatenate(what)
