"""Organizations so small that everything about them can be tried: blocks of two tokens, states of 64 bytes.

Owns shapes for tests. The six named ones place states as the real ones do; their numbers mean nothing.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

from hybridkv.alloc.organization import Organization, Placement, Pool, StateKind
from hybridkv.errors import UsageError
from hybridkv.geometry import ModelGeometry
from hybridkv.geometry.specs import AttentionSpec, RecurrentKind, RecurrentSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

KV_BYTES = 16  # of a token
ORGANIZATIONS = ("s0", "s1", "s2", "d0", "striped", "nested")
STATE_BYTES = (
    128  # room for any tiny state with its convolution state, so that the number of pages is a free choice
)


def tiny_geometry(
    *,
    groups: tuple[int, int] = (1, 1),
    chunk_tokens: int = 1,
    live: bool = False,
) -> ModelGeometry:
    """A model of `groups` attention and recurrent layers (0: none), 16 bytes of KV a token, a state of 64 bytes."""
    attention, recurrent = groups
    return ModelGeometry(
        name="tiny",
        layers=attention + recurrent,
        attention=AttentionSpec(layers=attention, kv_heads=1, key_dim=4, value_dim=4) if attention else None,
        recurrent=RecurrentSpec.derived(
            kind=RecurrentKind.MAMBA2, layers=recurrent, state_shape=(4, 2, 4), conv_width=2
        )
        if recurrent
        else None,
        chunk_tokens=chunk_tokens,
        live_state_dtype="fp32" if live else None,
    )


@cache
def tiny_organization(
    name: str,
    *,
    block_tokens: int = 2,
    grid_tokens: int = 2,
    members: int = 1,
    slots: int = 2,
    groups: tuple[int, int] = (1, 1),
    chunk_tokens: int = 1,
    live: bool = False,
    window: bool = False,
) -> Organization:
    """One of the six, in small.

    `members`: pages of a recurrent state; `slots`: slots of a slab (S2's convolution states, nested's attention
    blocks); `groups`: layer groups with attention and with recurrent state; `live`: the running state has its own
    dtype; `window`: there is a replay window.
    """
    if name not in ORGANIZATIONS:
        raise UsageError(f"organization must be one of {', '.join(ORGANIZATIONS)}, got {name!r}")
    g = tiny_geometry(groups=groups, chunk_tokens=chunk_tokens, live=live)
    page = max(STATE_BYTES, KV_BYTES * block_tokens * slots)
    split = name == "d0"
    states = "recurrent" if split else "shared"
    slot: dict[str, Any] = {"slot_bytes": page // slots}
    places: dict[StateKind, Placement] = {}
    if g.attention is not None:
        where: dict[str, Any] = {
            "pool": "attention" if split else "shared",
            "payload_bytes": KV_BYTES * block_tokens,
        }
        where |= slot if name == "nested" else {"pages": 1}
        places[StateKind.ATTENTION] = Placement(**where)
    if g.recurrent is not None:
        places |= _recurrent(name, g, states, members, slot)
        if window:
            places[StateKind.WINDOW] = Placement(pool=states, payload_bytes=16, pages=1)
        if live:
            places[StateKind.LIVE] = Placement(pool=states, payload_bytes=g.live_ssm_bytes, pages=members)
    pools = ("attention", "recurrent") if split else ("shared",)
    return Organization(
        name=name,
        geometry=g,
        pools=tuple(Pool(name=p, page_bytes=page, share=Fraction(1, len(pools))) for p in pools),
        placements=places,
        block_tokens=block_tokens,
        grid_tokens=grid_tokens,
    )


def _recurrent(
    name: str, g: ModelGeometry, pool: str, members: int, slot: Mapping[str, Any]
) -> dict[StateKind, Placement]:
    """Composite in one kind of page, or the convolution state in a page or slot of its own."""
    ssm = Placement(pool=pool, payload_bytes=g.ssm_bytes, pages=members)
    conv: dict[str, Any] = {"pages": 1}
    if name in ("s0", "d0", "striped", "nested"):
        conv = {"within": StateKind.SSM, "offset": 64}
    elif name == "s2":
        conv = dict(slot)
    return {StateKind.SSM: ssm, StateKind.CONV: Placement(pool=pool, payload_bytes=g.conv_bytes, **conv)}
