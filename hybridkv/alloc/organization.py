"""Where each state of a model lives, as data.

An `Organization` names pools and places every state kind in one of them: whole pages, one slot of a page, or the
tail of another state's pages. Nothing else in the library asks which organization runs. Knows no page ids, no
requests and no tensors.

Sources: S0, S1, S2, D0 of arXiv 2610.15755, sections 2.1-2.8 of its reference page; striped and nested are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, NamedTuple

from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.geometry import ModelGeometry

ALIGNMENT = 16  # bytes: one 128-bit access
BLOCK_TOKENS = 512  # the paper's attention block and checkpoint grid; also the attention segment of the kernels
NATIVE_BLOCK_TOKENS = 16
PAGE_BYTES = 512 * 1024  # the paper's page of S1 and S2

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

    def pages(self, budget_bytes: int) -> int:
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
    """What one group of one object takes: `count` pages of `pool`, or one slot of `slot_bytes` of it."""

    kind: StateKind
    pool: str
    count: int
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
        build = BUILDERS.get(name)
        if build is None:
            raise UsageError(f"organization must be one of {', '.join(BUILDERS)}, got {name!r}")
        made = build(geometry)
        if attention_fraction is not None:
            made = _with_split(made, attention_fraction)
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
                    used[part.pool] += part.count * wanted
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


def rows_per_page(page_bytes: int, row_bytes: int, *, what: str = "a state row") -> int:
    """How many rows (heads, or channels of Mamba-1) fit a page whole; a row never straddles two pages."""
    if row_bytes > page_bytes:
        raise UsageError(f"page_bytes must be at least {row_bytes} to hold {what}, got {page_bytes}")
    return page_bytes // row_bytes


def members(page_bytes: int, rows: int, row_bytes: int) -> int:
    """Member pages of a state that is cut between rows (research note kernels 1.2)."""
    return -(-rows // rows_per_page(page_bytes, row_bytes))


def window_bytes(g: ModelGeometry) -> int:
    """Bytes of one layer's replay window: a chunk's inputs and its two fp32 scalars a head (kernels note 5.1)."""
    spec = g.recurrent
    if spec is None or spec.state_shape is None or spec.kind == "mamba1":  # no heads: dt is as wide as the state
        return 0
    columns = spec.conv_dim
    if spec.kind == "mamba2":  # only the current token's C is needed
        heads, head_dim, state = spec.state_shape
        columns = heads * head_dim + (spec.conv_dim - heads * head_dim) // 2
    return g.chunk_tokens * (2 * columns + 8 * g.state_rows)


# ------------------------------------------------------------------------------------------------------- builders
def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _block_tokens(page_bytes: int, kv_bytes: int) -> int:
    """The largest power of two of tokens, 16 to 512, whose KV fits the page; 16 where none does."""
    tokens = BLOCK_TOKENS
    while tokens > NATIVE_BLOCK_TOKENS and tokens * kv_bytes > page_bytes:
        tokens //= 2
    return tokens


def _attention(pool: str, kv_bytes: int, tokens: int, **place: int) -> dict[StateKind, Placement]:
    if not kv_bytes:
        return {}
    return {StateKind.ATTENTION: Placement(pool=pool, payload_bytes=kv_bytes * tokens, **(place or {"pages": 1}))}


def _extras(g: ModelGeometry, pool: str, page_bytes: int) -> dict[StateKind, Placement]:
    """Window and live state: whole pages in every organization."""
    made: dict[StateKind, Placement] = {}
    if window := window_bytes(g):
        made[StateKind.WINDOW] = Placement(pool=pool, payload_bytes=window, pages=-(-window // page_bytes))
    if g.live_ssm_bytes != g.ssm_bytes:
        count = members(page_bytes, g.state_rows, g.live_state_row_bytes)
        made[StateKind.LIVE] = Placement(pool=pool, payload_bytes=g.live_ssm_bytes, pages=count)
    return made


def _composite(g: ModelGeometry, pool: str) -> dict[StateKind, Placement]:
    """The whole checkpoint in one page: recurrent state first, convolution state behind it."""
    if g.recurrent is None:
        return {}
    if not g.ssm_bytes:
        return {StateKind.CONV: Placement(pool=pool, payload_bytes=g.conv_bytes, pages=1)}
    made = {StateKind.SSM: Placement(pool=pool, payload_bytes=g.ssm_bytes, pages=1)}
    if g.conv_bytes:
        made[StateKind.CONV] = Placement(
            pool=pool, payload_bytes=g.conv_bytes, within=StateKind.SSM, offset=_up(g.ssm_bytes, ALIGNMENT)
        )
    return made


def _composite_bytes(g: ModelGeometry) -> int:
    return _up(_up(g.ssm_bytes, ALIGNMENT) + g.conv_bytes, ALIGNMENT)


def _s0(g: ModelGeometry) -> Organization:
    kv = g.kv_bytes_per_token
    page = _composite_bytes(g) or _up(kv * BLOCK_TOKENS, ALIGNMENT)
    tokens = _block_tokens(page, kv)
    page = max(page, _up(kv * tokens, ALIGNMENT))
    placements = {**_attention("shared", kv, tokens), **_composite(g, "shared"), **_extras(g, "shared", page)}
    return Organization(
        name="s0",
        geometry=g,
        pools=(Pool(name="shared", page_bytes=page),),
        placements=placements,
        block_tokens=tokens,
        grid_tokens=BLOCK_TOKENS,
    )


def _page_of_block(g: ModelGeometry) -> tuple[int, int]:
    """S1's page is exactly one attention block, as near below 512 KiB as powers of two of tokens allow."""
    kv = g.kv_bytes_per_token
    tokens = _block_tokens(PAGE_BYTES, kv)
    return (_up(kv * tokens, ALIGNMENT) if kv else PAGE_BYTES), tokens


