"""KV of a looped model in the pages of a `HybridCache`, poisoned until it is written. Plain torch, CPU.

Owns the bytes, and how deep each token went. Which page holds what is the cache's; who is scheduled when, the planner's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from hybridkv.alloc.cache import HybridCache
from hybridkv.alloc.organization import Organization, Placement, Pool, StateKind
from hybridkv.alloc.plan import Refused
from hybridkv.alloc.planes import PlaneTable, TokenDepths
from hybridkv.errors import CorruptionError
from hybridkv.geometry import AttentionSpec, LoopSpec, ModelGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hybridkv.alloc.plan import Admitted, Extended
    from hybridkv.alloc.requests import Request

FillMode = Literal["copy", "depth", "alias"]


class Saved(NamedTuple):
    """A request that was taken out: all its tokens, how many belong to the prompt, its KV and depths."""

    tokens: list[int]
    prompt: int
    kv: Tensor
    depths: TokenDepths


class LoopedPager:
    """Paged KV of a looped model: one page for each block of tokens, plane and group of layers.

    Reading what was never written raises, and never reads fewer tokens. With layout `last_exited` a token that left
    early is read at its last plane: by a copy made when it leaves (`copy`), through its depth (`depth`), or so until
    its block is full, then, where all of it left alike, through the table (`alias`).
    """

    def __init__(
        self, loop: LoopSpec, blocks: int, block_tokens: int, width: int, *, fill: FillMode = "copy"
    ) -> None:
        self.loop, self.fill, self.block_tokens = loop, fill, block_tokens
        organization = _organization(loop, block_tokens, width)
        geometry = organization.geometry
        self.planes = PlaneTable(geometry)
        pages = blocks * geometry.attention_groups
        self.cache = HybridCache(organization, pages={"shared": pages})
        self.kv = torch.full((pages, geometry.layers_per_group, block_tokens, 2, width), torch.nan)
        self.requests: dict[str, Request] = {}
        self.tables: dict[str, Tensor] = {}
        self.depths: dict[str, TokenDepths] = {}
        self.copied = 0
        """Planes that were copied, times layers."""
        self.aliased = 0
        """Blocks whose deeper planes share a page."""

    @property
    def held(self) -> int:
        """Pages that requests hold."""
        return self.cache.stats().pools["shared"].held

    def reserve(self, request: str, tokens: Sequence[int], upto: int) -> None:
        """Hold pages for the first `upto` tokens; `tokens` are those known. A new request starts with them."""
        r = self.requests.get(request)
        if r is None:
            self._admit(request, tokens, upto)
        elif upto > r.planned:
            self._grow(request, self.cache.extend(r, upto))

    def commit(self, request: str, tokens: Sequence[int]) -> None:
        """What was reserved is written, and `tokens` are known now. Aliases blocks where that is due."""
        r = self.requests[request]
        self.cache.commit(r, r.planned, tokens[r.length :])
        if self.fill == "alias" and r.computed % self.block_tokens == 0:
            self._alias(request, r.computed - self.block_tokens, r.computed)

    def release(self, request: str) -> None:
        """Give the pages of a request back; nothing is held twice or forgotten."""
        self.cache.audit()
        self.cache.release(self.requests.pop(request))
        del self.tables[request], self.depths[request]

    def offload(self, request: str) -> Saved:
        """Copy a request's KV out and give its pages back."""
        r = self.requests[request]
        saved = Saved(r.tokens.tolist(), r.prompt_tokens, self.kv[self.tables[request]], self.depths[request])
        self.release(request)
        return saved

    def restore(self, request: str, saved: Saved) -> None:
        """Bring an offloaded request back, into whatever pages are free, and what is cached of its prompt still."""
        computed = len(saved.tokens) - 1  # the newest token waits for its first loop
        cached = self._admit(request, saved.tokens[: saved.prompt], saved.prompt, computed)
        r = self.requests[request]
        # the prompt first: KV of decoded tokens depends on their exits too, and is not published (I10)
        self.cache.commit(r, saved.prompt, saved.tokens[saved.prompt :])
        if computed > saved.prompt:
            self._grow(request, self.cache.extend(r, computed))
            self.cache.commit(r, computed)
        block = cached // self.block_tokens
        self.kv[self.tables[request][:, block:]] = saved.kv[:, block:]
        self.depths[request] = saved.depths

    def write(self, request: str, position: int, layer: int, loop: int, kv: tuple[Tensor, Tensor]) -> None:
        """Store key and value of one layer of a token; `loop` is 0 outside the core. What was hit is there (I8)."""
        if loop:
            self.depths[request].run(position, loop)
        if position < self.requests[request].cached:
            return
        plane = self.loop.plane_of(loop) if loop else 0
        group, inner = divmod(int(self.planes.row(layer, plane)), self.planes.layers_per_group)
        block, offset = divmod(position, self.block_tokens)
        self.kv[self.tables[request][group, block], inner, offset] = torch.stack(kv)

    def leave(self, request: str, position: int, depth: int) -> None:
        """A token has left the core after loop `depth`: fill its deeper planes, or leave that to those who read."""
        depths = self.depths[request]
        depths.leave(position)
        if self.fill != "copy" or (fill := self.planes.fill(position, depth)) is None:
            return
        block, offset = divmod(position, self.block_tokens)
        table = self.tables[request][:, block]
        source = self.kv[table[torch.from_numpy(fill.source)], :, offset]
        self.kv[table[torch.from_numpy(fill.destinations)], :, offset] = source
        depths.fill(position, position + 1)
        self.copied += fill.destinations.size * self.planes.layers_per_group

    def read(self, request: str, tokens: int, layer: int, loop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `tokens` tokens, as loop `loop` of a layer sees them. A hole raises."""
        plane = self.depths[request].planes(loop, tokens) if loop else np.zeros(tokens, np.int64)
        row = torch.from_numpy(np.broadcast_to(self.planes.row(layer, plane), tokens).copy())
        position = torch.arange(tokens)
        page = self.tables[request][row // self.planes.layers_per_group, position // self.block_tokens]
        found = self.kv[page, row % self.planes.layers_per_group, position % self.block_tokens]
        if bool(found.isnan().any()):
            raise CorruptionError(
                "I7", f"layer {layer} at loop {loop} of {request!r} must be written before it is read"
            )
        return found[:, 0], found[:, 1]

    def _alias(self, request: str, start: int, stop: int) -> None:
        depth = self.depths[request].uniform(start, stop)
        if not 0 < depth < self.loop.max_loops:
            return
        plan = self.cache.alias(self.requests[request], start // self.block_tokens, depth)
        self.tables[request] = torch.from_numpy(plan.attention.astype(np.int64))
        self.depths[request].fill(start, stop)
        self.aliased += 1

    def _admit(self, request: str, tokens: Sequence[int], upto: int, reserve: int = 0) -> int:
        r = self.cache.request(request, tokens)
        self.requests[request], self.depths[request] = r, TokenDepths(self.loop)
        answer = self.cache.admit(r, upto, reserve=reserve)
        self._grow(request, answer)
        return r.cached

    def _grow(self, request: str, answer: Admitted | Extended | Refused) -> None:
        if isinstance(answer, Refused):
            raise CorruptionError("I5", f"request {request!r} was scheduled without a free block: {answer}")
        table = torch.from_numpy(answer.plan.attention.astype(np.int64))
        before = self.tables.get(request)
        known = self.requests[request].cached // self.block_tokens if before is None else before.shape[1]
        self.kv[table[:, known:]] = torch.nan
        self.tables[request] = table


def _organization(loop: LoopSpec, block_tokens: int, width: int) -> Organization:
    """Float32 KV of one head, a page a block."""
    spec = AttentionSpec(layers=loop.layers, kv_heads=1, key_dim=width, value_dim=width)
    geometry = ModelGeometry(
        name="toy", layers=loop.layers, attention=spec, recurrent=None, loop=loop, kv_dtype="fp32"
    )
    size = geometry.kv_bytes_per_token * block_tokens
    return Organization(
        name="toy",
        geometry=geometry,
        pools=(Pool(name="shared", page_bytes=size),),
        placements={StateKind.ATTENTION: Placement(pool="shared", payload_bytes=size, pages=1)},
        block_tokens=block_tokens,
        grid_tokens=block_tokens,
    )
