"""What a checkpoint is, whatever organization holds it: keys, values, recurrent and convolution states by layer.

The same bytes go into any organization of the same geometry. Does not know files, hosts or requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hybridkv.alloc.organization import StateKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from hybridkv.alloc.checkpoint import State
    from hybridkv.arena.arena import Arena
    from hybridkv.geometry import ModelGeometry

    Units = NDArray[np.int32]
    Payload = dict[str, Tensor]

# axes of what a payload holds; a layer counts among those that hold the kind, planes of a loop included
AXES = {
    "key": "layers, tokens, kv_heads, key_dim",
    "value": "layers, tokens, kv_heads, value_dim",
    "ssm": "layers, rows, ...",
    "conv": "layers, columns, channels",
}


def read_blocks(arena: Arena, units: Units, impl: str = "") -> Payload:
    """Keys and values of attention blocks, `units` int32 `[groups, blocks]`: `[layers, tokens, kv_heads, dim]` each."""
    spec, width = arena.organization.geometry.attention, arena.organization.block_tokens
    assert spec is not None
    groups, count = units.shape
    raw = arena.read(
        StateKind.ATTENTION, units[..., None], impl=impl
    )  # [layers of a group, groups * blocks, elements]
    split = width * spec.kv_heads * spec.key_dim
    made: Payload = {}
    for name, part, dim in (
        ("key", raw[..., :split], spec.key_dim),
        ("value", raw[..., split:], spec.value_dim),
    ):
        by_layer = part.unflatten(1, (groups, count)).transpose(0, 1).flatten(0, 1)
        made[name] = by_layer.reshape(len(by_layer), count * width, spec.kv_heads, dim).contiguous()
    return made


def write_blocks(arena: Arena, units: Units, payload: Payload, impl: str = "") -> None:
    """The inverse of `read_blocks`."""
    groups, count = units.shape
    values = (payload[name].to(arena.device, non_blocking=True) for name in ("key", "value"))
    parts = [v.unflatten(1, (count, -1)).flatten(2) for v in values]
    by_layer = torch.cat(parts, 2).unflatten(0, (groups, -1)).transpose(0, 1)
    arena.write(StateKind.ATTENTION, units[..., None], by_layer.flatten(1, 2), impl)


def read_state(arena: Arena, state: State, impl: str = "") -> Payload:
    """Recurrent and convolution state of a checkpoint, one row for each layer."""
    made: Payload = {}
    for name, kind, ids, shape in _parts(arena, state):
        raw = arena.read(kind, ids, impl=impl)
        made[name] = raw.transpose(0, 1).flatten(0, 1).unflatten(1, shape).contiguous()
    return made


def write_state(arena: Arena, state: State, payload: Payload, impl: str = "") -> None:
    """The inverse of `read_state`."""
    for name, kind, ids, _ in _parts(arena, state):
        values = payload[name].to(arena.device, non_blocking=True)
        by_layer = values.flatten(1).unflatten(0, (len(ids), -1)).transpose(0, 1)
        arena.write(kind, ids, by_layer.contiguous(), impl)


def _parts(arena: Arena, state: State) -> list[tuple[str, StateKind, Units, tuple[int, ...]]]:
    """Name, kind, unit ids and shape of one layer, for what the state really holds."""
    g, places = arena.organization.geometry, arena.organization.placements
    assert g.recurrent is not None
    found: list[tuple[str, StateKind, Units, tuple[int, ...]]] = []
    shapes = {StateKind.SSM: g.recurrent.state_shape or (), StateKind.CONV: (-1, g.recurrent.conv_dim)}
    for kind, shape in shapes.items():
        if (place := places.get(kind)) is not None:
            found.append((kind.value, kind, state.units[place.within or kind], shape))
    return found


class Section(NamedTuple):
    """`size` elements of an axis that hold so many `heads`: heads, groups or channels."""

    size: int
    heads: int


def shard(g: ModelGeometry, payload: Payload, ranks: int) -> list[Payload]:
    """What each of `ranks` tensor-parallel ranks holds of a payload of the whole model `g` (scenario G2).

    Heads are split, or repeated where there are fewer than ranks; every section of a convolution is cut by itself.
    """
    g.shard(ranks)  # says what cannot be split
    made: list[Payload] = [{} for _ in range(ranks)]
    for name, values in payload.items():
        axis, sections = _sections(g, name)
        parts = values.split([s.size for s in sections], axis)
        for rank, mine in enumerate(made):
            cut = [
                _of_rank(part, axis, s.heads, ranks, rank) for part, s in zip(parts, sections, strict=True)
            ]
            mine[name] = torch.cat(cut, axis)
    return made


def unshard(g: ModelGeometry, payloads: Sequence[Payload]) -> Payload:
    """The inverse of `shard`: what is repeated is taken once."""
    ranks = len(payloads)
    made: Payload = {}
    for name in payloads[0]:
        axis, sections = _sections(g, name)
        sizes = [s.size // ranks if s.heads % ranks == 0 else s.size // s.heads for s in sections]
        by_rank = [p[name].split(sizes, axis) for p in payloads]
        whole: list[Tensor] = []
        for k, section in enumerate(sections):
            step = max(1, ranks // section.heads)
            whole += [parts[k] for parts in by_rank[::step]]
        made[name] = torch.cat(whole, axis)
    return made


def _sections(g: ModelGeometry, name: str) -> tuple[int, list[Section]]:
    """The axis that ranks divide, and what lies along it."""
    if name in ("key", "value"):
        assert g.attention is not None
        return 2, [Section(g.attention.kv_heads, g.attention.kv_heads)]
    spec = g.recurrent
    assert spec is not None
    if name == "ssm":
        return 1, [Section(spec.rows, spec.rows)]
    sections = zip(spec.conv_sections, spec.section_groups, strict=True)
    return 2, [Section(columns, groups or columns) for columns, groups in sections]


def _of_rank(part: Tensor, axis: int, count: int, ranks: int, rank: int) -> Tensor:
    """The heads, groups or channels of one rank."""
    width = part.shape[axis] // count
    held = count // ranks if count % ranks == 0 else 1
    return part.narrow(axis, rank * count // ranks * width, held * width)
