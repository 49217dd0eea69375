"""Paged attention, for decode and for chunked prefill with a paged prefix.

A query sees the positions up to its own (and within the window) whose blocks are present. Queries go in tiles of absolute
positions and keys in absolute segments, always of one shape, so that a query's bits depend on nothing but its prefix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.kv_layout import SEGMENT, KVLayout
from hybridkv.reference.kv import token_elements, token_offsets

TILE = 16  # query positions


def decode_attention(
    pool: Tensor, query: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, out: Tensor, workspace: Tensor,
    exits: Tensor | None, depths: Tensor | None, *, layout: Sequence[int], scale: float, window: int,
) -> None:  # fmt: skip
    """Attend from the last position of every row. The workspace is what the kernels need; it is left alone here."""
    del workspace
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        if row >= 0 and length > 0:
            planes = _planes(table, row, length, exits, None if depths is None else int(depths[i]))
            out[i : i + 1] = _attend(
                pool, query[i : i + 1], planes, length, KVLayout(*layout), scale, window
            ).to(out.dtype)


def prefill_attention(
    pool: Tensor, query: Tensor, query_start: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, out: Tensor,
    exits: Tensor | None, depths: Tensor | None, *,
    layout: Sequence[int], max_query: int, scale: float, window: int,
) -> None:  # fmt: skip
    """Attend from the last positions of every sequence, as many as it has queries."""
    del max_query
    start = query_start.tolist()
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        mine = slice(start[i], start[i + 1])
        if row >= 0 and length > 0 and mine.start < mine.stop:
            planes = _planes(table, row, length, exits, None if depths is None else int(depths[i]))
            out[mine] = _attend(pool, query[mine], planes, length, KVLayout(*layout), scale, window).to(
                out.dtype
            )


def _planes(
    table: Tensor, row: int, length: int, exits: Tensor | None, depth: int | None
) -> tuple[Tensor, Tensor]:
    """Return a two-dimensional table, and for every position the row of it to read: a token's plane, if it exited."""
    if exits is None or depth is None:
        return table[row : row + 1], torch.zeros(length, dtype=torch.int64)
    return table[row], exits[row, :length].long().clamp(max=depth)


def _attend(
    pool: Tensor,
    query: Tensor,
    planes: tuple[Tensor, Tensor],
    length: int,
    layout: KVLayout,
    scale: float,
    window: int,
) -> Tensor:
    """Attend from positions [length - queries, length); returns `[queries, heads, head_dim]`, fp32."""
    queries, heads, dim = query.shape
    first = length - queries
    low = first // TILE * TILE
    tiles = -(-length // TILE) - low // TILE
    padded = query.new_zeros(tiles * TILE, heads, dim, dtype=torch.float32)
    padded[first - low : length - low] = query
    parts = [_gather(pool, planes, s, length, layout) for s in range(0, length, SEGMENT)]
    out = torch.empty_like(padded)
    for i in range(tiles):
        positions = low + i * TILE + torch.arange(TILE)
        q = padded[i * TILE : (i + 1) * TILE].view(TILE, layout.kv_heads, -1, dim).permute(1, 2, 0, 3)
        q = q.reshape(layout.kv_heads, -1, dim)
        high = min(int(positions[-1]) + 1, length)
        carry = None
        for s in range(0, high, SEGMENT):
            k, v, there = parts[s // SEGMENT]
            at = s + torch.arange(SEGMENT)
            if window:  # what lies before it may have been freed, and a weight of 0 does not undo a NaN
                there = there & (at > max(first, int(positions[0])) - window)
                v = torch.where(there[:, None], v, 0.0)
            seen = there & (at <= positions[:, None]) & ((window == 0) | (positions[:, None] - at < window))
            part = _softmax_part(q @ k * scale, seen.repeat(heads // layout.kv_heads, 1), v)
            carry = part if carry is None else _merge(carry, part)
        assert carry is not None
        _, total, weighted = carry
        tile = torch.where(total == 0, 0.0, weighted / total).view(layout.kv_heads, -1, TILE, dim)
        out[i * TILE : (i + 1) * TILE] = tile.permute(2, 0, 1, 3).reshape(TILE, heads, dim)
    return out[first - low : length - low]


def _gather(
    pool: Tensor, planes: tuple[Tensor, Tensor], start: int, length: int, layout: KVLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Read one segment, padded: keys `[kv_heads, dim, 512]`, values `[kv_heads, 512, dim]`, which are there `[512]`."""
    table, plane = planes
    positions = torch.arange(start, min(start + SEGMENT, length))
    offsets = token_offsets(table, plane[start : start + SEGMENT], positions, layout)
    there = torch.zeros(SEGMENT, dtype=torch.bool)
    there[: len(positions)] = offsets >= 0
    elements = token_elements(offsets[offsets >= 0], layout)
    both = torch.zeros(2, SEGMENT, layout.kv_heads, layout.head_dim)
    both[0, there], both[1, there] = pool[elements].float(), pool[elements + layout.value_offset].float()
    key, value = both.permute(0, 2, 1, 3).contiguous()
    return key.transpose(1, 2).contiguous(), value, there


def _softmax_part(scores: Tensor, seen: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return maximum, sum of weights and weighted values of one segment; -inf, 0 and 0 where nothing is seen."""
    scores = torch.where(seen, scores, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weight = torch.exp(scores - torch.where(top.isinf(), 0.0, top))
    return top, weight.sum(-1, keepdim=True), weight @ value


def _merge(
    left: tuple[Tensor, Tensor, Tensor], right: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    top = torch.maximum(left[0], right[0])
    safe = torch.where(top.isinf(), 0.0, top)
    a, b = torch.exp(left[0] - safe), torch.exp(right[0] - safe)
    return top, left[1] * a + right[1] * b, left[2] * a + right[2] * b
