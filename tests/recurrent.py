"""Material for the tests of the recurrent families: layouts, poisoned storage, rows with a history, error measures."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
GRANULE = 16  # bytes


def relative(a: Tensor, exact: Tensor) -> float:
    return ((a.double() - exact).norm() / exact.norm()).item()


def budget(exact: Tensor, dtype: torch.dtype) -> float:
    """Twice what rounding the exact result costs, and never less than twice bf16's for bf16 operands."""
    return 2 * relative(exact.to(dtype), exact)


def i32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def up(size: int, step: int) -> int:
    return -(-size // step) * step


class Placed(NamedTuple):
    """Entries of one checkpoint: members, and pieces of its convolution line."""

    members: list[int]
    line: list[int]


ABSENT = -1


@dataclass
class Storage:
    """One arena of bytes 0xFF (NaN in every float type) under one organization's layout of a checkpoint.

    organization: "composite" (S0: one page, the line behind the state), "members" (S1, S2: three pages, the line in a
    slot), "strided" (D0: one page with slack), "striped" (three pages, a third of the line in each tail), "nested" (one
    page at any 16-byte place, the line found by an offset).
    """

    organization: str
    heads: int
    head_elements: int
    line_elements: int
    dtype: torch.dtype = BF16
    units: int = 40
    seed: int = 0
    heads_per_member: int = field(init=False)
    line_offset: int = field(init=False, default=0)  # in elements of the line's dtype

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        split = 3 if self.organization in ("members", "striped") else 1
        self.heads_per_member = -(-self.heads // split)
        self.member_count = -(-self.heads // self.heads_per_member)
        body = self.heads_per_member * self.head_elements * self.dtype.itemsize
        line = self.line_elements * BF16.itemsize
        piece = up(-(-line // self.member_count), GRANULE)
        self.body = up(body, GRANULE)
        self.page = {
            "composite": self.body + up(line, GRANULE),
            "members": max(self.body, up(line, GRANULE)),
            "strided": self.body + up(line, GRANULE) + 208,
            "striped": self.body + piece,
            "nested": self.body + up(line, GRANULE),
        }[self.organization]
        gap = 48 if self.organization == "nested" else 0
        self.raw = torch.full((self.units * (self.page + gap),), 0xFF, dtype=torch.uint8)
        self.free = [n * (self.page + gap) // GRANULE + gap // GRANULE for n in range(self.units)]
        self.rng.shuffle(self.free)
        if self.organization in ("striped", "nested"):
            self.line_offset = self.body // BF16.itemsize

    @property
    def pool(self) -> Tensor:
        return self.raw.view(self.dtype)

    @property
    def lines(self) -> Tensor:
        return self.raw.view(BF16)

    def granule(self, dtype: torch.dtype) -> int:
        return GRANULE // dtype.itemsize

    def take(self) -> Placed:
        """A checkpoint of poisoned units."""
        members = [self.free.pop() for _ in range(self.member_count)]
        if self.organization == "members":
            return Placed(members, [self.free.pop()])
        if self.organization in ("composite", "strided"):
            return Placed(members, [members[0] + self.body // GRANULE])
        return Placed(members, list(members))

    def nothing(self) -> Placed:
        return Placed(*([ABSENT] * len(part) for part in self._shape()))

    def _shape(self) -> Placed:
        members = [0] * self.member_count
        return Placed(members, members if self.organization in ("striped", "nested") else [0])

    def state(self, placed: Placed) -> Tensor:
        """The state as stored, `[heads * head_elements]`."""
        size = self.heads_per_member * self.head_elements
        step = self.granule(self.dtype)
        parts = [self.pool[m * step : m * step + size] for m in placed.members]
        return torch.cat(parts)[: self.heads * self.head_elements].clone()

    def put(self, placed: Placed, state: Tensor) -> None:
        size, step = self.heads_per_member * self.head_elements, self.granule(self.dtype)
        for m, part in zip(placed.members, state.reshape(-1).split(size), strict=True):
            self.pool[m * step : m * step + len(part)] = part.to(self.dtype)

    def _pieces(self, placed: Placed) -> list[slice]:
        step = up(-(-self.line_elements * 2 // len(placed.line)), GRANULE) // 2
        sizes = [min(step, self.line_elements - at) for at in range(0, self.line_elements, step)]
        starts = [self.line_offset + entry * self.granule(BF16) for entry in placed.line]
        return [slice(a, a + n) for a, n in zip(starts, sizes, strict=False)]

    def line(self, placed: Placed) -> Tensor:
        return torch.cat([self.lines[s] for s in self._pieces(placed)]).clone()

    def put_line(self, placed: Placed, line: Tensor) -> None:
        flat = line.reshape(-1)
        for s in self._pieces(placed):
            size = s.stop - s.start
            self.lines[s] = flat[:size]
            flat = flat[size:]


ORGANIZATIONS = ["composite", "members", "strided", "striped", "nested"]
