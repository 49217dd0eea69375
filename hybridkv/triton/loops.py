"""Looped models, last-exited policy: after an early exit the deeper planes of a token hold its last written plane."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hybridkv.kv_layout import KVLayout
from hybridkv.triton.common import CompileCase, options, signature
from hybridkv.triton.kv import layout_constexprs

_OPTIONS = options(warps=4)  # a token's keys are 4 KiB in Ouro: two 128-bit accesses a thread
_INDICES = ("table_ptr", "rows_ptr", "positions_ptr", "exits_ptr")
_STRIDES = ("table_stride", "plane_stride", "exits_stride")


@triton.jit(do_not_specialize_on_alignment=_INDICES, do_not_specialize=_STRIDES)
def _fill_exited_kernel(
    pool_ptr, table_ptr, table_stride: tl.int64, plane_stride: tl.int64, rows_ptr, positions_ptr,
    exits_ptr, exits_stride: tl.int64,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, VALUE_OFFSET: tl.constexpr, GRANULE: tl.constexpr,
    HEADS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    i_token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i_token).to(tl.int64)
    position = tl.load(positions_ptr + i_token)
    if (row < 0) | (position < 0):
        return
    exit_plane = tl.load(exits_ptr + row * exits_stride + position).to(tl.int64)
    if exit_plane < 0:
        return
    p_entry = table_ptr + row * table_stride + position // BLOCK_TOKENS
    source = tl.load(p_entry + exit_plane * plane_stride).to(tl.int64)
    if source < 0:
        return
    o_h, o_d = tl.arange(0, HEADS)[:, None], tl.arange(0, HEAD_DIM)[None, :]
    m_h = (o_h < KV_HEADS) & (o_d < HEAD_DIM)
    o_kv = (
        (position % BLOCK_TOKENS) * TOKEN_STRIDE + o_h * HEAD_STRIDE + o_d + tl.program_id(1) * VALUE_OFFSET
    )
    b_kv = tl.load(pool_ptr + source * GRANULE + o_kv, mask=m_h, other=0.0)
    for plane in range(exit_plane + 1, PLANES):
        entry = tl.load(p_entry + plane * plane_stride).to(tl.int64)
        tl.store(pool_ptr + entry * GRANULE + o_kv, b_kv, mask=m_h & (entry >= 0))


def _constexprs(layout: KVLayout, planes: int) -> dict[str, Any]:
    return layout_constexprs(layout) | {"HEADS": triton.next_power_of_2(layout.kv_heads), "PLANES": planes}


def fill_exited(
    pool: Tensor, table: Tensor, rows: Tensor, positions: Tensor, exits: Tensor, *, layout: Sequence[int]
) -> None:
    """Copy keys and values of tokens from their exit's plane to every deeper one."""
    _fill_exited_kernel[rows.shape[0], 2](
        pool, table, table.stride(0), table.stride(1), rows, positions, exits, exits.stride(0),
        **_constexprs(KVLayout(*layout), table.shape[1]), **_OPTIONS,
    )  # fmt: skip


def compile_cases(arch: str) -> list[CompileCase]:
    """One token of Ouro-1.4B (16 KV heads of 128, four passes) that exits after the first."""
    del arch  # one launch for all
    types = signature(
        p_bf16_16="pool_ptr", p_i32="table_ptr rows_ptr positions_ptr exits_ptr",
        i64="table_stride plane_stride exits_stride",
    )  # fmt: skip
    line = 2.0 * 16 * 128 * 2
    return [
        CompileCase(
            kernel=_fill_exited_kernel, geometry="ouro-1.4b", signature=types, options=_OPTIONS,
            constexprs=_constexprs(KVLayout.token_major(16, 128, 16, 8192), 4),
            bytes_per_token=4 * line, floor_bytes=4 * line,
        )
    ]  # fmt: skip
