"""Planes of a looped model: which groups of a table hold them, how deep each token went, and pages that planes share.

An attention block of a looped model is one object over all its planes, so validity and truncation need nothing here.
Does not move bytes, and does not know who exits when. Rules D42, I7; research note kernels, section 7.

With layout `last_exited` a token that left after loop d is read at plane d - 1 by every deeper loop. Three ways, which
give the same bits: copy (`PlaneTable.fill`), read each token at its depth (`TokenDepths.planes`), or, where all tokens
of a block left at d, let the deeper planes' entries name plane d - 1's page (`alias`, as `HybridCache.alias`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.alloc.growth import ATTENTION
from hybridkv.alloc.plan import Plan
from hybridkv.alloc.requests import Request
from hybridkv.errors import CorruptionError, UnsupportedError, UsageError
from hybridkv.geometry import LoopLayout, LoopSpec, ModelGeometry

if TYPE_CHECKING:
    from hybridkv.alloc.cache import HybridCache

Ints = NDArray[np.int64]


class Fill(NamedTuple):
    """For every core layer copy the token's KV from group `source[i]` to `destinations[:, i]`, before the next launch
    that may read them. Int64 `[groups of a plane]` and `[planes, groups of a plane]`.
    """

    position: int
    source: Ints
    destinations: Ints


class PlaneTable:
    """Where planes lie in `Plan.attention`: prelude, then the core plane by plane, then coda, in groups of layers."""

    __slots__ = ("layers_per_group", "loop")

    def __init__(self, geometry: ModelGeometry) -> None:
        self.loop, self.layers_per_group = _loop(geometry), geometry.layers_per_group

    def row(self, layer: int, plane: Ints | int = 0) -> Ints | int:
        """Index of `layer` of the network among all KV planes; `plane` counts in the core only."""
        first, core = self.loop.prelude, self.loop.core
        if layer < first:
            return layer
        return layer + core * (plane if layer < first + core else self.loop.planes - 1)

    def groups(self, loop: int) -> range:
        """Groups of the plane that `loop` (1-based) writes: `Plan.attention[groups]` are its pages."""
        width = self.loop.core // self.layers_per_group
        first = self.loop.prelude // self.layers_per_group + self.loop.plane_of(loop) * width
        return range(first, first + width)

    def fill(self, position: int, depth: int) -> Fill | None:
        """The copies after the token at `position` left at `depth`; None where there are none (D42)."""
        source = self.groups(depth)
        if self.loop.layout is not LoopLayout.LAST_EXITED or depth == self.loop.max_loops:
            return None
        deeper = np.arange(source.stop, self.groups(self.loop.max_loops).stop)
        return Fill(position, np.array(source), deeper.reshape(-1, len(source)))


class TokenDepths:
    """How many loops each token of one request has run: the array that a read takes instead of a fill (D42)."""

    __slots__ = ("_left", "_ran", "loop")

    def __init__(self, loop: LoopSpec) -> None:
        self.loop = loop
        self._ran = np.zeros(0, np.int64)
        self._left = np.zeros(0, np.bool_)

    def run(self, position: int, loop: int) -> None:
        """The token writes the plane of `loop`."""
        self.loop.plane_of(loop)
        if position >= len(self._ran):
            more = max(position + 1, 2 * len(self._ran)) - len(self._ran)
            self._ran, self._left = np.pad(self._ran, (0, more)), np.pad(self._left, (0, more))
        self._ran[position] = max(self._ran[position], loop)

    def leave(self, position: int) -> None:
        """The token runs no further loop."""
        self._left[position] = True

    def fill(self, start: int, stop: int) -> None:
        """The deeper planes of tokens [start, stop) hold what their last one does: copied, or one page."""
        self._ran[start:stop] = self.loop.max_loops

    def cut(self, tokens: int) -> None:
        """Tokens from position `tokens` on are forgotten, in every plane."""
        self._ran[tokens:], self._left[tokens:] = 0, False

    def uniform(self, start: int, stop: int) -> int:
        """The depth at which all tokens of [start, stop) left, or 0."""
        ran = self._ran[start:stop]
        alike = stop <= len(self._ran) and self._left[start:stop].all() and (ran == ran[0]).all()
        return int(ran[0]) if alike else 0

    def planes(self, loop: int, tokens: int) -> Ints:
        """Plane at which `loop` reads each of the first `tokens` tokens, int64 `[tokens]`.

        A hole raises, and never shrinks the context: a plane that a token did not write, unless it left before.
        """
        plane = self.loop.plane_of(loop)
        ran, left = self._ran[:tokens], self._left[:tokens]
        missing = ran <= plane
        if self.loop.layout is LoopLayout.LAST_EXITED:
            missing &= ~left | (ran == 0)
        if len(ran) < tokens or missing.any():
            hole = int(missing.argmax()) if missing.any() else len(ran)
            got = int(ran[hole]) if hole < len(ran) else 0
            raise CorruptionError(
                "I7",
                f"position {hole} must have written plane {plane} before loop {loop} reads it (D42), got {got} loops",
            )
        return np.minimum(ran - 1, plane)


def alias(cache: HybridCache, r: Request, block: int, depth: int) -> Plan:
    """`HybridCache.alias`. Gives the pages of planes `depth`..rmax-1 of one block back, and names plane depth-1's."""
    planes = PlaneTable(cache.organization.geometry)
    if planes.loop.layout is not LoopLayout.LAST_EXITED:
        raise UnsupportedError(
            f"loop.layout must be last_exited to alias planes, got {planes.loop.layout.value}"
        )
    width = cache.organization.block_tokens
    whole = r.computed // width
    if not r.published <= block < whole:
        raise UsageError(
            f"block must be in [{r.published}, {whole}) (full, computed, not published), got {block}"
        )
    if is_aliased(r, block):
        raise UsageError(f"block must not be aliased yet, got {block}")
    fill = planes.fill(block * width, depth)
    if fill is not None:
        table = r.table.copy()  # earlier plans are values: they keep theirs
        freed = table[fill.destinations, block]
        table[fill.destinations, block] = table[fill.source, block]
        r.table = table
        cache.growth.shared_planes = True
        cache.storage.gains += 1
        cache.storage.by_kind[ATTENTION].release(freed.ravel())
    cache.growth.renew(r)
    return cache.growth.plan(r, r.computed, r.computed)


def is_aliased(r: Request, block: int) -> bool:
    """Whether planes of a block share a page."""
    return len(np.unique(r.table[:, block])) < len(r.table)


def audit(cache: HybridCache) -> None:
    """I8, D42: only deeper planes of whole blocks that no step writes and no index knows name another plane's page."""
    g = cache.organization.geometry
    if g.loop is None:
        return
    planes, width = PlaneTable(g), cache.organization.block_tokens
    for r in cache.requests.values():
        for block in (b for b in range(r.blocks) if is_aliased(r, b)):
            named = r.table[:, block]
            fills = (planes.fill(block * width, depth) for depth in range(1, g.loop.max_loops))
            fill = next((f for f in fills if f and (named[f.destinations] == named[f.source]).all()), None)
            rest = len(named) - (fill.destinations.size if fill else 0)
            if len(np.unique(named)) != rest or not r.published <= block < r.computed // width:
                raise CorruptionError(
                    "I8", f"block {block} of {r!r} names pages {named.tolist()}, which a step may write"
                )


def _loop(geometry: ModelGeometry) -> LoopSpec:
    if geometry.loop is None:
        raise UsageError(f"geometry must be of a looped model, got {geometry.name!r}")
    return geometry.loop
