"""Looped models: what an early exit leaves unwritten is filled, or never read.

A table of a looped model is `[sequences, planes, blocks]`: plane d holds the keys and values of pass d. A token that
exits after pass e leaves planes e + 1 and deeper unwritten, while later tokens that run deeper must see plane e there.
Two ways, with equal bits: `fill_exited` copies; `decode_attention` and `prefill_attention` with `exits` and `depths`
read plane min(depth, exits[position]) and copy nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.kv_layout import KVLayout
from hybridkv.ops._register import register
from hybridkv.ops._validate import (
    check_base,
    check_destinations,
    check_entries,
    check_ids,
    check_layout,
    check_table,
)
from hybridkv.reference.loops import fill_offsets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def _check_values(
    pool: Tensor, table: Tensor, rows: Tensor, positions: Tensor, exits: Tensor, *, layout: Sequence[int]
) -> None:
    where = KVLayout(*layout)
    check_base("pool", pool)
    check_entries("table", table, pool, granule=where.granule, unit=where.extent)
    check_ids("rows", rows, table.shape[0])
    check_ids("positions", positions, min(table.shape[2] * where.block_tokens, exits.shape[1]))
    check_ids("exits", exits, table.shape[1])
    if table.device.type == "cpu":
        sources, destinations = fill_offsets(table, rows, positions, exits, where)
        check_destinations(
            "table (as elements of the pool)", destinations, granule=1, unit=1,
            source_name="the planes that tokens exited at", source=sources,
        )  # fmt: skip


_fill = register("loops", "fill_exited", mutates=["pool"], check=_check_values)


def fill_exited(
    pool: Tensor, table: Tensor, rows: Tensor, positions: Tensor, exits: Tensor,
    *, layout: KVLayout, impl: str = "",
) -> None:  # fmt: skip
    """Copy keys and values of tokens from the plane they exited at to every deeper plane. A move: byte-exact.

    A token that is absent, has not exited, or whose source block is absent is skipped; so is an absent destination.
    Run it after the tokens' own writes and before the next launch that reads them.

    Args:
        pool: raw storage, mutated, `[elements]`, fp32, bf16 or fp16.
        table: block of every span of positions, `[sequences, planes, blocks]`, int32; planes share no block.
        rows: sequence of every token, `[tokens]`, int32.
        positions: absolute position of every token, `[tokens]`, int32.
        exits: last plane written of every position, `[sequences, positions]`, int32.
        layout: where a token's keys and values lie inside a block.
        impl: "reference" or "triton"; empty for the device's own.
    """
    check_layout(pool, layout)
    check_table("table", table, (None, None, None), pool.device)
    check_table("rows", rows, (None,), pool.device)
    check_table("positions", positions, (rows.shape[0],), pool.device)
    check_table("exits", exits, (table.shape[0], None), pool.device)
    _fill(pool, table, rows, positions, exits, layout=list(layout), impl=impl)
