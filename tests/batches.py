"""Rows of a recurrent family with a history: a state in some pages, a window, outputs so far; and faults to plant."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridkv.testing.guard import guard
from tests.recurrent import ABSENT, BF16, GRANULE, Delta, Placed, Ssd, Storage, i32, up

FAULTS = {  # what is planted into `Batch`, and the property that it breaks
    "a window given to two rows": "batch composition",
    "windows not reordered with their rows": "row order",
    "members read in reverse": "page permutation",
    "members read 16 bytes further": "organization",
    "a state read again after it was overwritten": "in place",
    "a cut rounds, the call does not": "split at a chunk's end",
}


@dataclass
class Row:
    """A sequence in flight: its tokens, where its state is, and what came out so far."""

    tokens: dict[str, Tensor]
    members: Placed
    window: int
    out: Tensor
    number: int = 0
    position: int = 0
    shared: bool = False  # its state is a checkpoint that others read
    states: dict[int, Tensor] = field(default_factory=dict)
    pages: dict[int, list[int]] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)  # tokens of its calls


class Batch:
    """Rows over one storage; every `advance` is one call of the op, in any program order.

    `keep_all`: no boundary is left out, and none in place. `fault`: one of FAULTS.
    `varied` says which properties the calls so far have varied against one call for a row alone.
    """

    def __init__(self, family: Ssd | Delta, organization: str = "members", *, state: torch.dtype = BF16, seed: int = 0,
                 impl: str = "triton", order: str = "shuffle", units: int = 96, keep_all: bool = False,
                 fault: str | None = None) -> None:  # fmt: skip
        self.family, self.impl, self.order, self.keep_all, self.fault = family, impl, order, keep_all, fault
        self.storage = Storage(
            organization, family.heads, family.head_elements, 24, state, units=units, seed=seed
        )
        self.step = GRANULE // family.dtype.itemsize
        size = up(family.window_size, self.step)
        self.windows = torch.full((8 * size,), float("nan"), dtype=family.dtype)
        self.free_windows = [n * size // self.step for n in range(8)]
        self.rng = random.Random(seed)
        self.rng.shuffle(self.free_windows)
        self.owned: list[Placed] = []
        self.rows: list[Row] = []
        self.turns = itertools.cycle([seed % 2 == 0, seed % 2 == 1])  # folds in place and elsewhere, by turns
        self.varied: set[str] = set()

    def start(self, count: int, seed: int) -> Row:
        window = self.free_windows.pop()
        if self.fault == "a window given to two rows" and self.rows:
            window = self.rows[0].window
        row = Row(self.family.tokens(count, seed), self.storage.nothing(), window, self.family.output(count))
        row.number = len(self.rows)
        self.rows.append(row)
        return row

    def resume(self, row: Row) -> Row:
        """A second row that shares the first one's last boundary state, with a window of its own."""
        position = row.position // self.family.chunk * self.family.chunk
        row.shared = True
        twin = Row(row.tokens, row.members, self.free_windows.pop(), torch.full_like(row.out, float("nan")))
        twin.number, twin.position, twin.shared = len(self.rows), position, True
        self.rows.append(twin)
        return twin

    def _targets(self, row: Row, count: int, ends: int) -> list[Placed]:
        """Destinations for the chunks that `count` tokens complete: kept or not, in place or not."""
        done = (row.position + count) // self.family.chunk - row.position // self.family.chunk
        where = [self.storage.nothing()] * ends
        for c in range(done):
            last = c == done - 1
            if (
                last
                and row.members.members[0] >= 0
                and not row.shared
                and not self.keep_all
                and next(self.turns)
            ):
                where[c] = row.members
            elif last or self.keep_all or self.rng.random() < 0.5:
                where[c] = self.storage.take()
                self.owned.append(where[c])
        return where

    def advance(self, steps: list[tuple[Row, int]], spare: int = 0) -> None:
        """Run `count` tokens of every row in one call, with `spare` inactive rows somewhere among them."""
        ends = max(1, (max(n for _, n in steps) + self.family.chunk - 1) // self.family.chunk)
        targets = [self._targets(row, n, ends) for row, n in steps]
        total = sum(n for _, n in steps)
        out = self.family.output(total)
        places: list[int | None] = list(range(len(steps)))
        for _ in range(spare):
            places.insert(self.rng.randint(0, len(places)), None)
        again = self.fault == "a state read again after it was overwritten" and any(
            row.members in where for (row, _), where in zip(steps, targets, strict=True)
        )
        for _ in range(1 + again):
            self._call(steps, targets, places, out, ends)
        self._observe(steps, targets)
        for (row, n), where, part in zip(steps, targets, out.split([n for _, n in steps]), strict=True):
            row.out[row.position : row.position + n] = part
            first = row.position // self.family.chunk
            row.position += n
            for c in range(row.position // self.family.chunk - first):
                if where[c].members[0] >= 0:
                    at = (first + c + 1) * self.family.chunk
                    row.states[at], row.pages[at] = self.storage.state(where[c]), self.storage.pages(where[c])
                    row.members, row.shared = where[c], row.shared and where[c] == row.members
            if self.fault == "a cut rounds, the call does not" and row.members.members[0] >= 0:
                self.storage.put(row.members, self.storage.state(row.members).to(BF16))

    def _call(
        self,
        steps: list[tuple[Row, int]],
        targets: list[list[Placed]],
        places: list[int | None],
        out: Tensor,
        ends: int,
    ) -> None:
        s, none = self.storage, self.storage.nothing().members
        sources, windows, kept, positions, starts = [], [], [], [], [0]
        table = [row.window for row, _ in steps]
        if self.fault == "windows not reordered with their rows":
            table = [row.window for row, _ in sorted(steps, key=lambda step: step[0].number)]
        for place in places:
            row, n = steps[place] if place is not None else (None, 0)
            sources.append(row.members.members if row else none)
            windows.append(table[place] if place is not None else ABSENT)
            kept.append([p.members for p in targets[place]] if place is not None else [none] * ends)
            positions.append(row.position if row else 0)
            starts.append(starts[-1] + n)
        for n, members in enumerate(sources):
            if members in kept[n]:  # in place: the op would refuse what is planted
                continue
            if self.fault == "members read in reverse":
                sources[n] = members[::-1]
            if self.fault == "members read 16 bytes further":
                sources[n] = [e + (e >= 0) for e in members]
        inputs = {
            k: torch.cat([row.tokens[k][row.position : row.position + n] for row, n in steps])
            for k in steps[0][0].tokens
        }
        with guard(order=self.order, hazards=False):
            self.family.run(
                s.pool, i32(sources), i32(kept), window_pool=self.windows, windows=i32(windows), starts=i32(starts),
                positions=i32(positions), **inputs, out=out, granule=s.granule(s.dtype),
                heads_per_member=s.heads_per_member, window_granule=self.step, max_tokens=max(n for _, n in steps),
                impl=self.impl,
            )  # fmt: skip

    def _observe(self, steps: list[tuple[Row, int]], targets: list[list[Placed]]) -> None:
        """Before positions move: which properties this call varies."""
        chunk, numbers = self.family.chunk, [row.number for row, _ in steps]
        if len(steps) > 1:
            self.varied.add("batch composition")
            self.varied.add("rows in order" if numbers == sorted(numbers) else "row order")
            if len({n == 1 for _, n in steps}) > 1:
                self.varied.add("decode and prefill in one call")
        for (row, n), where in zip(steps, targets, strict=True):
            if row.position and row.position % chunk:
                self.varied.add("split inside a chunk")
            elif row.position and n > 1 and row.counts[-1:] > [1]:
                self.varied.add("split at a chunk's end")
            row.counts.append(n)
            source = row.members.members[0] >= 0
            folds = (row.position + n) // chunk - row.position // chunk
            if folds and source:
                self.varied.add("in place" if where[folds - 1] == row.members else "not in place")
            if n == 1 and row.counts[-2:] == [1, 1] and row.position % chunk == 0 and row.position:
                self.varied.add("decode-made state")  # folded by a decode step, and read by the next

    def untouched(self) -> bool:
        """Whether every byte outside the states that were written is still poison."""
        raw, s = self.storage.raw.clone(), self.storage
        for placed in self.owned:
            for m, entry in enumerate(placed.members):
                heads = min(s.heads_per_member, s.heads - m * s.heads_per_member)
                size = heads * s.head_elements * s.dtype.itemsize
                raw[entry * GRANULE : entry * GRANULE + size] = 0xFF
        return bool((raw == 0xFF).all())
