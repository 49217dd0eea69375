"""Looped models, last-exited policy: after an early exit the deeper planes of a token hold its last written plane."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.kv_layout import KVLayout
from hybridkv.reference.kv import token_elements, token_offsets


def fill_exited(
    pool: Tensor, table: Tensor, rows: Tensor, positions: Tensor, exits: Tensor, *, layout: Sequence[int]
) -> None:
    """Copy keys and values of tokens from their exit's plane to every deeper one."""
    where = KVLayout(*layout)
    sources, destinations = fill_offsets(table, rows, positions, exits, where)
    for plane in destinations.T:
        moved = (plane >= 0) & (sources >= 0)
        read, write = token_elements(sources[moved], where), token_elements(plane[moved], where)
        pool[write] = pool[read]
        pool[write + where.value_offset] = pool[read + where.value_offset]


def fill_offsets(
    table: Tensor, rows: Tensor, positions: Tensor, exits: Tensor, layout: KVLayout
) -> tuple[Tensor, Tensor]:
    """Find where each token is read `[tokens]`, and written `[tokens, planes]`; -1 where nothing is."""
    planes = table.shape[1]
    there = (rows >= 0) & (positions >= 0)
    exit_plane = exits[torch.where(there, rows, 0).long(), torch.where(there, positions, 0).long()]
    exit_plane = torch.where(there, exit_plane, -1)
    offsets = [token_offsets(table[:, p], rows, positions, layout) for p in range(planes)]
    every = torch.stack(offsets, 1) if offsets else positions.new_empty(len(positions), 0).long()
    sources = every.gather(1, exit_plane.clamp(min=0).long()[:, None])[:, 0]
    sources = torch.where(exit_plane >= 0, sources, -1)
    deeper = (torch.arange(planes) > exit_plane[:, None]) & (sources >= 0)[:, None]
    return sources, torch.where(deeper, every, -1)
