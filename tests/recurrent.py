"""Material for the tests of the recurrent families: layouts, poisoned storage, rows with a history, error measures."""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hybridkv import ops
from hybridkv.testing.guard import guard
from hybridkv.units import DELTA_CHUNK, delta_window, ssd_window

if TYPE_CHECKING:
    from collections.abc import Callable

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


# ------------------------------------------------------------------------------ rows with a history
class Ssd(NamedTuple):
    """Geometry of a Mamba-2 layer, and how a batch of its rows is run."""

    heads: int = 3
    head_dim: int = 16
    state_dim: int = 64
    groups: int = 3
    chunk: int = 32
    dtype: torch.dtype = BF16
    name: str = "ssd"

    @property
    def head_elements(self) -> int:
        return self.head_dim * self.state_dim

    @property
    def window_size(self) -> int:
        shape = self.heads, self.head_dim, self.groups, self.state_dim, self.dtype.itemsize
        return ssd_window(self.chunk, *shape).size

    def constants(self) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(7)
        return {
            "A": -torch.tensor([1.0, 4.0, 16.0]).repeat(self.heads)[: self.heads],
            "D": torch.randn(self.heads, generator=g),
            "bias": torch.randn(self.heads, generator=g) - 3,
        }

    def tokens(self, count: int, seed: int) -> dict[str, Tensor]:
        """Inputs cut from one packed buffer, as a fused projection gives them."""
        g = torch.Generator().manual_seed(seed)
        wide, narrow = self.heads * self.head_dim, self.groups * self.state_dim
        packed = torch.randn(count, wide + 2 * narrow, generator=g).to(self.dtype)
        x, B, C = packed.split([wide, narrow, narrow], 1)
        return {
            "x": x.unflatten(1, (self.heads, self.head_dim)),
            "dt": torch.randn(count, self.heads, generator=g).to(self.dtype),
            "B": B.unflatten(1, (self.groups, self.state_dim)),
            "C": C.unflatten(1, (self.groups, self.state_dim)),
        }

    def output(self, count: int) -> Tensor:
        return torch.full((count, self.heads, self.head_dim), float("nan"))

    def run(self, pool: Tensor, src: Tensor, boundaries: Tensor, **kwargs: object) -> None:
        shape = (*boundaries.shape[:2], self.heads, self.head_dim, self.state_dim)
        scratch = torch.full(shape, float("nan"), dtype=pool.dtype) if kwargs["max_tokens"] > 1 else None
        ops.ssd(pool, src, boundaries, scratch, chunk=self.chunk, **self.constants(), **kwargs)


