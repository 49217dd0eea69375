"""A pager for the KV of looped models that knows what was written, and poisons what was freed. Plain torch, CPU.

Owns blocks, tables, planes and depths. Does not know who is scheduled when.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.errors import CorruptionError
from hybridkv.geometry import LoopLayout, LoopSpec
from hybridkv.schedule.exits import fill_targets


class LoopedPager:
    """Paged KV of a looped model: one block table a request, every layer and plane of a token in one block.

    Freed blocks are poisoned with NaN. Reading what was never written raises, and never reads fewer tokens.
    With layout `last_exited` a token that left early is read at its last plane: by copies made when it leaves, or
    (`copies=False`) through a depth kept for each token.
    """

    def __init__(
        self, loop: LoopSpec, blocks: int, block_tokens: int, width: int, *, copies: bool = True
    ) -> None:
        self.loop = loop
        self.copies = copies
        self.block_tokens = block_tokens
        self.kv = torch.full((blocks, loop.attention_layers, block_tokens, 2, width), torch.nan)
        self.written = torch.zeros(self.kv.shape[:3], dtype=torch.bool)
        self.depth = torch.zeros((blocks, block_tokens), dtype=torch.long)
        self.free = list(range(blocks))
        self.tables: dict[str, list[int]] = {}
        self.copied = 0
        """Planes that were copied, times layers."""

    def reserve(self, request: str, tokens: int) -> None:
        """Hold blocks for `tokens` tokens."""
        table = self.tables.setdefault(request, [])
        while len(table) * self.block_tokens < tokens:
            if not self.free:
                raise CorruptionError("I5", f"request {request!r} was scheduled without a free block")
            table.append(self.free.pop())

    def release(self, request: str) -> None:
        """Give the blocks of a request back, poisoned."""
        for block in self.tables.pop(request):
            self.kv[block] = torch.nan
            self.written[block] = False
            self.depth[block] = 0
            self.free.append(block)

    def offload(self, request: str) -> tuple[Tensor, Tensor, Tensor]:
        """Copy a request's blocks out and give them back."""
        blocks = self.tables[request]
        saved = self.kv[blocks].clone(), self.written[blocks].clone(), self.depth[blocks].clone()
        self.release(request)
        return saved

    def restore(self, request: str, saved: tuple[Tensor, Tensor, Tensor]) -> None:
        """Bring an offloaded request back, into whatever blocks are free."""
        self.reserve(request, len(saved[0]) * self.block_tokens)
        blocks = self.tables[request]
        self.kv[blocks], self.written[blocks], self.depth[blocks] = saved

    def slot(self, layer: int, loop: int) -> int:
        """KV row of a layer: counted through prelude, core and coda; `loop` is 0 outside the core."""
        spec = self.loop
        if loop:
            return layer + spec.plane_of(loop) * spec.core
        return layer if layer < spec.prelude else layer + (spec.planes - 1) * spec.core

    def write(self, request: str, position: int, slot: int, key: Tensor, value: Tensor) -> None:
        """Store the KV of one layer and plane of a token."""
        block, offset = self._at(request, position)
        self.kv[block, slot, offset, 0], self.kv[block, slot, offset, 1] = key, value
        self.written[block, slot, offset] = True

    def leave(self, request: str, position: int, depth: int) -> None:
        """A token has left the core after loop `depth`: copy its last plane into the deeper ones, or note the depth."""
        block, offset = self._at(request, position)
        self.depth[block, offset] = depth
        if not self.copies:
            return
        first, core = self.loop.prelude, self.loop.core
        source = slice(first + (depth - 1) * core, first + depth * core)
        for plane in fill_targets(self.loop, depth):
            target = slice(first + plane * core, first + (plane + 1) * core)
            self.kv[block, target, offset] = self.kv[block, source, offset]
            self.written[block, target, offset] = self.written[block, source, offset]
            self.copied += core

    def read(self, request: str, tokens: int, layer: int, loop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `tokens` tokens, as loop `loop` of a layer sees them. A hole raises."""
        table, slot = self.tables[request], self.slot(layer, loop)
        held = self.written[table, slot].flatten()[:tokens]
        found = self.kv[table, slot].flatten(0, 1)[:tokens]
        if loop and self.loop.layout is LoopLayout.LAST_EXITED and not self.copies:
            left = self.depth[table].flatten()[:tokens]
            for depth in left[(left > 0) & (left < loop)].unique().tolist():
                early, deepest = left == depth, layer + (depth - 1) * self.loop.core
                held[early] = self.written[table, deepest].flatten()[:tokens][early]
                found[early] = self.kv[table, deepest].flatten(0, 1)[:tokens][early]
        if not bool(held.all()):
            hole = int((~held).nonzero()[0])
            raise CorruptionError(
                "I7", f"layer {layer} at loop {loop} of {request!r} reads position {hole}, never written"
            )
        return found[:, 0], found[:, 1]

    def _at(self, request: str, position: int) -> tuple[int, int]:
        return self.tables[request][position // self.block_tokens], position % self.block_tokens
