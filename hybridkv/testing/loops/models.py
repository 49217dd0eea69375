"""Toy looped models in plain torch: Ouro's shape with an exit gate, Huginn's with prelude, coda and adapter.

Rows are computed one by one, so a token's bits depend on nothing but the tokens and depths before it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hybridkv.geometry import LoopLayout, LoopSpec

if TYPE_CHECKING:
    from hybridkv.testing.loops.pager import LoopedPager

OURO = LoopSpec(prelude=0, core=4, coda=0, max_loops=4)
HUGINN = LoopSpec(prelude=2, core=4, coda=2, max_loops=6)


class _Block(nn.Module):
    """A sandwich-norm attention block on one row."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, pager: LoopedPager, at: tuple[str, int, int, int]) -> Tensor:
        request, position, layer, loop = at
        query, key, value = self.qkv(_rms(x)).chunk(3)
        pager.write(request, position, layer, loop, (_turn(key, position), value))
        keys, values = pager.read(request, position + 1, layer, loop)
        split = (position + 1, self.heads, -1)
        scores = torch.einsum("hd,nhd->hn", _turn(query, position).view(self.heads, -1), keys.reshape(split))
        weights = (scores / (len(query) // self.heads) ** 0.5).softmax(-1)
        x = x + _rms(self.out(torch.einsum("hn,nhd->hd", weights, values.reshape(split)).flatten()))
        gate, up = self.up(_rms(x)).chunk(2)
        return x + _rms(self.down(nn.functional.silu(gate) * up))


class LoopedToy(nn.Module):
    """A looped language model of any shape; one row at a time.

    Without an adapter the state starts as the embedding (Ouro). With one, every loop mixes the state with the
    prelude's output, and the state starts from noise that depends on the position alone (Huginn): a recompute repeats it.
    """

    def __init__(
        self, shape: LoopSpec, *, adapter: bool, seed: int, width: int = 16, vocabulary: int = 97
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.shape, self.width = shape, width
            self.embedding, self.head = (
                nn.Embedding(vocabulary, width),
                nn.Linear(width, vocabulary, bias=False),
            )
            self.blocks = nn.ModuleList(
                _Block(width, heads=2) for _ in range(shape.prelude + shape.core + shape.coda)
            )
            self.adapter = nn.Linear(2 * width, width, bias=False) if adapter else None
            self.gate = nn.Linear(width, 1)
        self.requires_grad_(requires_grad=False)

    def laid_out(self, layout: LoopLayout) -> LoopSpec:
        """The model's loops with the KV planes of `layout`."""
        return replace(self.shape, layout=layout)

    def enter(self, token: int, request: str, position: int, pager: LoopedPager) -> tuple[Tensor, Tensor]:
        """Prelude: the embedding as the core sees it, and the first state."""
        x = self._run(range(self.shape.prelude), self.embedding.weight[token], (request, position, 0), pager)
        if self.adapter is None:
            return x, x
        generator = torch.Generator().manual_seed(1000 + position)
        return x, torch.randn(self.width, generator=generator)

    def loop(
        self, hidden: tuple[Tensor, Tensor], request: str, position: int, loop: int, pager: LoopedPager
    ) -> tuple[Tensor, float]:
        """One loop of the core: the next state, and the exit gate's logit."""
        embedded, state = hidden
        x = state if self.adapter is None else self.adapter(torch.cat([state, embedded]))
        first = self.shape.prelude
        state = _rms(self._run(range(first, first + self.shape.core), x, (request, position, loop), pager))
        return state, float(self.gate(state))

    def leave(self, state: Tensor, request: str, position: int, pager: LoopedPager) -> int:
        """Coda: the next token, by argmax."""
        layers = range(self.shape.prelude + self.shape.core, len(self.blocks))
        x = self._run(layers, state, (request, position, 0), pager)
        return int(self.head(_rms(x)).argmax())

    def _run(self, layers: range, x: Tensor, at: tuple[str, int, int], pager: LoopedPager) -> Tensor:
        request, position, loop = at
        for layer in layers:
            x = self.blocks[layer](x, pager, (request, position, layer, loop))
        return x


def ouro_toy(seed: int = 0) -> LoopedToy:
    """Ouro in small: 0-4-0, four loops."""
    return LoopedToy(OURO, adapter=False, seed=seed)


def huginn_toy(seed: int = 0) -> LoopedToy:
    """Huginn in small: 2-4-2 with an adapter, at most six loops."""
    return LoopedToy(HUGINN, adapter=True, seed=seed)


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean() + 1e-6)


@cache
def _angles(half: int, position: int) -> tuple[Tensor, Tensor]:
    angle = position / 100 ** (torch.arange(half) / half)
    return angle.cos(), angle.sin()


def _turn(x: Tensor, position: int) -> Tensor:
    """Rotary position: pairs of channels turn by an angle that falls along the row."""
    a, b = x.chunk(2)
    cos, sin = _angles(len(a), position)
    return torch.cat([a * cos - b * sin, b * cos + a * sin])
