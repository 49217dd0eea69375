"""Rows of a convolution with a history: a line in some place, outputs so far; and faults to plant."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv import ops
from hybridkv.reference import conv as reference
from hybridkv.testing.guard import guard
from hybridkv.triton import conv as kernels
from tests.census import differing_bits
from tests.recurrent import ABSENT, BF16, Placed, Storage, i32

DIM = 48
FAULTS = {  # what is planted into `run_history`, and the property that it breaks
    "a line given to two rows": "batch composition",
    "lines not reordered with their rows": "row order",
    "pieces read in reverse": "page permutation",
    "lines read 16 bytes further": "organization",
    "a call made again": "in place",
    "a cut forgets": "split",
    "decode rounds its products": "decode steps",
    "decode keeps the old line": "decode-made line",
}


def layer(width: int, dim: int = DIM, dtype: torch.dtype = BF16) -> dict:
    g = torch.Generator().manual_seed(width)
    return {"weight": torch.randn(width, dim, generator=g).to(dtype), "bias": torch.randn(dim, generator=g)}


def storage(organization: str, width: int = 4, seed: int = 0) -> Storage:
    return Storage(organization, 3, 16, (width - 1) * DIM, units=128, seed=seed)


def entries(placed: list[Placed]) -> torch.Tensor:
    return i32([p.line for p in placed])


@dataclass
class Line:
    """A row in flight: its inputs behind the zeros before them, where its line is, and what came out so far."""

    padded: Tensor
    placed: Placed
    out: Tensor
    position: int = 0


class Run:
    """A drawn history of calls over one storage."""

    def __init__(self, impl: str, h: dict, fault: str | None) -> None:
        self.impl, self.order, self.width, self.fault = impl, h["order"], h["width"], fault
        organization = "striped" if fault == "pieces read in reverse" else h["organization"]
        self.s, self.p = storage(organization, self.width, h["seed"]), layer(self.width)
        g, history = torch.Generator().manual_seed(h["seed"]), self.width - 1
        self.lines = []
        for n in map(sum, zip(*h["calls"], strict=True)):
            x = torch.cat([torch.zeros(history, DIM, dtype=BF16), torch.randn(n, DIM, generator=g).to(BF16)])
            self.lines.append(Line(x, self.s.nothing(), torch.empty(n, DIM)))
        self.turns = itertools.cycle([h["seed"] % 2 == 0, h["seed"] % 2 == 1])
        self.varied = {"batch composition", "organization", f"organization: {organization}"}
        self.bits = 0

    def source(self, rows: list[int]) -> Tensor:
        placed = [self.lines[b].placed for b in rows]
        if self.fault == "a line given to two rows":
            placed[-1] = placed[0]
        src = entries(placed)
        if self.fault == "pieces read in reverse":
            src = src.flip(1).contiguous()
        if self.fault == "lines read 16 bytes further":
            src = src + (src >= 0).int()
        return torch.full_like(src, ABSENT) if self.fault == "a cut forgets" else src

    def call(self, kind: str, rows: list[int], counts: list[int]) -> None:
        """Prefill or one decode step of rows in this order, in place and elsewhere by turns."""
        s, rng, live = self.s, self.s.rng, [self.lines[b] for b in rows]
        final = [v.placed if v.placed.line[0] >= 0 and next(self.turns) else s.take() for v in live]
        early = [s.take() if kind == "prefill" and rng.random() < 0.5 else s.nothing() for _ in rows]
        middle, starts = [rng.randint(0, n) for n in counts], [0, *itertools.accumulate(counts)]
        first = [v.position + self.width - 1 for v in live]
        x = torch.cat([v.padded[at : at + n] for v, at, n in zip(live, first, counts, strict=True)])
        src, out, dst = self.source(rows), torch.full((len(x), DIM), float("nan")), final
        if self.fault == "lines not reordered with their rows" and rows != sorted(rows):
            dst = final[::-1]
        common = {"x": x, **self.p, "out": out, "granule": 8}
        with guard(order=self.order, hazards=False):
            for _ in range(1 + (self.fault == "a call made again")):
                if kind == "decode":
                    self.op("conv_update")(s.lines[s.line_offset :], src, entries(dst), **common)
                else:
                    where = i32([[e.line, f.line] for e, f in zip(early, dst, strict=True)])
                    cuts = i32([[m, n] for m, n in zip(middle, counts, strict=True)])
                    spans = (where, cuts, i32(starts))
                    self.op("conv_prefill")(
                        s.lines[s.line_offset :], src, *spans, max_tokens=max(counts), **common
                    )
        if self.fault and kind == "decode":
            self.plant_in_decode(live, final, out)
        self.varied.add("row order" if rows != sorted(rows) else "rows in order")
        for n, line in enumerate(live):
            self.settle(line, kind, out[starts[n] : starts[n + 1]], early[n], middle[n], final[n])

    def op(self, name: str) -> Callable[..., None]:
        """The op as users call it; a planted fault must get past its checks."""
        if self.fault:
            return getattr(reference if self.impl == "reference" else kernels, name)
        return functools.partial(getattr(ops, name), impl=self.impl)

    def plant_in_decode(self, lines: list[Line], final: list[Placed], out: Tensor) -> None:
        for n, (line, placed) in enumerate(zip(lines, final, strict=True)):
            taps = line.padded[line.position : line.position + self.width]
            if self.fault == "decode rounds its products":  # bf16 by bf16, as engines multiply
                out[n] = torch.nn.functional.silu((taps * self.p["weight"]).float().sum(0) + self.p["bias"])
            if self.fault == "decode keeps the old line":
                self.s.put_line(placed, taps[:-1])

    def settle(self, line: Line, kind: str, out: Tensor, early: Placed, middle: int, final: Placed) -> None:
        """Compare the lines that were kept with the inputs that they must hold, and move on."""
        history, n = self.width - 1, len(out)
        line.out[line.position : line.position + n] = out
        for placed, at in ((early, line.position + middle), (final, line.position + n)):
            if placed.line[0] >= 0:
                kept = self.s.line(placed).view(history, DIM)
                self.bits += differing_bits([(kept, line.padded[at : at + history])])
        if line.placed.line[0] >= 0:
            self.varied.add("in place" if final == line.placed else "not in place")
        if line.position and n:
            self.varied.add("split")
        if kind == "decode":
            self.varied |= {"decode steps", "decode-made line"}
        line.placed, line.position = final, line.position + n

    def compare(self, plain: Storage) -> None:
        """Each row in one call, alone, in other pages."""
        for line in self.lines:
            x, kept = line.padded[self.width - 1 :], plain.take()
            whole = torch.empty(len(x), DIM)
            ops.conv_prefill(
                plain.lines[plain.line_offset :], entries([plain.nothing()]), i32([[kept.line]]), i32([[len(x)]]),
                i32([0, len(x)]), x, **self.p, out=whole, granule=8, max_tokens=len(x), impl=self.impl,
            )  # fmt: skip
            self.bits += differing_bits([(line.out, whole), (self.s.line(line.placed), plain.line(kept))])
            if self.s.line_pages(line.placed) != plain.line_pages(kept):
                self.varied.add("page permutation")
