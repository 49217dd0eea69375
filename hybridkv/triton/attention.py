"""Paged attention, for decode and for chunked prefill with a paged prefix.

A query sees the positions up to its own (and within the window) whose blocks are present. Both kernels run `_segment`
over absolute segments of 512 positions and `_merge` over the segments in order: decode in two launches, one program a
segment, prefill in one loop. A tile of queries starts at an absolute position, so a query sits in the same row of the
same matrix instruction in both. What a row does not see leaves its bits alone: its weights are exact zeros.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hybridkv.kv_layout import SEGMENT, KVLayout
from hybridkv.triton.common import SHAPES, CompileCase, architecture, constants, exp2, options, signature
from hybridkv.triton.kv import layout_constexprs

# Query rows of a tile. 16 keeps to mma.sync on every NVIDIA part (rule R7).
ROWS = 16
# (tile of positions, warps, stages) by bytes of an element, architecture and head dimension. Products of fp32 run without
# matrix instructions on NVIDIA parts: more warps, or they spill. gfx942 has 64 KiB of shared memory, small NVIDIA parts 99.
_LAUNCH = {
    2: {
        "sm_80": {16: (128, 4, 2), 32: (128, 4, 2), 64: (128, 4, 2), 128: (64, 4, 2), 256: (32, 4, 3)},
        "default": {16: (128, 4, 2), 32: (128, 4, 2), 64: (128, 4, 2), 128: (64, 4, 3), 256: (32, 4, 3)},
        "gfx942": {16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 4, 2), 128: (64, 4, 2), 256: (32, 4, 2)},
    },
    4: {
        "sm_100": {16: (32, 4, 2), 32: (32, 4, 2), 64: (32, 4, 2), 128: (16, 4, 2), 256: (32, 8, 2)},
        "default": {16: (32, 4, 2), 32: (32, 4, 2), 64: (32, 4, 2), 128: (32, 8, 2), 256: (32, 8, 2)},
        "gfx942": {16: (64, 4, 1), 32: (64, 4, 1), 64: (64, 4, 1), 128: (64, 4, 1), 256: (32, 4, 1)},
    },
}
_MERGE_OPTIONS = options(warps=1)
_MERGE_LANES = {"gfx942": 64, "gfx950": 64, "default": 32}  # of a warp
LOG2_E = 1.4426950408889634
_INDICES = ("table_ptr", "rows_ptr", "lengths_ptr", "query_start_ptr", "exits_ptr", "depths_ptr")
_STRIDES = ("table_stride", "plane_stride", "exits_stride", "segments", "slots")


@triton.jit
def _finite(top):
    """Stand in for the maximum of a row that has seen nothing, so that its weights are 0 and not NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _segment(
    b_q, o_position, first, last, i_segment, scale,
    pool_ptr, table_ptr, plane_stride, exits_ptr, depth,
    HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TOKEN_STRIDE: tl.constexpr, VALUE_OFFSET: tl.constexpr,
    GRANULE: tl.constexpr, WINDOW: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attend to the positions first..last of one segment: maximum (base 2), sum of weights, weighted values."""
    o_d = tl.arange(0, HEAD_DIM)
    b_top = tl.full((ROWS,), float("-inf"), tl.float32)
    b_total = tl.zeros((ROWS,), tl.float32)
    b_acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    low = tl.maximum(first, i_segment * SEGMENT) // TILE * TILE
    high = tl.minimum(last + 1, (i_segment + 1) * SEGMENT)
    for t in range(low, high, TILE):
        o_t = t + tl.arange(0, TILE)
        if exits_ptr is not None:
            plane = tl.minimum(tl.load(exits_ptr + o_t, mask=o_t < high, other=-1).to(tl.int64), depth)
            p_entry = table_ptr + plane * plane_stride + o_t // BLOCK_TOKENS
            entry = tl.load(p_entry, mask=plane >= 0, other=-1).to(tl.int64)
        elif BLOCK_TOKENS % TILE == 0:
            entry = tl.load(table_ptr + t // BLOCK_TOKENS).to(tl.int64)
        elif TILE % BLOCK_TOKENS == 0:
            BLOCKS: tl.constexpr = TILE // BLOCK_TOKENS
            o_b = t // BLOCK_TOKENS + tl.arange(0, BLOCKS)
            b_b = tl.load(table_ptr + o_b, mask=o_b * BLOCK_TOKENS < high, other=-1).to(tl.int64)
            entry = tl.reshape(tl.broadcast_to(b_b[:, None], (BLOCKS, BLOCK_TOKENS)), (TILE,))
        else:
            entry = tl.load(table_ptr + o_t // BLOCK_TOKENS, mask=o_t < high, other=-1).to(tl.int64)
        m_t = (o_t < high) & (entry >= 0)
        if WINDOW > 0:  # earlier positions may have been freed, and a weight of 0 does not undo a NaN
            m_t = m_t & (o_t >= first)
        o_kv = entry * GRANULE + (o_t % BLOCK_TOKENS) * TOKEN_STRIDE
        b_k = tl.load(pool_ptr + o_kv[None, :] + o_d[:, None], mask=m_t[None, :], other=0.0)
        b_s = tl.dot(b_q, b_k, input_precision="ieee") * scale
        m_s = m_t[None, :] & (o_t[None, :] <= o_position[:, None])
        if WINDOW > 0:
            m_s = m_s & (o_position[:, None] - o_t[None, :] < WINDOW)
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_s, 1))
        b_keep = exp2(b_top - _finite(b_new))
        b_p = exp2(b_s - _finite(b_new)[:, None])
        b_v = tl.load(pool_ptr + VALUE_OFFSET + o_kv[:, None] + o_d[None, :], mask=m_t[:, None], other=0.0)
        b_total = b_total * b_keep + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_keep[:, None], input_precision="ieee")
        b_top = b_new
    return b_top, b_total, b_acc


@triton.jit
def _merge(b_top, b_total, top_s, total_s):
    """Add a segment's sum to what came before; also what both sides' values are multiplied by."""
    b_new = tl.maximum(b_top, top_s)
    b_keep, b_add = exp2(b_top - _finite(b_new)), exp2(top_s - _finite(b_new))
    return b_new, b_total * b_keep + total_s * b_add, b_keep, b_add


@triton.jit
def _quotient(acc, total):
    """Divide by the sum of weights; zero where nothing was seen. A NaN that was seen stays one."""
    return tl.where(total == 0.0, 0.0, acc / total)


@triton.jit(do_not_specialize_on_alignment=_INDICES, do_not_specialize=_STRIDES)
def _decode_segment_kernel(
    pool_ptr, query_ptr, query_stride: tl.int64, table_ptr, table_stride: tl.int64, plane_stride: tl.int64,
    rows_ptr, lengths_ptr, workspace_ptr, segments: tl.int64, slots: tl.int64,
    exits_ptr, exits_stride: tl.int64, depths_ptr, scale,
    HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    VALUE_OFFSET: tl.constexpr, GRANULE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i_segment = tl.program_id(0)
    i_head = tl.program_id(1)
    i_row = tl.program_id(2).to(tl.int64)
    row = tl.load(rows_ptr + i_row).to(tl.int64)
    last = tl.load(lengths_ptr + i_row) - 1
    if (row < 0) | (last < i_segment * SEGMENT):
        return
    first = 0
    if WINDOW > 0:
        first = tl.maximum(last - WINDOW + 1, 0)
        if (i_segment + 1) * SEGMENT <= first:
            return
    o_r, o_d = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    o_position = last // TOKENS * TOKENS + o_r // GROUP
    m_r = (o_position == last) & (o_r < TOKENS * GROUP)
    o_head = i_head * GROUP + o_r % GROUP
    p_q = query_ptr + i_row * query_stride + o_head[:, None] * HEAD_DIM + o_d[None, :]
    b_q = tl.load(p_q, mask=m_r[:, None], other=0.0)
    depth = 0
    if exits_ptr is not None:
        depth = tl.load(depths_ptr + i_row)
        exits_ptr += row * exits_stride
    b_top, b_total, b_acc = _segment(
        b_q, o_position, first, last, i_segment, scale,
        pool_ptr + i_head * HEAD_STRIDE, table_ptr + row * table_stride, plane_stride, exits_ptr, depth,
        HEAD_DIM, BLOCK_TOKENS, TOKEN_STRIDE, VALUE_OFFSET, GRANULE, WINDOW, SEGMENT, TILE, ROWS,
    )  # fmt: skip
    o_slot = (i_row * segments + i_segment) * HEADS + o_head
    tl.store(workspace_ptr + o_slot[:, None] * HEAD_DIM + o_d[None, :], b_acc, mask=m_r[:, None])
    tl.store(workspace_ptr + slots * HEAD_DIM + o_slot, b_top, mask=m_r)
    tl.store(workspace_ptr + slots * (HEAD_DIM + 1) + o_slot, b_total, mask=m_r)


@triton.jit(do_not_specialize_on_alignment=_INDICES, do_not_specialize=_STRIDES)
def _decode_merge_kernel(
    rows_ptr, lengths_ptr, workspace_ptr, segments: tl.int64, slots: tl.int64, out_ptr, out_stride: tl.int64,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + i_row)
    if (tl.load(rows_ptr + i_row) < 0) | (length <= 0):
        return
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - WINDOW, 0) // SEGMENT
    o_head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, HEAD_DIM)[None, :]
    m_head = o_head < HEADS
    b_top = tl.full((BLOCK,), float("-inf"), tl.float32)
    b_total = tl.zeros((BLOCK,), tl.float32)
    b_acc = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    for i_segment in range(low, tl.cdiv(length, SEGMENT)):
        o_slot = (i_row * segments + i_segment) * HEADS + o_head
        p_s = workspace_ptr + o_slot[:, None] * HEAD_DIM + o_d
        b_s = tl.load(p_s, mask=m_head[:, None], other=0.0)
        b_top_s = tl.load(workspace_ptr + slots * HEAD_DIM + o_slot, mask=m_head, other=float("-inf"))
        b_total_s = tl.load(workspace_ptr + slots * (HEAD_DIM + 1) + o_slot, mask=m_head, other=0.0)
        b_top, b_total, b_keep, b_add = _merge(b_top, b_total, b_top_s, b_total_s)
        b_acc = b_acc * b_keep[:, None] + b_s * b_add[:, None]
    b_out = _quotient(b_acc, b_total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + i_row * out_stride + o_head[:, None] * HEAD_DIM + o_d, b_out, mask=m_head[:, None])


def decode_attention(
    pool: Tensor, query: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, out: Tensor, workspace: Tensor,
    exits: Tensor | None, depths: Tensor | None, *, layout: Sequence[int], scale: float, window: int,
) -> None:  # fmt: skip
    """Attend from the last position of every row. The workspace holds one partial result per segment and head."""
    where = KVLayout(*layout)
    batch, heads, dim = query.shape
    segments = triton.cdiv(table.shape[-1] * where.block_tokens, SEGMENT)
    slots = batch * segments * heads
    constexprs, launch = _launch(architecture(pool.device), where, heads, window, pool.element_size())
    _decode_segment_kernel[segments, where.kv_heads, batch](
        pool, query, query.stride(0), table, table.stride(0), table.stride(-2), rows, lengths,
        workspace, segments, slots, exits, 0 if exits is None else exits.stride(0), depths, scale * LOG2_E,
        HEADS=heads, **constexprs, **launch,
    )  # fmt: skip
    merge = _merge_constexprs(architecture(pool.device), heads, dim, window)
    _decode_merge_kernel[triton.cdiv(heads, merge["BLOCK"]), batch](
        rows, lengths, workspace, segments, slots, out, out.stride(0), **merge, **_MERGE_OPTIONS
    )


@triton.jit(do_not_specialize_on_alignment=_INDICES, do_not_specialize=_STRIDES)
def _prefill_attention_kernel(
    pool_ptr, query_ptr, query_stride: tl.int64, query_start_ptr,
    table_ptr, table_stride: tl.int64, plane_stride: tl.int64, rows_ptr, lengths_ptr, out_ptr, out_stride: tl.int64,
    exits_ptr, exits_stride: tl.int64, depths_ptr, scale,
    HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    VALUE_OFFSET: tl.constexpr, GRANULE: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    i_head = tl.program_id(1)
    i_sequence = tl.program_id(2).to(tl.int64)
    row = tl.load(rows_ptr + i_sequence).to(tl.int64)
    length = tl.load(lengths_ptr + i_sequence)
    start = tl.load(query_start_ptr + i_sequence)
    begin = length - (tl.load(query_start_ptr + i_sequence + 1) - start)
    low = (begin // TOKENS + tl.program_id(0)) * TOKENS
    if (row < 0) | (low >= length):
        return
    o_r, o_d = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    o_position = low + o_r // GROUP
    m_r = (o_position >= begin) & (o_position < length) & (o_r < TOKENS * GROUP)
    o_head = i_head * GROUP + o_r % GROUP
    o_query = (start + o_position - begin).to(tl.int64)
    p_q = query_ptr + o_query[:, None] * query_stride + o_head[:, None] * HEAD_DIM + o_d[None, :]
    b_q = tl.load(p_q, mask=m_r[:, None], other=0.0)
    last = tl.minimum(low + TOKENS, length) - 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.maximum(low, begin) - WINDOW + 1, 0)
    depth = 0
    if exits_ptr is not None:
        depth = tl.load(depths_ptr + i_sequence)
        exits_ptr += row * exits_stride
    b_top = tl.full((ROWS,), float("-inf"), tl.float32)
    b_total = tl.zeros((ROWS,), tl.float32)
    b_acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for i_segment in range(first // SEGMENT, last // SEGMENT + 1):
        b_top_s, b_total_s, b_acc_s = _segment(
            b_q, o_position, first, last, i_segment, scale,
            pool_ptr + i_head * HEAD_STRIDE, table_ptr + row * table_stride, plane_stride, exits_ptr, depth,
            HEAD_DIM, BLOCK_TOKENS, TOKEN_STRIDE, VALUE_OFFSET, GRANULE, WINDOW, SEGMENT, TILE, ROWS,
        )  # fmt: skip
        b_top, b_total, b_keep, b_add = _merge(b_top, b_total, b_top_s, b_total_s)
        b_acc = b_acc * b_keep[:, None] + b_acc_s * b_add[:, None]
    b_out = _quotient(b_acc, b_total[:, None]).to(out_ptr.dtype.element_ty)
    if FLAT:
        o_out = tl.arange(0, ROWS * HEAD_DIM)
        o_r = o_out // HEAD_DIM
        o_position = low + o_r // GROUP
        m_r = (o_position >= begin) & (o_position < length) & (o_r < TOKENS * GROUP)
        p_out = out_ptr + (start + low - begin).to(tl.int64) * out_stride + i_head * GROUP * HEAD_DIM
        p_out += o_r // GROUP * out_stride + o_r % GROUP * HEAD_DIM + o_out % HEAD_DIM
        tl.store(p_out, tl.reshape(b_out, (ROWS * HEAD_DIM,)), mask=m_r)
    else:
        p_out = out_ptr + o_query[:, None] * out_stride + o_head[:, None] * HEAD_DIM + o_d[None, :]
        tl.store(p_out, b_out, mask=m_r[:, None])


def _flat(arch: str) -> bool:
    """Whether to store outputs as a vector, see `store_tile`. With it ptxas spills for one model or another."""
    return arch.startswith("gfx")


def prefill_attention(
    pool: Tensor, query: Tensor, query_start: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, out: Tensor,
    exits: Tensor | None, depths: Tensor | None, *,
    layout: Sequence[int], max_query: int, scale: float, window: int,
) -> None:  # fmt: skip
    """Attend from the last positions of every sequence, as many as it has queries."""
    where = KVLayout(*layout)
    arch = architecture(pool.device)
    constexprs, launch = _launch(arch, where, query.shape[1], window, pool.element_size())
    tiles = triton.cdiv(max_query, constexprs["TOKENS"]) + 1  # a chunk may begin inside a tile
    _prefill_attention_kernel[tiles, where.kv_heads, rows.shape[0]](
        pool, query, query.stride(0), query_start, table, table.stride(0), table.stride(-2), rows, lengths,
        out, out.stride(0), exits, 0 if exits is None else exits.stride(0), depths, scale * LOG2_E,
        FLAT=_flat(arch), **constexprs, **launch,
    )  # fmt: skip


def _launch(
    arch: str, layout: KVLayout, heads: int, window: int, item: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constexprs and launch options, the same for decode and prefill."""
    tile, warps, stages = constants(_LAUNCH[item], arch)[layout.head_dim]
    group = heads // layout.kv_heads
    tokens = 1 << (ROWS // group).bit_length() - 1  # a power of two, so that no tile straddles segments
    shape = {
        "GROUP": group,
        "TOKENS": tokens,
        "WINDOW": window,
        "SEGMENT": SEGMENT,
        "TILE": tile,
        "ROWS": ROWS,
    }
    fields = layout_constexprs(layout)
    del fields["KV_HEADS"]
    return fields | shape, options(warps=warps, stages=stages)


def _merge_constexprs(arch: str, heads: int, dim: int, window: int) -> dict[str, int]:
    """Constexprs of the merge: as many heads a program as give every lane a 128-bit store of 16-bit outputs."""
    return {
        "HEADS": heads,
        "HEAD_DIM": dim,
        "WINDOW": window,
        "SEGMENT": SEGMENT,
        "BLOCK": max(1, 8 * constants(_MERGE_LANES, arch) // dim),
    }


def compile_cases(arch: str) -> list[CompileCase]:
    """Blocks of 16 and 512 tokens; bytes at 2,048 tokens of context, of one token of one sequence."""
    cases = []
    for name, s in SHAPES.items():
        for tokens, dtype in ((16, "bf16"), (512, "bf16"), (512, "fp32")):
            cases += _cases(arch, name, (s.query_heads, s.kv_heads, s.head_dim), tokens, dtype, exits=False)
    # a looped model, whose tokens exit early
    return cases + _cases(arch, "ouro-1.4b", (16, 16, 128), 16, "bf16", exits=True)


def _cases(
    arch: str, geometry: str, shape: tuple[int, int, int], tokens: int, dtype: str, *, exits: bool
) -> list[CompileCase]:
    """Declare the kernels of one model; the merge, which sees neither blocks nor their dtype, with blocks of 16."""
    heads, kv_heads, dim = shape
    item = 2 if dtype == "bf16" else 4
    context, line, row = 2048, 2.0 * item * kv_heads * dim, 1.0 * item * heads * dim
    partial, read = context / SEGMENT * heads * (dim + 2) * 4, context * line + row
    types = signature(
        p_bf16_16="pool_ptr query_ptr out_ptr", p_fp32_16="workspace_ptr", i64_16="query_stride out_stride",
        p_i32="table_ptr rows_ptr lengths_ptr query_start_ptr exits_ptr depths_ptr",
        i64="table_stride plane_stride exits_stride segments slots", fp32="scale",
    )  # fmt: skip
    types = {n: kind.replace("bf16", dtype) for n, kind in types.items()}
    constexprs, launch = _launch(arch, KVLayout.token_major(kv_heads, dim, tokens, 8192), heads, 0, item)
    if not exits:
        constexprs |= {"exits_ptr": None, "depths_ptr": None}
    variant = f"{tokens}" + (f", {dtype}" if item == 4 else "") + (", exits" if exits else "")
    common = {"geometry": geometry, "signature": types}
    cases = [
        CompileCase(
            kernel=_decode_segment_kernel, variant=variant, constexprs=constexprs | {"HEADS": heads}, options=launch,
            bytes_per_token=read + partial, floor_bytes=read, **common,
        ),
        CompileCase(
            kernel=_prefill_attention_kernel, variant=variant, options=launch, constexprs=constexprs | {"FLAT": _flat(arch)},
            bytes_per_token=read / constexprs["TOKENS"] + row, floor_bytes=2 * row + line, **common,
        ),
    ]  # fmt: skip
    if tokens == 16:
        cases.append(
            CompileCase(
                kernel=_decode_merge_kernel, constexprs=_merge_constexprs(arch, heads, dim, 0), options=_MERGE_OPTIONS,
                bytes_per_token=partial + row, floor_bytes=row, **common,
            )
        )  # fmt: skip
    return cases
