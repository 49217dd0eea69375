"""The six organizations that ship: S0, S1, S2, D0 of the paper, striped and nested of ours, for any geometry.

Every size follows from the geometry; the numbers of Falcon-H1-7B stand beside the rule that reproduces them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from hybridkv.alloc.organization import ALIGNMENT, Organization, Placement, Pool, StateKind, round_up
from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.geometry import ModelGeometry, RecurrentKind
from hybridkv.geometry.specs import DTYPE_BYTES
from hybridkv.units import delta_window, ssd_window

BLOCK_TOKENS = (
    512  # the paper's attention block and checkpoint grid; also the attention segment of the kernels
)
NATIVE_BLOCK_TOKENS = 16
PAGE_BYTES = 512 * 1024  # the paper's page of S1 and S2


def rows_per_page(page_bytes: int, row_bytes: int, *, what: str = "a state row") -> int:
    """How many rows (heads, or channels of Mamba-1) fit a page whole; a row never straddles two pages."""
    if row_bytes > page_bytes:
        raise UsageError(f"page_bytes must be at least {row_bytes} to hold {what}, got {page_bytes}")
    return page_bytes // row_bytes


def members(page_bytes: int, rows: int, row_bytes: int) -> int:
    """Member pages of a state that is cut between rows (research note kernels 1.2)."""
    return -(-rows // rows_per_page(page_bytes, row_bytes))


def window_bytes(g: ModelGeometry) -> int:
    """Bytes of one layer's replay window: a chunk's inputs (kernels note 5.1); 0 where no op decodes by replay."""
    spec, itemsize = g.recurrent, DTYPE_BYTES[g.conv_dtype]
    if spec is None or spec.state_shape is None or len(spec.state_shape) < 3:
        return 0
    heads, first, second = spec.state_shape
    if spec.kind is RecurrentKind.MAMBA2:
        window = ssd_window(g.chunk_tokens, heads, first, spec.groups, second, itemsize)
    elif spec.kind is RecurrentKind.GATED_DELTA_NET:
        window = delta_window(spec.groups, first, heads, second, itemsize)
    else:
        return 0
    return window.size * itemsize


def _block_tokens(page_bytes: int, kv_bytes: int) -> int:
    """The largest power of two of tokens, 16 to 512, whose KV fits the page; 16 where none does."""
    tokens = BLOCK_TOKENS
    while tokens > NATIVE_BLOCK_TOKENS and tokens * kv_bytes > page_bytes:
        tokens //= 2
    return tokens


def _attention(pool: str, kv_bytes: int, tokens: int, slot_bytes: int = 0) -> dict[StateKind, Placement]:
    if not kv_bytes:
        return {}
    place = Placement(
        pool=pool, payload_bytes=kv_bytes * tokens, pages=int(not slot_bytes), slot_bytes=slot_bytes
    )
    return {StateKind.ATTENTION: place}


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
            pool=pool,
            payload_bytes=g.conv_bytes,
            within=StateKind.SSM,
            offset=round_up(g.ssm_bytes, ALIGNMENT),
        )
    return made


def _composite_bytes(g: ModelGeometry) -> int:
    return round_up(round_up(g.ssm_bytes, ALIGNMENT) + g.conv_bytes, ALIGNMENT)


def _s0(g: ModelGeometry) -> Organization:
    kv = g.kv_bytes_per_token
    page = _composite_bytes(g) or round_up(kv * BLOCK_TOKENS, ALIGNMENT)
    tokens = _block_tokens(page, kv)
    page = max(page, round_up(kv * tokens, ALIGNMENT))
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
    return (round_up(kv * tokens, ALIGNMENT) if kv else PAGE_BYTES), tokens


class _Room(NamedTuple):
    """Whole pages, or one slot."""

    pages: int
    slot_bytes: int = 0


def _paged(g: ModelGeometry, name: str, place: Callable[[int, int], _Room]) -> Organization:
    page, tokens = _page_of_block(g)
    made = _attention("shared", g.kv_bytes_per_token, tokens)
    if g.ssm_bytes:
        room = place(page, g.ssm_bytes)
        if not room.slot_bytes:
            room = _Room(members(page, g.state_rows, g.state_row_bytes))
        made[StateKind.SSM] = Placement(
            pool="shared", payload_bytes=g.ssm_bytes, pages=room.pages, slot_bytes=room.slot_bytes
        )
    if g.conv_bytes:
        room = place(page, g.conv_bytes)
        made[StateKind.CONV] = Placement(
            pool="shared", payload_bytes=g.conv_bytes, pages=room.pages, slot_bytes=room.slot_bytes
        )
    made |= _extras(g, "shared", page)
    return Organization(
        name=name,
        geometry=g,
        pools=(Pool(name="shared", page_bytes=page),),
        placements=made,
        block_tokens=tokens,
        grid_tokens=BLOCK_TOKENS,
    )


def _whole_pages(page_bytes: int, state_bytes: int) -> _Room:
    return _Room(-(-state_bytes // page_bytes))


def _slot_or_pages(page_bytes: int, state_bytes: int) -> _Room:
    """A slot of page / 2^k where at least two fit a page (Falcon-H1: 32 KiB, 16 a slab), else whole pages."""
    slots = 1
    while page_bytes % (slots * 2 * ALIGNMENT) == 0 and page_bytes // (slots * 2) >= state_bytes:
        slots *= 2
    return _Room(0, page_bytes // slots) if slots > 1 else _whole_pages(page_bytes, state_bytes)


def _s1(g: ModelGeometry) -> Organization:
    return _paged(g, "s1", _whole_pages)


def _s2(g: ModelGeometry) -> Organization:
    return _paged(g, "s2", _slot_or_pages)


# Table B-3, chosen by the paper with a worst-case stranded-byte screen; keyed by (KV bytes, composite bytes).
_PAPER_SPLITS = {(1024, 1_594_368): Fraction(527383, 10**6), (2048, 1_074_688): Fraction(199699, 10**6)}
_SPLIT_CONTEXT_TOKENS = (
    3475  # with 2 live checkpoints it gives Falcon's .5274: both limits meet (research note 8.2)
)


def _split(g: ModelGeometry) -> Fraction:
    paper = _PAPER_SPLITS.get((g.kv_bytes_per_token, g.composite_bytes))
    if paper is not None:
        return paper
    attention = g.attention_layers * g.kv_bytes_per_token * _SPLIT_CONTEXT_TOKENS
    return Fraction(attention, attention + 2 * g.recurrent_layers * g.composite_bytes).limit_denominator(
        10**6
    )


def _d0(g: ModelGeometry) -> Organization:
    if g.attention is None or g.recurrent is None:
        raise UnsupportedError(
            f"d0 has one pool for attention and one for recurrent state; {g.name} has not both"
        )
    kv = g.kv_bytes_per_token
    unit, page, share = round_up(kv * NATIVE_BLOCK_TOKENS, ALIGNMENT), _composite_bytes(g), _split(g)
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
        grid_tokens=round_up(-(-page // kv), 256),
    )


def with_split(made: Organization, fraction: float | str | Fraction) -> Organization:
    """D0 with another part of the budget for attention; the rest is for recurrent state."""
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
    body = round_up(-(-g.state_rows // count) * g.state_row_bytes, ALIGNMENT)
    page = max(page, body + round_up(-(-g.conv_bytes // count), ALIGNMENT))
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
    slot = round_up(kv * NATIVE_BLOCK_TOKENS, ALIGNMENT)
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
