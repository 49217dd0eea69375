"""Material for the tests of the recurrent families: layouts, poisoned storage, geometries, error measures."""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hybridkv import ops
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
        self.stride = self.page + gap
        self.raw = torch.full((self.units * self.stride,), 0xFF, dtype=torch.uint8)
        self.free = [(n * self.stride + gap) // GRANULE for n in range(self.units)]
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

    def pages(self, placed: Placed) -> list[int]:
        """Which of the arena's pages a checkpoint's members lie in."""
        return [entry * GRANULE // self.stride for entry in placed.members]

    def line_pages(self, placed: Placed) -> list[int]:
        return [entry * GRANULE // self.stride for entry in placed.line]

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


# -------------------------------------------------------------------------------------- geometries
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
