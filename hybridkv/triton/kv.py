"""Keys and values in attention blocks: writing them. A move: bytes are carried as they are."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hybridkv.kv_layout import KVLayout
from hybridkv.triton.common import SHAPES, CompileCase, options, signature

_OPTIONS = options(warps=1)  # a token's keys are 256 to 4,096 bytes
_INDICES = ("table_ptr", "rows_ptr", "positions_ptr")


def layout_constexprs(layout: KVLayout) -> dict[str, int]:
    """Name the fields of a layout as kernels do."""
    return {name.upper(): value for name, value in layout._asdict().items()}


@triton.jit(do_not_specialize_on_alignment=_INDICES, do_not_specialize=("table_stride",))
def _write_kv_kernel(
    pool_ptr, key_ptr, key_stride: tl.int64, value_ptr, value_stride: tl.int64,
    table_ptr, table_stride: tl.int64, rows_ptr, positions_ptr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, VALUE_OFFSET: tl.constexpr, GRANULE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    i_token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i_token).to(tl.int64)
    position = tl.load(positions_ptr + i_token)
    if (row < 0) | (position < 0):
        return
    entry = tl.load(table_ptr + row * table_stride + position // BLOCK_TOKENS).to(tl.int64)
    if entry < 0:
        return
    # Key and value in one tile: with two heads of 128 either alone has 8 bytes for each of AMD's 64 lanes.
    o_kv = tl.arange(0, 2 * HEADS * HEAD_DIM)
    o_h, o_d = o_kv // HEAD_DIM % HEADS, o_kv % HEAD_DIM
    o_part = o_kv // (HEADS * HEAD_DIM)  # 0: key, 1: value
    m_h = o_h < KV_HEADS
    p_key = key_ptr + i_token * key_stride + o_h * HEAD_DIM + o_d
    p_value = value_ptr + i_token * value_stride + o_h * HEAD_DIM + o_d
    b_key = tl.load(p_key, mask=m_h & (o_part == 0), other=0.0)
    b_value = tl.load(p_value, mask=m_h & (o_part == 1), other=0.0)
    b_new = tl.where(o_part == 0, b_key, b_value)
    p_token = pool_ptr + entry * GRANULE + (position % BLOCK_TOKENS) * TOKEN_STRIDE
    tl.store(p_token + o_part * VALUE_OFFSET + o_h * HEAD_STRIDE + o_d, b_new, mask=m_h)


def _constexprs(layout: KVLayout) -> dict[str, Any]:
    return layout_constexprs(layout) | {"HEADS": triton.next_power_of_2(layout.kv_heads)}


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
    _write_kv_kernel[rows.shape[0],](
        pool, key, key.stride(0), value, value.stride(0), table, table.stride(0), rows, positions,
        **_constexprs(KVLayout(*layout)), **_OPTIONS,
    )  # fmt: skip


def compile_cases(arch: str) -> list[CompileCase]:
    """One token in bf16, in blocks of 512 (S0 to S2) and of 16 tokens (D0)."""
    del arch  # one launch for all
    types = signature(
        p_bf16_16="pool_ptr key_ptr value_ptr", i64_16="key_stride value_stride",
        p_i32="table_ptr rows_ptr positions_ptr", i64="table_stride",
    )  # fmt: skip
    return [
        CompileCase(
            kernel=_write_kv_kernel, geometry=name, variant=f"{tokens}", signature=types, options=_OPTIONS,
            constexprs=_constexprs(KVLayout.token_major(s.kv_heads, s.head_dim, tokens, 8192)),
            bytes_per_token=8.0 * s.kv_heads * s.head_dim + 12, floor_bytes=8.0 * s.kv_heads * s.head_dim,
        )
        for name, s in SHAPES.items()
        for tokens in (16, 512)
    ]  # fmt: skip
