"""Paged attention and the KV write that feeds it.

Bits of a query's output depend on its prefix only: not on the batch, the order of rows, where blocks lie, how a prompt
was cut, or whether the query came in prefill or decode (rules R1-R10). Safe to capture in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybridkv.kv_layout import SEGMENT, KVLayout
from hybridkv.ops._register import register
from hybridkv.ops._validate import (
    FLOATS,
    check_base,
    check_destinations,
    check_entries,
    check_ids,
    check_layout,
    check_table,
    check_tensor,
    require,
    support,
)
from hybridkv.reference.kv import token_offsets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MAX_GROUP = 16  # query heads of one KV head; they share a tile of 16 rows


def _check_write_values(
    pool: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    layout: Sequence[int],
) -> None:
    del key, value
    where = KVLayout(*layout)
    check_base("pool", pool)
    check_entries("table", table, pool, granule=where.granule, unit=where.extent)
    check_ids("rows", rows, table.shape[0])
    check_ids("positions", positions, table.shape[1] * where.block_tokens)
    if table.device.type == "cpu":
        offsets = token_offsets(table, rows, positions, where)
        check_destinations("positions (as elements of the pool)", offsets, granule=1, unit=1)


def _check_attend_values(
    pool: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, layout: Sequence[int],
    exits: Tensor | None, depths: Tensor | None,
) -> None:  # fmt: skip
    where = KVLayout(*layout)
    check_base("pool", pool)
    check_entries("table", table, pool, granule=where.granule, unit=where.extent)
    check_ids("rows", rows, table.shape[0])
    check_ids("lengths", lengths, table.shape[-1] * where.block_tokens + 1)
    if exits is not None and depths is not None:
        check_ids("lengths", lengths, exits.shape[1] + 1)
        check_ids("exits", exits, table.shape[1])
        check_ids("depths", depths, table.shape[1])


def _check_decode_values(
    pool: Tensor, query: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, out: Tensor, workspace: Tensor,
    exits: Tensor | None, depths: Tensor | None, *, layout: Sequence[int], scale: float, window: int,
) -> None:  # fmt: skip
    del query, out, workspace, scale, window
    _check_attend_values(pool, table, rows, lengths, layout, exits, depths)


def _check_prefill_values(
    pool: Tensor, query: Tensor, query_start: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, out: Tensor,
    exits: Tensor | None, depths: Tensor | None, *,
    layout: Sequence[int], max_query: int, scale: float, window: int,
) -> None:  # fmt: skip
    del out, scale, window
    _check_attend_values(pool, table, rows, lengths, layout, exits, depths)
    if query_start.device.type == "cpu" and rows.shape[0]:
        counts = query_start[1:] - query_start[:-1]
        bounds = int(query_start[0]) >= 0 and int(query_start[-1]) <= query.shape[0]
        good = bounds and bool((counts >= 0).all())
        require(good, "query_start", f"ascending within 0..{query.shape[0]}", query_start.tolist())
        check_ids("query_start (as queries of a sequence)", counts, max_query + 1)
        live = (rows >= 0) & (lengths > 0)
        short = int(torch.where(live, lengths - counts, 0).min())
        require(short >= 0, "lengths", "at least the queries of each sequence", f"{-short} fewer")


_write = register("kv", "write_kv", mutates=["pool"], check=_check_write_values)
_decode = register("attention", "decode_attention", mutates=["out", "workspace"], check=_check_decode_values)
_prefill = register("attention", "prefill_attention", mutates=["out"], check=_check_prefill_values)


def write_kv(
    pool: Tensor, key: Tensor, value: Tensor, table: Tensor, rows: Tensor, positions: Tensor,
    *, layout: KVLayout, impl: str = "",
) -> None:  # fmt: skip
    """Write keys and values of tokens by absolute position. A move: byte-exact.

    A token whose row, position or block is absent is skipped. Two tokens must not name the same place.

    Args:
        pool: raw storage, mutated, `[elements]`, fp32, bf16 or fp16.
        key: `[tokens, kv_heads, head_dim]`, dtype of `pool`, heads contiguous; any stride between tokens.
        value: as `key`.
        table: block of every span of positions, `[sequences, blocks]`, int32.
        rows: row of the table for every token, `[tokens]`, int32.
        positions: absolute position of every token, `[tokens]`, int32.
        layout: where a token's keys and values lie inside a block.
        impl: "reference" or "triton"; empty for the device's own.
    """
    check_layout(pool, layout)
    tokens = rows.shape[0] if rows.dim() else None
    for name, new in (("key", key), ("value", value)):
        _check_heads(name, new, (tokens, layout.kv_heads, layout.head_dim), pool.dtype, pool)
    check_table("table", table, (None, None), pool.device)
    check_table("rows", rows, (None,), pool.device)
    check_table("positions", positions, (tokens,), pool.device)
    _write(pool, key, value, table, rows, positions, layout=list(layout), impl=impl)


def decode_workspace(batch: int, heads: int, table: Tensor, layout: KVLayout) -> int:
    """Count the fp32 elements of workspace that `decode_attention` needs."""
    segments = -(-table.shape[-1] * layout.block_tokens // SEGMENT)
    return batch * segments * heads * (layout.head_dim + 2)


def decode_attention(
    pool: Tensor, query: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, out: Tensor, workspace: Tensor,
    *, layout: KVLayout, scale: float | None = None, window: int = 0,
    exits: Tensor | None = None, depths: Tensor | None = None, impl: str = "",
) -> None:  # fmt: skip
    """Attend from the newest position of every row, whose own key and value have been written.

    A row that is absent, or of length 0, leaves its output as it was. Positions of absent blocks are not seen.
    A looped model whose tokens exit early passes `exits` and `depths`: position t is read in plane
    min(depth, exits[t]), which gives the bits that `fill_exited` would have given.

    Args:
        pool: raw storage, `[elements]`, fp32, bf16 or fp16.
        query: `[batch, heads, head_dim]`, dtype of `pool`, heads contiguous.
        table: blocks, `[sequences, blocks]`, int32; with `exits`: `[sequences, planes, blocks]`.
        rows: row of the table for every query, `[batch]`, int32.
        lengths: positions of every row, the newest included, `[batch]`, int32.
        out: mutated, `[batch, heads, head_dim]`, fp32, bf16 or fp16.
        workspace: mutated, `[decode_workspace(...)]` or more, fp32.
        layout: where a token's keys and values lie inside a block.
        scale: factor of the scores; 1 / sqrt(head_dim) if not given.
        window: how many positions a query sees, its own included; 0 is all.
        exits: last plane written of every position, `[sequences, positions]`, int32; negative is not seen.
        depths: plane of every query, `[batch]`, int32.
        impl: "reference" or "triton"; empty for the device's own.
    """
    batch, heads = _check_attend(pool, query, table, rows, lengths, out, layout, window, exits, depths)
    require(rows.shape[0] == batch, "rows.shape", [batch], list(rows.shape))
    check_tensor("workspace", workspace, (None,), torch.float32, pool.device)
    needed = decode_workspace(batch, heads, table, layout)
    require(workspace.shape[0] >= needed, "workspace.shape[0]", f"at least {needed}", workspace.shape[0])
    scale = layout.head_dim**-0.5 if scale is None else scale
    _decode(
        pool, query, table, rows, lengths, out, workspace, exits, depths,
        layout=list(layout), scale=scale, window=window, impl=impl,
    )  # fmt: skip


def prefill_attention(
    pool: Tensor, query: Tensor, query_start: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, out: Tensor,
    *, layout: KVLayout, max_query: int, scale: float | None = None, window: int = 0,
    exits: Tensor | None = None, depths: Tensor | None = None, impl: str = "",
) -> None:  # fmt: skip
    """Attend from the newest positions of every sequence, whose own keys and values have been written.

    The queries of sequence i are rows query_start[i] to query_start[i + 1] and stand at its last positions; whatever
    lies before them, computed in an earlier chunk or shared, is read through the table.

    Args:
        pool: raw storage, `[elements]`, fp32, bf16 or fp16.
        query: `[tokens, heads, head_dim]`, dtype of `pool`, heads contiguous.
        query_start: first query of every sequence and the end, `[batch + 1]`, int32.
        table: blocks, `[sequences, blocks]`, int32; with `exits`: `[sequences, planes, blocks]`.
        rows: row of the table for every sequence, `[batch]`, int32; an absent one leaves its output as it was.
        lengths: positions of every sequence, its queries included, `[batch]`, int32.
        out: mutated, `[tokens, heads, head_dim]`, fp32, bf16 or fp16.
        layout: where a token's keys and values lie inside a block.
        max_query: at least the most queries of any sequence; the grid follows it, the bits do not.
        scale: factor of the scores; 1 / sqrt(head_dim) if not given.
        window: how many positions a query sees, its own included; 0 is all.
        exits: last plane written of every position, `[sequences, positions]`, int32; negative is not seen.
        depths: plane of every sequence's queries, `[batch]`, int32.
        impl: "reference" or "triton"; empty for the device's own.
    """
    _check_attend(pool, query, table, rows, lengths, out, layout, window, exits, depths)
    check_table("query_start", query_start, (rows.shape[0] + 1,), pool.device)
    require(max_query >= 0, "max_query", "at least 0", max_query)
    scale = layout.head_dim**-0.5 if scale is None else scale
    _prefill(
        pool, query, query_start, table, rows, lengths, out, exits, depths,
        layout=list(layout), max_query=max_query, scale=scale, window=window, impl=impl,
    )  # fmt: skip


def _check_heads(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    pool: Tensor,
) -> None:
    check_tensor(name, tensor, shape, dtype, pool.device)
    inner = tensor.stride(1) == tensor.shape[2] or tensor.shape[1] == 1
    require(inner, f"{name}.stride(1)", tensor.shape[2], tensor.stride(1))


def _check_attend(
    pool: Tensor, query: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, out: Tensor, layout: KVLayout,
    window: int, exits: Tensor | None, depths: Tensor | None,
) -> tuple[int, int]:  # fmt: skip
    check_layout(pool, layout)
    _check_heads("query", query, (None, None, layout.head_dim), pool.dtype, pool)
    tokens, heads, _ = query.shape
    require(heads % layout.kv_heads == 0, "query.shape[1]", f"a multiple of {layout.kv_heads}", heads)
    group = heads // layout.kv_heads
    support(0 < group <= MAX_GROUP, "query.shape[1]", f"at most {MAX_GROUP} per KV head", group)
    _check_heads("out", out, (tokens, heads, layout.head_dim), FLOATS, pool)
    require(window >= 0, "window", "at least 0", window)
    check_table("rows", rows, (None,), pool.device)
    check_table("lengths", lengths, (rows.shape[0],), pool.device)
    require((exits is None) == (depths is None), "depths", "given with exits", "one of the two")
    check_table("table", table, (None, None) if exits is None else (None, None, None), pool.device)
    if exits is not None and depths is not None:
        check_table("exits", exits, (table.shape[0], None), pool.device)
        check_table("depths", depths, (rows.shape[0],), pool.device)
    return tokens, heads
