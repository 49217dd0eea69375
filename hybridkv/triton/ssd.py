"""Chunked SSD (Mamba-2): prefill, replay decode, and any mixture, by the same compiled functions; the kernels.

A row's tokens are cut at absolute multiples of the chunk L. A piece that is a whole chunk is read where its tokens are;
any other goes through the row's window. Launches, in the order that lets a row end in place and start a new window:

    append   inputs of the first piece -> window           (a move)
    rows     outputs of the first piece <- source members, window or tokens
    fold     source members -> boundary members, one after each whole chunk
    append   inputs of a later, unfinished piece -> window   where a call can hold several pieces
    rows     outputs of the later pieces <- boundary members

Every product runs over all L positions with masked ones zero, at any phase: prefill and decode sum the same terms in
the same instructions. Row tiles are 16 high and aligned to the chunk: mma.sync, never wgmma (rule R7, triton #9433).
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hybridkv.triton.common import (
    PITCH,
    SHAPES,
    CompileCase,
    architecture,
    constants,
    exp,
    options,
    pitches,
    signature,
    softplus,
)  # fmt: skip
from hybridkv.triton.tiles import member, piece, store_tile
from hybridkv.units import ssd_window

# Tiles by bytes of an input. BM x BP outputs from BK of the state's N columns a step; BM x BN of the state.
_ROWS = {
    "default": {
        2: {"BM": 16, "BP": 128, "BK": 64, "warps": 4, "stages": 2},
        4: {"BM": 16, "BP": 64, "BK": 32, "warps": 4, "stages": 1},
    }
}
_FOLD = {
    "default": {
        2: {"BM": 32, "BN": 128, "warps": 4, "stages": 1},
        4: {"BM": 32, "BN": 64, "warps": 4, "stages": 1},
    }
}
# Read as scalars: where they lie must not make another signature, nor may strides.
_SCALARS = (
    "src_ptr", "boundaries_ptr", "windows_ptr", "starts_ptr", "positions_ptr", "dt_ptr", "A_ptr", "D_ptr", "bias_ptr",
)  # fmt: skip
_INTEGERS = (
    "stride_src", "stride_boundaries_row", "stride_boundaries_chunk", "stride_dt", "later", "first_piece", "pieces",
    "pitches_x", "pitches_B", "pitches_C", "pitches_out",
)  # fmt: skip


def _shape(
    heads: int, head_dim: int, groups: int, state_dim: int, chunk: int, itemsize: int, granule: int, per_member: int,
    window_granule: int,
) -> dict[str, int]:  # fmt: skip
    parts = ssd_window(chunk, heads, head_dim, groups, state_dim, itemsize)
    return {
        "H": heads, "P": head_dim, "G": groups, "N": state_dim, "L": chunk, "GRANULE": granule, "HEADS": per_member,
        "WINDOW_GRANULE": window_granule, "AT_B": parts.second, "AT_DT": parts.third,
    }  # fmt: skip


def _append_shape(shape: dict[str, int]) -> dict[str, int]:
    wide, narrow = shape["H"] * shape["P"], shape["G"] * shape["N"]
    return {name: shape[name] for name in ("WINDOW_GRANULE", "L", "H", "AT_B", "AT_DT")} | {
        "HP": wide, "BLOCK_HP": triton.next_power_of_2(wide), "GN": narrow, "BLOCK_GN": triton.next_power_of_2(narrow),
        "BLOCK_H": triton.next_power_of_2(shape["H"]),
    }  # fmt: skip


def _rows_launch(
    head_dim: int, state_dim: int, arch: str, itemsize: int
) -> tuple[dict[str, int], dict[str, Any]]:
    c = constants(_ROWS, arch)[itemsize]
    tiles = {"BM": c["BM"], "BP": min(head_dim, c["BP"]), "BK": min(state_dim, c["BK"])}
    return tiles, options(warps=c["warps"], stages=c["stages"])


def _fold_launch(
    head_dim: int, state_dim: int, arch: str, itemsize: int
) -> tuple[dict[str, int], dict[str, Any]]:
    c = constants(_FOLD, arch)[itemsize]
    tiles = {"BM": min(head_dim, c["BM"]), "BN": min(state_dim, c["BN"])}
    return tiles, options(warps=c["warps"], stages=c["stages"])


@triton.jit(do_not_specialize_on_alignment=_SCALARS, do_not_specialize=_INTEGERS)
def _ssd_append_kernel(
    window_ptr, windows_ptr,
    starts_ptr, positions_ptr,
    x_ptr, pitches_x: tl.int64,
    dt_ptr, stride_dt: tl.int64,
    B_ptr, pitches_B: tl.int64,
    later,
    WINDOW_GRANULE: tl.constexpr, L: tl.constexpr,
    HP: tl.constexpr, BLOCK_HP: tl.constexpr, GN: tl.constexpr, BLOCK_GN: tl.constexpr,
    H: tl.constexpr, BLOCK_H: tl.constexpr, AT_B: tl.constexpr, AT_DT: tl.constexpr,
):  # fmt: skip
    """Copy one token's inputs: of the first piece, or of the unfinished last one if it is a later one."""
    stride_x = pitches_x * PITCH
    stride_B = pitches_B * PITCH
    i_row = tl.program_id(1).to(tl.int64)
    entry = tl.load(windows_ptr + i_row).to(tl.int64)
    phase = tl.load(positions_ptr + i_row) % L
    tokens = tl.load(starts_ptr + i_row + 1) - tl.load(starts_ptr + i_row)
    i_piece = tl.where(later != 0, (phase + tokens) // L, 0)
    origin, lo, hi = piece(starts_ptr, positions_ptr, i_row, i_piece, L)
    at = lo + tl.program_id(0)
    if (entry < 0) | (at >= hi) | ((lo == 0) & (hi == L)) | ((later != 0) & (i_piece == 0)):
        return
    p_window = window_ptr + entry * WINDOW_GRANULE
    o_x = tl.arange(0, BLOCK_HP)
    b_x = tl.load(x_ptr + (origin + at) * stride_x + o_x, mask=o_x < HP)
    tl.store(p_window + at * HP + o_x, b_x, mask=o_x < HP)
    o_B = tl.arange(0, BLOCK_GN)
    b_B = tl.load(B_ptr + (origin + at) * stride_B + o_B, mask=o_B < GN)
    tl.store(p_window + AT_B + at * GN + o_B, b_B, mask=o_B < GN)
    o_h = tl.arange(0, BLOCK_H)
    b_dt = tl.load(dt_ptr + (origin + at) * stride_dt + o_h, mask=o_h < H)
    tl.store(p_window + AT_DT + at * H + o_h, b_dt, mask=o_h < H)


@triton.jit
def _source(
    window_ptr, entry, windowed, origin, i_h, i_g,
    x_ptr, stride_x, dt_ptr, stride_dt, B_ptr, stride_B,
    WINDOW_GRANULE: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    AT_B: tl.constexpr, AT_DT: tl.constexpr,
):  # fmt: skip
    """Return where position 0 of the chunk has its x, dt and B, and their strides from one position to the next."""
    p_window = window_ptr + entry * WINDOW_GRANULE
    p_x = tl.where(windowed, p_window, x_ptr + origin * stride_x) + i_h * P
    p_dt = tl.where(windowed, p_window + AT_DT, dt_ptr + origin * stride_dt) + i_h
    p_B = tl.where(windowed, p_window + AT_B, B_ptr + origin * stride_B) + i_g * N
    return (
        p_x, tl.where(windowed, H * P, stride_x),
        p_dt, tl.where(windowed, H, stride_dt),
        p_B, tl.where(windowed, G * N, stride_B),
    )  # fmt: skip


@triton.jit
def _steps(p_dt, s_dt, m_j, o_j, A, bias):
    """Return step sizes of the chunk's positions, zero where unknown, and the running sum of A * dt.

    The whole chunk at every phase: a scan of the same length is the same tree, so decode repeats prefill's.
    """
    b_dt = softplus(tl.load(p_dt + o_j * s_dt, mask=m_j, other=0.0).to(tl.float32) + bias)
    b_dt = tl.where(m_j, b_dt, 0.0)
    return b_dt, tl.cumsum(b_dt * A, 0)


@triton.jit(do_not_specialize_on_alignment=_SCALARS, do_not_specialize=_INTEGERS)
def _ssd_rows_kernel(
    pool_ptr, src_ptr, stride_src: tl.int64,
    boundaries_ptr, stride_boundaries_row: tl.int64, stride_boundaries_chunk: tl.int64,
    scratch_ptr, stride_scratch: tl.int64,
    window_ptr, windows_ptr,
    starts_ptr, positions_ptr,
    x_ptr, pitches_x: tl.int64,
    dt_ptr, stride_dt: tl.int64,
    A_ptr,
    B_ptr, pitches_B: tl.int64,
    C_ptr, pitches_C: tl.int64,
    D_ptr, bias_ptr,
    out_ptr, pitches_out: tl.int64,
    first_piece, pieces,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    GRANULE: tl.constexpr, HEADS: tl.constexpr, WINDOW_GRANULE: tl.constexpr,
    AT_B: tl.constexpr, AT_DT: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Outputs of positions lo to hi of one piece, from the state before its chunk and positions 0 to hi."""
    stride_x = pitches_x * PITCH
    stride_B = pitches_B * PITCH
    stride_C = pitches_C * PITCH
    stride_out = pitches_out * PITCH
    i_h = tl.program_id(1)
    i_row = (tl.program_id(2) // pieces).to(tl.int64)
    i_piece = first_piece + tl.program_id(2) % pieces
    origin, lo, hi = piece(starts_ptr, positions_ptr, i_row, i_piece, L)
    m0 = (lo // BM + tl.program_id(0) // (P // BP)) * BM
    entry = tl.load(windows_ptr + i_row).to(tl.int64)
    if (entry < 0) | (lo >= hi) | (m0 >= hi):
        return
    i_g = i_h // (H // G)
    p_x, s_x, p_dt, s_dt, p_B, s_B = _source(
        window_ptr, entry, (lo > 0) | (hi < L), origin, i_h, i_g,
        x_ptr, stride_x, dt_ptr, stride_dt, B_ptr, stride_B, WINDOW_GRANULE, H, P, G, N, AT_B, AT_DT,
    )  # fmt: skip
    p_table = tl.where(
        i_piece == 0,
        src_ptr + i_row * stride_src,
        boundaries_ptr + i_row * stride_boundaries_row + (i_piece - 1) * stride_boundaries_chunk,
    )
    o_src, m_src = member(p_table, i_h, GRANULE, HEADS, P * N)
    o_scratch = i_row * stride_scratch + ((i_piece - 1).to(tl.int64) * H + i_h) * (P * N)
    p_state = tl.where(m_src | (i_piece == 0), pool_ptr + o_src, scratch_ptr + o_scratch)
    m_state = m_src | (i_piece > 0)

    o_j = tl.arange(0, L)
    m_j = o_j < hi
    b_dt, b_cs = _steps(p_dt, s_dt, m_j, o_j, tl.load(A_ptr + i_h), tl.load(bias_ptr + i_h))
    o_m = m0 + tl.arange(0, BM)
    m_m = (o_m >= lo) & (o_m < hi)
    b_cs_m = tl.gather(b_cs, o_m, 0)
    p0 = (tl.program_id(0) % (P // BP)) * BP
    o_p = p0 + tl.arange(0, BP)
    o_k = tl.arange(0, BK)
    p_C = C_ptr + (origin + o_m)[:, None] * stride_C + i_g * N + o_k[None, :]
    p_S = p_state + o_p[None, :] * N + o_k[:, None]
    p_b = p_B + o_j[None, :] * s_B + o_k[:, None]

    b_out = tl.zeros((BM, BP), tl.float32)
    b_cb = tl.zeros((BM, L), tl.float32)
    for k in range(0, N, BK):
        b_C = tl.load(p_C + k, mask=m_m[:, None], other=0.0)
        b_S = tl.load(p_S + k, mask=m_state, other=0.0).to(b_C.dtype)
        b_B = tl.load(p_b + k, mask=m_j[None, :], other=0.0)
        b_out = tl.dot(b_C, b_S, b_out, input_precision="ieee")
        b_cb = tl.dot(b_C, b_B, b_cb, input_precision="ieee")
    b_out = b_out * exp(b_cs_m)[:, None]
    b_w = b_cb * exp(tl.minimum(b_cs_m[:, None] - b_cs[None, :], 0.0)) * b_dt[None, :]
    b_w = tl.where((o_m[:, None] >= o_j[None, :]) & m_m[:, None], b_w, 0.0)
    b_x = tl.load(p_x + o_j[:, None] * s_x + o_p[None, :], mask=m_j[:, None], other=0.0)
    b_out = tl.dot(b_w.to(b_x.dtype), b_x, b_out, input_precision="ieee")
    b_x_m = tl.load(p_x + o_m[:, None] * s_x + o_p[None, :], mask=m_m[:, None], other=0.0)
    b_out += b_x_m.to(tl.float32) * tl.load(D_ptr + i_h)
    p_out = out_ptr + (origin + m0) * stride_out + i_h * P + p0
    store_tile(p_out, stride_out, b_out.to(out_ptr.dtype.element_ty), lo - m0, hi - m0, BM, BP)


@triton.jit(do_not_specialize_on_alignment=_SCALARS, do_not_specialize=_INTEGERS)
def _ssd_fold_kernel(
    pool_ptr, src_ptr, stride_src: tl.int64,
    boundaries_ptr, stride_boundaries_row: tl.int64, stride_boundaries_chunk: tl.int64,
    scratch_ptr, stride_scratch: tl.int64,
    window_ptr, windows_ptr,
    starts_ptr, positions_ptr,
    x_ptr, pitches_x: tl.int64,
    dt_ptr, stride_dt: tl.int64,
    A_ptr,
    B_ptr, pitches_B: tl.int64,
    bias_ptr,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    GRANULE: tl.constexpr, HEADS: tl.constexpr, WINDOW_GRANULE: tl.constexpr,
    AT_B: tl.constexpr, AT_DT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Carry a tile of the state over the row's whole chunks, rounded after each to the pool's dtype."""
    stride_x = pitches_x * PITCH
    stride_B = pitches_B * PITCH
    i_h = tl.program_id(1)
    i_row = tl.program_id(2).to(tl.int64)
    phase = tl.load(positions_ptr + i_row) % L
    reach = phase + tl.load(starts_ptr + i_row + 1) - tl.load(starts_ptr + i_row)
    entry = tl.load(windows_ptr + i_row).to(tl.int64)
    if (entry < 0) | (reach < L) | (reach == phase):
        return
    i_g = i_h // (H // G)
    m0 = (tl.program_id(0) // (N // BN)) * BM
    n0 = (tl.program_id(0) % (N // BN)) * BN
    o_m = m0 + tl.arange(0, BM)
    o_n = n0 + tl.arange(0, BN)
    o_state = o_m[:, None] * N + o_n[None, :]
    o_src, m_src = member(src_ptr + i_row * stride_src, i_h, GRANULE, HEADS, P * N)
    b_S = tl.load(pool_ptr + o_src + o_state, mask=m_src, other=0.0).to(tl.float32)
    A = tl.load(A_ptr + i_h)
    bias = tl.load(bias_ptr + i_h)
    o_j = tl.arange(0, L)
    for i_piece in range(reach // L):
        origin, lo, _ = piece(starts_ptr, positions_ptr, i_row, i_piece, L)
        p_x, s_x, p_dt, s_dt, p_B, s_B = _source(
            window_ptr, entry, lo > 0, origin, i_h, i_g,
            x_ptr, stride_x, dt_ptr, stride_dt, B_ptr, stride_B, WINDOW_GRANULE, H, P, G, N, AT_B, AT_DT,
        )  # fmt: skip
        b_dt, b_cs = _steps(p_dt, s_dt, o_j < L, o_j, A, bias)
        last = tl.sum(tl.where(o_j == L - 1, b_cs, 0.0))
        b_decay = exp(tl.minimum(last - b_cs, 0.0)) * b_dt
        b_x = tl.load(p_x + o_j[None, :] * s_x + o_m[:, None])
        b_B = tl.load(p_B + o_j[:, None] * s_B + o_n[None, :])
        b_u = (b_B.to(tl.float32) * b_decay[:, None]).to(b_x.dtype)
        b_new = tl.dot(b_x, b_u, input_precision="ieee")
        b_S = (b_S * exp(last) + b_new).to(pool_ptr.dtype.element_ty).to(tl.float32)
        p_table = boundaries_ptr + i_row * stride_boundaries_row + i_piece * stride_boundaries_chunk
        o_dst, m_dst = member(p_table, i_h, GRANULE, HEADS, P * N)
        o_scratch = i_row * stride_scratch + (i_piece * H + i_h).to(tl.int64) * (P * N)
        p_state = tl.where(m_dst, pool_ptr + o_dst, scratch_ptr + o_scratch)
        if m_dst | (reach > (i_piece + 1) * L):  # kept, or read by the next piece's rows
            store_tile(p_state + m0 * N + n0, N, b_S.to(pool_ptr.dtype.element_ty), 0, BM, BM, BN)


def ssd(
    pool: Tensor, src_members: Tensor, boundaries: Tensor, scratch: Tensor | None, window_pool: Tensor,
    windows: Tensor, starts: Tensor, positions: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor, bias: Tensor, out: Tensor, *, granule: int, heads_per_member: int, window_granule: int,
    chunk: int, max_tokens: int,
) -> None:  # fmt: skip
    """Advance every row by its tokens; see `hybridkv.ops.ssd`."""
    rows, (heads, head_dim), (groups, state_dim) = len(windows), x.shape[1:], B.shape[1:]
    if not rows or not max_tokens:
        return
    arch, size = architecture(x.device), x.element_size()
    shape = _shape(heads, head_dim, groups, state_dim, chunk, size, granule, heads_per_member, window_granule)
    room = pool if scratch is None else scratch  # never read as long as a call has one piece
    spans = (window_pool, windows, starts, positions)
    states = (
        pool, src_members, src_members.stride(0), boundaries, boundaries.stride(0), boundaries.stride(1),
        room, 0 if scratch is None else scratch.stride(0), *spans,
    )  # fmt: skip
    pieces = 1 + (max_tokens + chunk - 2) // chunk  # the most that a row can touch, at the worst phase
    tokens = min(chunk, max_tokens)  # the most of a piece

    def append(later: int) -> None:
        _ssd_append_kernel[(tokens, rows)](
            *spans, x, pitches(x), dt, dt.stride(0), B, pitches(B), later,
            **_append_shape(shape), **options(warps=4),
        )  # fmt: skip

    def outputs(first: int, count: int) -> None:
        tiles, launch = _rows_launch(head_dim, state_dim, arch, size)
        height = min(chunk // tiles["BM"], 1 + triton.cdiv(tokens - 1, tiles["BM"]))
        _ssd_rows_kernel[(height * (head_dim // tiles["BP"]), heads, rows * count)](
            *states, x, pitches(x), dt, dt.stride(0), A, B, pitches(B), C, pitches(C), D, bias, out, pitches(out),
            first, count, **shape, **tiles, **launch,
        )  # fmt: skip

    append(0)
    outputs(0, 1)
    tiles, launch = _fold_launch(head_dim, state_dim, arch, size)
    _ssd_fold_kernel[((head_dim // tiles["BM"]) * (state_dim // tiles["BN"]), heads, rows)](
        *states, x, pitches(x), dt, dt.stride(0), A, B, pitches(B), bias, **shape, **tiles, **launch
    )
    if pieces > 1:
        append(1)
        outputs(1, pieces - 1)


CHUNKS = {"falcon-h1-7b": 64, "granite-4.0-h-micro": 32}  # the largest whose window fits a 512-KiB page


def compile_cases(arch: str) -> list[CompileCase]:
    """Mamba-2 models with S1's member pages at 16-byte granules; bytes of rows are those of a decode step."""
    cases = []
    for name, L in CHUNKS.items():
        s = SHAPES[name]
        H, P, N = s.state
        G, state, row = s.groups, 2.0 * H * P * N, 2.0 * (H * P + s.groups * N + H)
        shape = _shape(H, P, G, N, L, 2, 8, min(H, s.page_bytes // (2 * P * N)), 8)
        spans, tables = (
            "windows_ptr starts_ptr positions_ptr",
            "src_ptr boundaries_ptr windows_ptr starts_ptr positions_ptr",
        )
        tensors = "pool_ptr scratch_ptr window_ptr x_ptr B_ptr"
        strides = "stride_src stride_boundaries_row stride_boundaries_chunk stride_dt pitches_x pitches_B"
        (rows, rows_launch), (fold, fold_launch) = _rows_launch(P, N, arch, 2), _fold_launch(P, N, arch, 2)
        cases += [
            CompileCase(
                kernel=_ssd_append_kernel, geometry=name, options=options(warps=4),
                signature=signature(
                    p_bf16_16="window_ptr x_ptr B_ptr", p_bf16="dt_ptr", p_i32=spans, i64="stride_dt pitches_x pitches_B",
                    i32="later",
                ),
                constexprs=_append_shape(shape), bytes_per_token=2 * row, floor_bytes=2 * row,
            ),
            CompileCase(
                kernel=_ssd_rows_kernel, geometry=name, options=rows_launch, constexprs=shape | rows,
                signature=signature(
                    p_bf16_16=f"{tensors} C_ptr out_ptr", p_bf16="dt_ptr", p_fp32="A_ptr D_ptr bias_ptr", p_i32=tables,
                    i64_16="stride_scratch", i64=f"{strides} pitches_C pitches_out", i32="first_piece pieces",
                ),
                bytes_per_token=state + (L + 1) / 2 * row + 2 * (G * N + H * P),  # half a window on average
                floor_bytes=state + (L + 1) / 2 * row + 2 * (G * N + H * P),
            ),
            CompileCase(
                kernel=_ssd_fold_kernel, geometry=name, per="chunk", options=fold_launch, constexprs=shape | fold,
                signature=signature(
                    p_bf16_16=tensors, p_bf16="dt_ptr", p_fp32="A_ptr bias_ptr", p_i32=tables,
                    i64_16="stride_scratch", i64=strides,
                ),
                bytes_per_token=2 * state + L * 2.0 * H * (P * (N // fold["BN"]) + N * (P // fold["BM"]) + 1),
                floor_bytes=2 * state + L * row,
            ),
        ]  # fmt: skip
    return cases
