"""Where each state of a model lives, as data.

An `Organization` names pools and places every state kind in one of them: whole pages, one slot of a page, or the
tail of another state's pages. Nothing else in the library asks which organization runs. Knows no page ids, no
requests and no tensors.

Sources: S0, S1, S2, D0 of arXiv 2610.15755, sections 2.1-2.8 of its reference page; striped and nested are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, NamedTuple

from hybridkv.errors import UsageError
from hybridkv.geometry import ModelGeometry

ALIGNMENT = 16  # bytes: one 128-bit access

Layers = int | Literal["all"]


class StateKind(StrEnum):
    """What a placement is for."""

    ATTENTION = "attention"  # KV of one block of tokens
    SSM = "ssm"  # recurrent state of a checkpoint, in the retained dtype
    CONV = "conv"  # convolution state of a checkpoint
    LIVE = "live"  # running recurrent state, where its dtype differs from the retained one
    WINDOW = "window"  # a chunk's inputs, for replay decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A contiguous arena cut in equal pages.

    `page_bytes` is the size of a page in one layer; `share` the part of a budget that goes to this pool;
    `rounding` how that part becomes a number of pages (`nearest` may exceed the budget by half a page).
    """

    name: str
    page_bytes: int
    share: Fraction = Fraction(1)
    rounding: Literal["nearest", "floor"] = "nearest"

    def pages(self, budget_bytes: int | Fraction) -> int:
        """How many pages a budget of one layer buys. Exact arithmetic (research note 2.8)."""
        quotient = Fraction(budget_bytes) * self.share / self.page_bytes
        return math.floor(quotient + Fraction(1, 2)) if self.rounding == "nearest" else math.floor(quotient)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one unit of a state kind lies: `pages` whole pages, or one slot of `slot_bytes`, or `within` another.

    `offset` is the byte at which the payload starts in each page or slot it uses; `payload_bytes` what one layer
    really stores. A state `within` another takes no storage of its own: it lies in the same pages from `offset` on.
    """

    pool: str
    payload_bytes: int
    pages: int = 0
    slot_bytes: int = 0
    within: StateKind | None = None
    offset: int = 0


class Part(NamedTuple):
    """What one group of one object takes: `members` pages of `pool`, or one slot of `slot_bytes` of it."""

    kind: StateKind
    pool: str
    members: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Organization:
    """Pools, and the place of every state kind in them. A user writes a seventh organization as a literal.

    `block_tokens`: tokens of one attention block. `grid_tokens`: distance of checkpoint boundaries; a multiple of
    the block and of the scan chunk, so that a boundary never lies inside either.
    """

    name: str
    geometry: ModelGeometry
    pools: tuple[Pool, ...]
    placements: Mapping[StateKind, Placement]
    block_tokens: int
    grid_tokens: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "placements", MappingProxyType(dict(self.placements)))
        _check(self)

    @classmethod
    def named(
        cls,
        name: str,
        geometry: ModelGeometry,
        *,
        grid_tokens: int | None = None,
        attention_fraction: float | str | Fraction | None = None,
    ) -> Organization:
        """One of s0, s1, s2, d0, striped, nested, derived for `geometry`.

        `grid_tokens` replaces the organization's own checkpoint grid; `attention_fraction` D0's split.
        """
        from hybridkv.alloc.builders import BUILDERS, with_split  # they make organizations

        build = BUILDERS.get(name)
        if build is None:
            raise UsageError(f"organization must be one of {', '.join(BUILDERS)}, got {name!r}")
        made = build(geometry)
        if attention_fraction is not None:
            made = with_split(made, attention_fraction)
        return made if grid_tokens is None else replace(made, grid_tokens=grid_tokens)

    def pool(self, name: str) -> Pool:
        """The pool of that name."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise UsageError(f"pool must be one of {', '.join(p.name for p in self.pools)}, got {name!r}")

    def parts(self, *kinds: StateKind) -> tuple[Part, ...]:
        """The storage that one group of an object of these kinds takes; nothing for states within another."""
        found = ((k, self.placements[k]) for k in kinds if k in self.placements)
        return tuple(Part(k, p.pool, p.pages or 1, p.slot_bytes) for k, p in found if p.within is None)

    @property
    def attention_parts(self) -> tuple[Part, ...]:
        """Storage of one attention block and group."""
        return self.parts(StateKind.ATTENTION)

    @property
    def checkpoint_parts(self) -> tuple[Part, ...]:
        """Storage of one composite checkpoint and group."""
        return self.parts(StateKind.SSM, StateKind.CONV)

    @property
    def live_parts(self) -> tuple[Part, ...]:
        """Storage of one running state and group; empty where a running state becomes the checkpoint in place."""
        if StateKind.LIVE not in self.placements:
            return ()
        return self.parts(StateKind.LIVE, StateKind.CONV)

    @property
    def window_parts(self) -> tuple[Part, ...]:
        """Storage of one replay window and group."""
        return self.parts(StateKind.WINDOW)

    def slots_per_page(self, part: Part) -> int:
        """1 for whole pages."""
        return self.pool(part.pool).page_bytes // part.slot_bytes if part.slot_bytes else 1

    def used_pages(
        self, *, attention: int, checkpoints: int, slabs: int | None = None, layers: Layers = 1
    ) -> dict[str, int]:
        """Pages per pool that a state mix takes; `slabs` are allocated slab pages, ideally packed when None.

        With `layers="all"` the mix is held in every layer group, and a page is one page id of a group.
        """
        groups = (1, 1) if layers == 1 else (self.geometry.attention_groups, self.geometry.recurrent_groups)
        if layers not in (1, "all"):
            raise UsageError(f"layers must be 1 or 'all', got {layers!r}")
        used = dict.fromkeys((p.name for p in self.pools), 0)
        for parts, wanted, given in (
            (self.attention_parts, attention * groups[0], None),
            (self.checkpoint_parts, checkpoints * groups[1], None if slabs is None else slabs * groups[1]),
        ):
            for part in parts:
                if not part.slot_bytes:
                    used[part.pool] += part.members * wanted
                    continue
                floor = -(-wanted // self.slots_per_page(part))
                if given is not None and given < floor:
                    raise UsageError(f"slabs must be at least {floor} for {wanted} slots, got {given}")
                used[part.pool] += floor if given is None else given
        return used

    def footprint(
        self, *, attention: int, checkpoints: int, slabs: int | None = None, layers: Layers = 1
    ) -> int:
        """Bytes that a state mix takes, unused parts of pages and slots included (formulas 1-4 of the paper).

        `attention` counts blocks of this organization. One layer of each kind, or the model with `layers="all"`.
        """
        for name, value in (("attention", attention), ("checkpoints", checkpoints)):
            if value < 0:
                raise UsageError(f"{name} must be at least 0, got {value}")
        used = self.used_pages(attention=attention, checkpoints=checkpoints, slabs=slabs, layers=layers)
        deep = 1 if layers == 1 else self.geometry.layers_per_group
        return deep * sum(self.pool(name).page_bytes * pages for name, pages in used.items())

    def pages(self, budget_bytes: int, *, layers: Layers = 1) -> dict[str, int]:
        """Page counts that a budget buys, with the paper's rounding.

        The budget is that of one layer of a layer group (a page id spans the layers of its group), or with
        `layers="all"` the memory of the whole device.
        """
        deep = {1: 1, "all": self.geometry.layers_per_group}.get(layers)
        if deep is None:
            raise UsageError(f"layers must be 1 or 'all', got {layers!r}")
        counts = {pool.name: pool.pages(Fraction(budget_bytes, deep)) for pool in self.pools}
        for name, count in counts.items():
            if count < 1:
                smallest = math.ceil(self.pool(name).page_bytes * deep / self.pool(name).share)
                raise UsageError(
                    f"budget_bytes must be at least {smallest} for one page of pool {name!r}, got {budget_bytes}"
                )
        return counts


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


def _check(o: Organization) -> None:
    """Everything that a literal could get wrong."""
    names = [p.name for p in o.pools]
    if not names or len(set(names)) != len(names):
        raise UsageError(f"pools must have at least one and different names, got {names}")
    if sum((p.share for p in o.pools), Fraction(0)) > 1:
        raise UsageError(f"shares must sum to at most 1, got {[str(p.share) for p in o.pools]}")
    for pool in o.pools:
        if pool.page_bytes < ALIGNMENT or pool.page_bytes % ALIGNMENT:
            raise UsageError(f"page_bytes must be a positive multiple of {ALIGNMENT}, got {pool.page_bytes}")
        if pool.share <= 0:
            raise UsageError(f"share must be above 0, got {pool.share}")
    for name in ("block_tokens", "grid_tokens"):
        if getattr(o, name) < 1:
            raise UsageError(f"{name} must be at least 1, got {getattr(o, name)}")
    if o.geometry.recurrent is not None:
        for name, unit in (("block_tokens", o.block_tokens), ("chunk_tokens", o.geometry.chunk_tokens)):
            if o.grid_tokens % unit:
                raise UsageError(
                    f"grid_tokens must be a multiple of {name} ({unit}), got {o.grid_tokens}; "
                    f"the nearest are {o.grid_tokens // unit * unit} and {round_up(o.grid_tokens, unit)}"
                )
    for kind, place in o.placements.items():
        _check_placement(o, kind, place)
    for kind, needed in (
        (StateKind.ATTENTION, o.geometry.kv_bytes_per_token * o.block_tokens),
        (StateKind.SSM, o.geometry.ssm_bytes),
        (StateKind.CONV, o.geometry.conv_bytes),
    ):
        if needed and kind not in o.placements:
            raise UsageError(
                f"placements must hold {kind.value!r}: {o.geometry.name} has {needed} bytes of it"
            )
        if needed and o.placements[kind].payload_bytes < needed:
            raise UsageError(
                f"payload_bytes of {kind.value!r} must be at least {needed}, got {o.placements[kind].payload_bytes}"
            )


def _check_placement(o: Organization, kind: StateKind, place: Placement) -> None:
    page = o.pool(place.pool).page_bytes
    if (place.pages > 0) + (place.slot_bytes > 0) + (place.within is not None) != 1:
        raise UsageError(
            f"placement of {kind.value!r} must name one of pages, slot_bytes and within, got {place}"
        )
    if place.within is not None:
        host = o.placements.get(place.within)
        if host is None or host.within is not None or host.pool != place.pool:
            raise UsageError(
                f"placement of {kind.value!r} must lie within a state of the same pool, got {place}"
            )
        room = (page - place.offset) * host.pages
    elif place.slot_bytes:
        if place.slot_bytes % ALIGNMENT or page < place.slot_bytes:
            raise UsageError(
                f"slot_bytes of {kind.value!r} must be a multiple of {ALIGNMENT} up to the page ({page}), "
                f"got {place.slot_bytes}"
            )
        room = place.slot_bytes - place.offset
    else:
        room = (page - place.offset) * place.pages
    if room < place.payload_bytes:
        raise UsageError(
            f"placement of {kind.value!r} must have room for {place.payload_bytes} bytes, got {room}; "
            "a page must not be smaller than a member"
        )