def _paged(g: ModelGeometry, name: str, place: Callable[[int, int], dict[str, int]]) -> Organization:
    page, tokens = _page_of_block(g)
    made = _attention("shared", g.kv_bytes_per_token, tokens)
    if g.ssm_bytes:
        fit = place(page, g.ssm_bytes)
        if not fit.get("slot_bytes"):
            fit = {"pages": members(page, g.state_rows, g.state_row_bytes)}
        made[StateKind.SSM] = Placement(pool="shared", payload_bytes=g.ssm_bytes, **fit)
    if g.conv_bytes:
        fit = place(page, g.conv_bytes)
        made[StateKind.CONV] = Placement(pool="shared", payload_bytes=g.conv_bytes, **fit)
    made |= _extras(g, "shared", page)
    return Organization(
        name=name,
        geometry=g,
        pools=(Pool(name="shared", page_bytes=page),),
        placements=made,
        block_tokens=tokens,
        grid_tokens=BLOCK_TOKENS,
    )


def _whole_pages(page_bytes: int, state_bytes: int) -> dict[str, int]:
    return {"pages": -(-state_bytes // page_bytes)}


def _slot_or_pages(page_bytes: int, state_bytes: int) -> dict[str, int]:
    """A slot of page / 2^k where at least two fit a page (Falcon-H1: 32 KiB, 16 a slab), else whole pages."""
    slots = 1
    while page_bytes % (slots * 2 * ALIGNMENT) == 0 and page_bytes // (slots * 2) >= state_bytes:
        slots *= 2
    return {"slot_bytes": page_bytes // slots} if slots > 1 else _whole_pages(page_bytes, state_bytes)


def _s1(g: ModelGeometry) -> Organization:
    return _paged(g, "s1", _whole_pages)


def _s2(g: ModelGeometry) -> Organization:
    return _paged(g, "s2", _slot_or_pages)


# Table B-3, chosen by the paper with a worst-case stranded-byte screen; keyed by (KV bytes, composite bytes).
_PAPER_SPLITS = {(1024, 1_594_368): Fraction(527383, 10**6), (2048, 1_074_688): Fraction(199699, 10**6)}
_SPLIT_CONTEXT_TOKENS = 3475  # with 2 live checkpoints it gives Falcon's .5274: both limits meet (research note 8.2)


def _split(g: ModelGeometry) -> Fraction:
    paper = _PAPER_SPLITS.get((g.kv_bytes_per_token, g.composite_bytes))
    if paper is not None:
        return paper
    attention = g.attention_layers * g.kv_bytes_per_token * _SPLIT_CONTEXT_TOKENS
    return Fraction(attention, attention + 2 * g.recurrent_layers * g.composite_bytes).limit_denominator(10**6)


def _d0(g: ModelGeometry) -> Organization:
    if g.attention is None or g.recurrent is None:
        raise UnsupportedError(f"d0 has one pool for attention and one for recurrent state; {g.name} has not both")
    kv = g.kv_bytes_per_token
    unit, page, share = _up(kv * NATIVE_BLOCK_TOKENS, ALIGNMENT), _composite_bytes(g), _split(g)
    return Organization(
        name="d0",
        geometry=g,
        pools=(
            Pool(name="attention", page_bytes=unit, share=share, rounding="floor"),
            Pool(name="recurrent", page_bytes=page, share=1 - share, rounding="floor"),
        ),
        placements={
            **_attention("attention", kv, NATIVE_BLOCK_TOKENS),
            **_composite(g, "recurrent"),
            **_extras(g, "recurrent", page),
        },
        block_tokens=NATIVE_BLOCK_TOKENS,
        grid_tokens=_up(-(-page // kv), 256),
    )


def _with_split(made: Organization, fraction: float | str | Fraction) -> Organization:
    if len(made.pools) != 2:
        raise UsageError(f"attention_fraction must be left out for {made.name}, which has one pool")
    share = Fraction(str(fraction))
    if not 0 < share < 1:
        raise UsageError(f"attention_fraction must be in (0, 1), got {fraction}")
    first, second = made.pools
    return replace(made, pools=(replace(first, share=share), replace(second, share=1 - share)))


def _striped(g: ModelGeometry) -> Organization:
    """S1's pages, lengthened by a share of the convolution state: no slabs, hence no coupled lifetimes."""
    if not (g.ssm_bytes and g.conv_bytes):
        return replace(_s1(g), name="striped")
    page, tokens = _page_of_block(g)
    count = members(page, g.state_rows, g.state_row_bytes)
    body = _up(-(-g.state_rows // count) * g.state_row_bytes, ALIGNMENT)
    page = max(page, body + _up(-(-g.conv_bytes // count), ALIGNMENT))
    made = _attention("shared", g.kv_bytes_per_token, tokens)
    made[StateKind.SSM] = Placement(pool="shared", payload_bytes=g.ssm_bytes, pages=count)
    made[StateKind.CONV] = Placement(
        pool="shared", payload_bytes=g.conv_bytes, within=StateKind.SSM, offset=body
    )
    return Organization(
        name="striped",
        geometry=g,
        pools=(Pool(name="shared", page_bytes=page),),
        placements=made | _extras(g, "shared", page),
        block_tokens=tokens,
        grid_tokens=BLOCK_TOKENS,
    )


def _nested(g: ModelGeometry) -> Organization:
    """Composite pages, and 16-token attention slots cut from them: native units under one shared budget."""
    kv = g.kv_bytes_per_token
    slot = _up(kv * NATIVE_BLOCK_TOKENS, ALIGNMENT)
    page = max(_composite_bytes(g) or PAGE_BYTES, slot)
    attention = _attention("shared", kv, NATIVE_BLOCK_TOKENS, slot_bytes=slot)
    if page < 2 * slot:
        attention = _attention("shared", kv, NATIVE_BLOCK_TOKENS)
    return Organization(
        name="nested",
        geometry=g,
        pools=(Pool(name="shared", page_bytes=page),),
        placements={**attention, **_composite(g, "shared"), **_extras(g, "shared", page)},
        block_tokens=NATIVE_BLOCK_TOKENS if kv else BLOCK_TOKENS,
        grid_tokens=BLOCK_TOKENS,
    )


BUILDERS: Mapping[str, Callable[[ModelGeometry], Organization]] = MappingProxyType(
    {"s0": _s0, "s1": _s1, "s2": _s2, "d0": _d0, "striped": _striped, "nested": _nested}
)


# ----------------------------------------------------------------------------------------------------- validation
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
                    f"the nearest are {o.grid_tokens // unit * unit} and {_up(o.grid_tokens, unit)}"
                )
    for kind, place in o.placements.items():
        _check_placement(o, kind, place)
    for kind, needed in (
        (StateKind.ATTENTION, o.geometry.kv_bytes_per_token * o.block_tokens),
        (StateKind.SSM, o.geometry.ssm_bytes),
        (StateKind.CONV, o.geometry.conv_bytes),
    ):
        if needed and kind not in o.placements:
            raise UsageError(f"placements must hold {kind.value!r}: {o.geometry.name} has {needed} bytes of it")
        if needed and o.placements[kind].payload_bytes < needed:
            raise UsageError(
                f"payload_bytes of {kind.value!r} must be at least {needed}, got {o.placements[kind].payload_bytes}"
            )


def _check_placement(o: Organization, kind: StateKind, place: Placement) -> None:
    page = o.pool(place.pool).page_bytes
    if (place.pages > 0) + (place.slot_bytes > 0) + (place.within is not None) != 1:
        raise UsageError(f"placement of {kind.value!r} must name one of pages, slot_bytes and within, got {place}")
    if place.within is not None:
        host = o.placements.get(place.within)
        if host is None or host.within is not None or host.pool != place.pool:
            raise UsageError(f"placement of {kind.value!r} must lie within a state of the same pool, got {place}")
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
