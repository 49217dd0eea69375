"""The two reusable things: attention blocks and composite checkpoints. Their parts, and how far they have come.

    reserved   units are taken, a step may be writing them
    published  found through the index; its units tell it before they go elsewhere (I3)
    lost       out of the index with a cause; its units may hold anything. Using it raises `CorruptionError`

A state is one object over all layer groups: losing any unit loses it whole (I1). Objects do not count references;
the pools do, on every unit (I2).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from hybridkv.alloc.organization import StateKind
from hybridkv.errors import CorruptionError

Units = NDArray[np.int32]


class Lifecycle(StrEnum):
    """How far a state has come."""

    RESERVED = "reserved"
    PUBLISHED = "published"
    LOST = "lost"


class State:
    """What attention blocks and checkpoints have in common.

    `units`: ids per state kind, int32 `[groups, units of a group]`; page ids, or lines where the kind has slots.
    `position`: tokens that the state covers, from the start of the prefix. `key`: identity, once published.
    """

    __slots__ = ("key", "position", "stage", "units")

    def __init__(self, position: int, units: Mapping[StateKind, Units]) -> None:
        self.position = position
        self.units = units
        self.key: Hashable = None
        self.stage = Lifecycle.RESERVED

    def check(self) -> None:
        """Raise unless the units still hold this state."""
        if self.stage is Lifecycle.LOST:
            raise CorruptionError("I3", f"{self!r} was used after its pages went elsewhere")

    def __iter__(self) -> Iterator[tuple[StateKind, Units]]:
        return iter(self.units.items())

    def __repr__(self) -> str:
        parts = ", ".join(f"{kind.value} {ids.tolist()}" for kind, ids in self.units.items())
        return f"{type(self).__name__}({self.position} tokens, {self.stage.value}: {parts})"


class AttentionBlock(State):
    """KV of the block of tokens that ends at `position`, one unit a group."""

    __slots__ = ()


class Checkpoint(State):
    """Composite: every SSM member page and the convolution state at one boundary, all groups.

    A running request's live state is one that is still reserved. States that lie within another's pages (the
    convolution state of S0, D0, striped, nested) have no units of their own.
    """

    __slots__ = ()