class Delta(NamedTuple):
    """Geometry of a gated delta rule layer, and how a batch of its rows is run."""

    key_heads: int = 1
    heads: int = 3
    key_dim: int = 32
    value_dim: int = 16
    chunk: int = DELTA_CHUNK
    dtype: torch.dtype = BF16
    name: str = "delta"

    @property
    def head_elements(self) -> int:
        return self.key_dim * self.value_dim

    @property
    def window_size(self) -> int:
        shape = self.key_heads, self.key_dim, self.heads, self.value_dim, self.dtype.itemsize
        return delta_window(*shape).size

    def constants(self) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(7)
        return {
            "A": -torch.tensor([0.1, 1.0, 8.0]).repeat(self.heads)[: self.heads],
            "bias": torch.randn(self.heads, generator=g) - 2,
        }

    def tokens(self, count: int, seed: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(seed)
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        packed = torch.randn(count, 2 * keys + values, generator=g)
        q, k, v = packed.split([keys, keys, values], 1)
        q, k = (torch.nn.functional.normalize(t.unflatten(1, (-1, self.key_dim)), dim=-1) for t in (q, k))
        packed = torch.cat([q.flatten(1), k.flatten(1), v], 1).to(self.dtype)
        q, k, v = packed.split([keys, keys, values], 1)
        return {
            "q": q.unflatten(1, (-1, self.key_dim)),
            "k": k.unflatten(1, (-1, self.key_dim)),
            "v": v.unflatten(1, (-1, self.value_dim)),
            "a": torch.randn(count, self.heads, generator=g).to(self.dtype),
            "b": torch.randn(count, self.heads, generator=g).to(self.dtype),
        }

    def output(self, count: int) -> Tensor:
        return torch.full((count, self.heads, self.value_dim), float("nan"))

    def run(self, pool: Tensor, src: Tensor, boundaries: Tensor, **kwargs: object) -> None:
        ops.delta_rule(pool, src, boundaries, scale=self.key_dim**-0.5, **self.constants(), **kwargs)


@dataclass
class Row:
    """A sequence in flight: its tokens, where its state is, and what came out so far."""

    tokens: dict[str, Tensor]
    members: Placed
    window: int
    out: Tensor
    position: int = 0
    shared: bool = False  # its state is a checkpoint that others read
    states: dict[int, Tensor] = field(default_factory=dict)


class Batch:
    """Rows over one storage; every `advance` is one call of the op, in any program order."""

    def __init__(self, family: Ssd | Delta, organization: str = "members", *, state: torch.dtype = BF16, seed: int = 0,
                 impl: str = "triton", order: str = "shuffle", units: int = 96) -> None:  # fmt: skip
        self.family, self.impl, self.order = family, impl, order
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

    def start(self, count: int, seed: int) -> Row:
        tokens = self.family.tokens(count, seed)
        return Row(tokens, self.storage.nothing(), self.free_windows.pop(), self.family.output(count))

    def resume(self, row: Row) -> Row:
        """A second row that shares the first one's last boundary state, with a window of its own."""
        position = row.position // self.family.chunk * self.family.chunk
        row.shared = True
        twin = Row(row.tokens, row.members, self.free_windows.pop(), torch.full_like(row.out, float("nan")))
        twin.position, twin.shared = position, True
        return twin

    def _targets(self, row: Row, count: int, ends: int) -> list[Placed]:
        """Destinations for the chunks that `count` tokens complete: kept or not, in place or not."""
        done = (row.position + count) // self.family.chunk - row.position // self.family.chunk
        where = [self.storage.nothing()] * ends
        for c in range(done):
            last = c == done - 1
            if last and row.position >= self.family.chunk and not row.shared and self.rng.random() < 0.5:
                where[c] = row.members
            elif last or self.rng.random() < 0.5:
                where[c] = self.storage.take()
                self.owned.append(where[c])
        return where

    def advance(self, steps: list[tuple[Row, int]], spare: int = 0) -> None:
        """Run `count` tokens of every row in one call, with `spare` inactive rows in between."""
        f, longest = self.family, max(n for _, n in steps)
        ends = max(1, (longest + f.chunk - 1) // f.chunk)
        targets = [self._targets(row, n, ends) for row, n in steps]
        total = sum(n for _, n in steps)
        inputs = {
            k: torch.cat([row.tokens[k][row.position : row.position + n] for row, n in steps])
            for k in steps[0][0].tokens
        }
        out, none = f.output(total), self.storage.nothing().members
        starts = [0]
        for _, n in steps:
            starts.append(starts[-1] + n)
        with guard(order=self.order, hazards=False):
            f.run(
                self.storage.pool,
                i32([row.members.members for row, _ in steps] + [none] * spare),
                i32([[p.members for p in t] for t in targets] + [[none] * ends] * spare),
                window_pool=self.windows, windows=i32([row.window for row, _ in steps] + [ABSENT] * spare),
                starts=i32(starts + [starts[-1]] * spare), positions=i32([row.position for row, _ in steps] + [0] * spare),
                **inputs, out=out, granule=self.storage.granule(self.storage.dtype),
                heads_per_member=self.storage.heads_per_member, window_granule=self.step, max_tokens=longest,
                impl=self.impl,
            )  # fmt: skip
        for (row, n), where, part in zip(steps, targets, out.split([n for _, n in steps]), strict=True):
            row.out[row.position : row.position + n] = part
            first = row.position // f.chunk
            row.position += n
            for c in range(row.position // f.chunk - first):
                if where[c].members[0] >= 0:
                    row.states[(first + c + 1) * f.chunk] = self.storage.state(where[c])
                    row.members, row.shared = where[c], row.shared and where[c] == row.members

    def untouched(self) -> bool:
        """Whether every byte outside the states that were written is still poison."""
        raw, s = self.storage.raw.clone(), self.storage
        for placed in self.owned:
            for m, entry in enumerate(placed.members):
                heads = min(s.heads_per_member, s.heads - m * s.heads_per_member)
                size = heads * s.head_elements * s.dtype.itemsize
                raw[entry * GRANULE : entry * GRANULE + size] = 0xFF
        return bool((raw == 0xFF).all())


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def check_registered(public: Callable[..., None], arguments: dict[str, object]) -> None:
    """The op's schema tells what it mutates (HK-K8), and its public function traces without a graph break."""
    numbers = {k: v for k, v in arguments.items() if isinstance(v, int | float)}
    tensors = {
        k: arguments[k] for k in inspect.signature(public).parameters if k in arguments and k not in numbers
    }
    op = getattr(torch.ops.hybridkv, public.__name__).default
    torch.library.opcheck(op, tuple(tensors.values()), numbers, test_utils=("test_schema", "test_faketensor"))
    torch.compile(lambda t: public(**t, **numbers), fullgraph=True, backend="eager")(tensors)
