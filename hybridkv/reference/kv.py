"""Keys and values in attention blocks: where a token's lie, and writing them. A move: bytes are carried as they are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.kv_layout import KVLayout


def token_offsets(table: Tensor, rows: Tensor, positions: Tensor, layout: KVLayout) -> Tensor:
    """Find the first key element of every token, int64; -1 where the row, the position or the block is absent."""
    here = (rows >= 0) & (positions >= 0)
    row, position = torch.where(here, rows, 0).long(), torch.where(here, positions, 0).long()
    entry = table[row, position // layout.block_tokens].long()
    at = entry * layout.granule + position % layout.block_tokens * layout.token_stride
    return torch.where(here & (entry >= 0), at, -1)


def token_elements(offsets: Tensor, layout: KVLayout) -> Tensor:
    """Name the key elements of tokens at offsets, `[tokens, kv_heads, head_dim]`."""
    heads = torch.arange(layout.kv_heads)[:, None] * layout.head_stride
    return offsets[:, None, None] + heads + torch.arange(layout.head_dim)


def write_kv(
    pool: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    layout: Sequence[int],
) -> None:
    """Write one key and one value per token into the block of its absolute position."""
    where = KVLayout(*layout)
    offsets = token_offsets(table, rows, positions, where)
    kept = offsets >= 0
    elements = token_elements(offsets[kept], where)
    pool[elements] = key[kept]
    pool[elements + where.value_offset] = value[kept]
