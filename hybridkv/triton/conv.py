"""Causal depthwise convolution whose history lies in packed lines; the kernels.

One 1-D layout of channels for loads and stores, all loads of a line before all stores, so that a line may be its own
destination. Prefill computes outputs before it writes lines, in two launches of one stream, for the same reason.
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
    options,
    pitches,
    signature,
    silu,
)  # fmt: skip
from hybridkv.units import piece_elements

# One warp: 8 channels of 2 bytes, one 128-bit access a tap, for each of 64 lanes, or twice for each of 32.
_UPDATE = {"default": {"BLOCK": 512, "warps": 1}}
_PREFILL = {"default": {"BLOCK": 512, "TOKENS": 8, "warps": 1}}
# Where tables lie and how far apart their rows are must not make another signature.
_INDICES = ("src_ptr", "dst_ptr", "at_ptr", "starts_ptr")
_INTEGERS = (
    "stride_src", "stride_dst", "stride_dst_row", "stride_dst_line", "stride_at", "kept", "pitches_x", "pitches_out",
)  # fmt: skip


def _shape(dim: int, width: int, pieces: int, granule: int, itemsize: int) -> dict[str, Any]:
    piece = piece_elements((width - 1) * dim, pieces, itemsize)
    return {"DIM": dim, "W": width, "GRANULE": granule, "PIECES": pieces, "PIECE": piece}


@triton.jit
def _line(
    table_ptr, i_w, o_c, DIM: tl.constexpr, GRANULE: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr
):
    """Return offsets of tap `i_w` of channels `o_c`, and which of them are present."""
    if PIECES == 1:
        entry = tl.load(table_ptr).to(tl.int64)
        return entry * GRANULE + i_w * DIM + o_c, (entry >= 0) & (o_c < DIM)
    flat = i_w * DIM + o_c
    entry = tl.load(table_ptr + flat // PIECE, mask=o_c < DIM, other=-1).to(tl.int64)
    same: tl.constexpr = o_c.shape[0] | DIM | PIECE  # its lowest bit divides all three
    entry = tl.max_constancy(entry, same & -same)  # which AMD's buffer loads forget: 16-bit loads of the line
    return entry * GRANULE + flat % PIECE, entry >= 0


@triton.jit
def _history(
    lines_ptr, table_ptr, i_w, o_c,
    DIM: tl.constexpr, GRANULE: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    o_line, m_line = _line(table_ptr, i_w, o_c, DIM, GRANULE, PIECES, PIECE)
    return tl.load(lines_ptr + o_line, mask=m_line, other=0.0)


@triton.jit
def _convolve(
    b_3, b_2, b_1, b_x, w_ptr, bias_ptr, o_c, DIM: tl.constexpr, W: tl.constexpr, ACTIVATION: tl.constexpr
):
    """One token: fp32 products, taps oldest to newest."""
    m_c = o_c < DIM
    if bias_ptr is not None:
        b_out = tl.load(bias_ptr + o_c, mask=m_c, other=0.0).to(tl.float32)
    else:
        b_out = tl.zeros(o_c.shape, tl.float32)
    if W > 3:
        b_out += b_3.to(tl.float32) * tl.load(w_ptr + o_c, mask=m_c, other=0.0).to(tl.float32)
    if W > 2:
        b_out += b_2.to(tl.float32) * tl.load(w_ptr + (W - 3) * DIM + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_out += b_1.to(tl.float32) * tl.load(w_ptr + (W - 2) * DIM + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_out += b_x.to(tl.float32) * tl.load(w_ptr + (W - 1) * DIM + o_c, mask=m_c, other=0.0).to(tl.float32)
    if ACTIVATION:
        b_out = silu(b_out)
    return b_out


@triton.jit(do_not_specialize_on_alignment=_INDICES, do_not_specialize=_INTEGERS)
def _conv_update_kernel(
    lines_ptr, src_ptr, dst_ptr, stride_src: tl.int64, stride_dst: tl.int64,
    x_ptr, pitches_x: tl.int64,
    w_ptr, bias_ptr,
    out_ptr, pitches_out: tl.int64,
    DIM: tl.constexpr, W: tl.constexpr, GRANULE: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    stride_x = pitches_x * PITCH
    stride_out = pitches_out * PITCH
    i_row = tl.program_id(1).to(tl.int64)
    o_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < DIM
    p_src = src_ptr + i_row * stride_src
    p_dst = dst_ptr + i_row * stride_dst
    if tl.load(p_dst) < 0:
        return
    b_1 = _history(lines_ptr, p_src, W - 2, o_c, DIM, GRANULE, PIECES, PIECE)
    b_2 = _history(lines_ptr, p_src, W - 3, o_c, DIM, GRANULE, PIECES, PIECE) if W > 2 else b_1
    b_3 = _history(lines_ptr, p_src, W - 4, o_c, DIM, GRANULE, PIECES, PIECE) if W > 3 else b_1
    b_x = tl.load(x_ptr + i_row * stride_x + o_c, mask=m_c, other=0.0)
    b_out = _convolve(b_3, b_2, b_1, b_x, w_ptr, bias_ptr, o_c, DIM, W, ACTIVATION)
    if W > 3:
        o_line, m_line = _line(p_dst, W - 4, o_c, DIM, GRANULE, PIECES, PIECE)
        tl.store(lines_ptr + o_line, b_2, mask=m_line)
    if W > 2:
        o_line, m_line = _line(p_dst, W - 3, o_c, DIM, GRANULE, PIECES, PIECE)
        tl.store(lines_ptr + o_line, b_1, mask=m_line)
    o_line, m_line = _line(p_dst, W - 2, o_c, DIM, GRANULE, PIECES, PIECE)
    tl.store(lines_ptr + o_line, b_x, mask=m_line)
    tl.store(out_ptr + i_row * stride_out + o_c, b_out.to(out_ptr.dtype.element_ty), mask=m_c)


def conv_update(
    lines: Tensor, line_src: Tensor, line_dst: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
    out: Tensor, *, granule: int, activation: bool = True,
) -> None:  # fmt: skip
    """Advance every row by one token; see `hybridkv.ops.conv_update`."""
    (rows, dim), width, pieces = x.shape, len(weight), line_src.shape[1]
    if not rows:
        return
    c = constants(_UPDATE, architecture(x.device))
    _conv_update_kernel[(triton.cdiv(dim, c["BLOCK"]), rows)](
        lines, line_src, line_dst, line_src.stride(0), line_dst.stride(0),
        x, pitches(x), weight, bias, out, pitches(out), ACTIVATION=activation, BLOCK=c["BLOCK"],
        **_shape(dim, width, pieces, granule, x.element_size()), **options(warps=c["warps"]),
    )  # fmt: skip


@triton.jit
def _tap(
    lines_ptr, p_src, x_ptr, stride_x, start, token, o_c,
    DIM: tl.constexpr, W: tl.constexpr, GRANULE: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Input of `token`, counted from the row's first one: negative ones lie in the line."""
    i_w = tl.minimum(token, -1) + W - 1
    o_line, m_line = _line(p_src, i_w, o_c, DIM, GRANULE, PIECES, PIECE)
    b_old = tl.load(lines_ptr + o_line, mask=m_line & (token < 0), other=0.0)
    b_new = tl.load(x_ptr + (start + token) * stride_x + o_c, mask=(o_c < DIM) & (token >= 0), other=0.0)
    return tl.where(token < 0, b_old, b_new)


@triton.jit(do_not_specialize_on_alignment=_INDICES, do_not_specialize=_INTEGERS)
def _conv_prefill_kernel(
    lines_ptr, src_ptr, stride_src: tl.int64,
    starts_ptr,
    x_ptr, pitches_x: tl.int64,
    w_ptr, bias_ptr,
    out_ptr, pitches_out: tl.int64,
    DIM: tl.constexpr, W: tl.constexpr, GRANULE: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    stride_x = pitches_x * PITCH
    stride_out = pitches_out * PITCH
    i_row = tl.program_id(1).to(tl.int64)
    start = tl.load(starts_ptr + i_row).to(tl.int64)
    tokens = tl.load(starts_ptr + i_row + 1) - start
    # Tokens are on axis 0 as well, which alone may pass 65,535 programs.
    first = tl.program_id(0) // tl.cdiv(DIM, BLOCK) * TOKENS
    if first >= tokens:
        return
    o_c = tl.program_id(0) % tl.cdiv(DIM, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < DIM
    p_src = src_ptr + i_row * stride_src
    b_1 = _tap(lines_ptr, p_src, x_ptr, stride_x, start, first - 1, o_c, DIM, W, GRANULE, PIECES, PIECE)
    b_2 = b_1
    b_3 = b_1
    if W > 2:
        b_2 = _tap(lines_ptr, p_src, x_ptr, stride_x, start, first - 2, o_c, DIM, W, GRANULE, PIECES, PIECE)
    if W > 3:
        b_3 = _tap(lines_ptr, p_src, x_ptr, stride_x, start, first - 3, o_c, DIM, W, GRANULE, PIECES, PIECE)
    for token in range(first, tl.minimum(first + TOKENS, tokens)):
        b_x = tl.load(x_ptr + (start + token) * stride_x + o_c, mask=m_c, other=0.0)
        b_out = _convolve(b_3, b_2, b_1, b_x, w_ptr, bias_ptr, o_c, DIM, W, ACTIVATION)
        p_out = out_ptr + (start + token) * stride_out + o_c
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_c)
        b_3 = b_2
        b_2 = b_1
        b_1 = b_x


@triton.jit(do_not_specialize_on_alignment=_INDICES, do_not_specialize=_INTEGERS)
def _conv_lines_kernel(
    lines_ptr, src_ptr, stride_src: tl.int64,
    dst_ptr, stride_dst_row: tl.int64, stride_dst_line: tl.int64,
    at_ptr, stride_at: tl.int64, kept,
    starts_ptr,
    x_ptr, pitches_x: tl.int64,
    DIM: tl.constexpr, W: tl.constexpr, GRANULE: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    stride_x = pitches_x * PITCH
    i_row = tl.program_id(1).to(tl.int64)
    start = tl.load(starts_ptr + i_row).to(tl.int64)
    o_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p_src = src_ptr + i_row * stride_src
    p_x = x_ptr + start * stride_x + o_c
    # The whole old line first: one of the destinations may be the source.
    b_0 = _history(lines_ptr, p_src, 0, o_c, DIM, GRANULE, PIECES, PIECE)
    b_1 = _history(lines_ptr, p_src, 1, o_c, DIM, GRANULE, PIECES, PIECE) if W > 2 else b_0
    b_2 = _history(lines_ptr, p_src, 2, o_c, DIM, GRANULE, PIECES, PIECE) if W > 3 else b_0
    for i_line in range(kept):
        at = tl.load(at_ptr + i_row * stride_at + i_line)
        p_dst = dst_ptr + i_row * stride_dst_row + i_line * stride_dst_line
        for i_w in tl.static_range(W - 1):
            token = at - (W - 1) + i_w
            b_new = tl.load(p_x + token * stride_x, mask=(o_c < DIM) & (token >= 0), other=0.0)
            b_old = tl.where(at + i_w == 0, b_0, tl.where(at + i_w == 1, b_1, b_2))
            o_line, m_line = _line(p_dst, i_w, o_c, DIM, GRANULE, PIECES, PIECE)
            tl.store(lines_ptr + o_line, tl.where(token < 0, b_old, b_new), mask=m_line)


def conv_prefill(
    lines: Tensor, line_src: Tensor, line_dst: Tensor, line_at: Tensor, starts: Tensor, x: Tensor,
    weight: Tensor, bias: Tensor | None, out: Tensor, *, granule: int, max_tokens: int, activation: bool = True,
) -> None:  # fmt: skip
    """Convolve packed rows of tokens and keep lines at chosen positions; see `hybridkv.ops.conv_prefill`."""
    dim, width, (rows, kept, pieces) = x.shape[1], len(weight), line_dst.shape
    if not rows:
        return
    c = constants(_PREFILL, architecture(x.device))
    shape = (
        _shape(dim, width, pieces, granule, x.element_size())
        | {"BLOCK": c["BLOCK"]}
        | options(warps=c["warps"])
    )
    blocks = triton.cdiv(dim, c["BLOCK"])
    if max_tokens:
        _conv_prefill_kernel[(blocks * triton.cdiv(max_tokens, c["TOKENS"]), rows)](
            lines, line_src, line_src.stride(0), starts, x, pitches(x), weight, bias, out, pitches(out),
            ACTIVATION=activation, TOKENS=c["TOKENS"], **shape,
        )  # fmt: skip
    if kept:
        _conv_lines_kernel[(blocks, rows)](
            lines, line_src, line_src.stride(0), line_dst, line_dst.stride(0), line_dst.stride(1),
            line_at, line_at.stride(0), kept, starts, x, pitches(x), **shape,
        )  # fmt: skip


def compile_cases(arch: str) -> list[CompileCase]:
    """bf16 lines at 16-byte granules: whole, and ("striped") in three pieces."""
    update, prefill = constants(_UPDATE, arch), constants(_PREFILL, arch)
    tensors = "lines_ptr x_ptr w_ptr bias_ptr out_ptr"
    strides = "stride_src pitches_x pitches_out"
    one = signature(p_bf16_16=tensors, p_i32="src_ptr dst_ptr", i64=f"{strides} stride_dst")
    many = signature(p_bf16_16=tensors, p_i32="src_ptr starts_ptr", i64=strides)
    keep = signature(
        p_bf16_16="lines_ptr x_ptr", p_i32="src_ptr dst_ptr at_ptr starts_ptr", i32="kept",
        i64="pitches_x stride_src stride_dst_row stride_dst_line stride_at",
    )  # fmt: skip
    cases = []
    for name, s in SHAPES.items():
        token, line = 2.0 * s.conv_dim, 2.0 * (s.conv_width - 1) * s.conv_dim
        for pieces, variant in ((1, ""), (3, "striped")):
            shape = _shape(s.conv_dim, s.conv_width, pieces, 8, 2)
            common = {"geometry": name, "variant": variant}
            cases += [
                CompileCase(
                    kernel=_conv_update_kernel, signature=one, options=options(warps=update["warps"]),
                    constexprs=shape | {"BLOCK": update["BLOCK"], "ACTIVATION": True},
                    bytes_per_token=2 * line + 2 * token, floor_bytes=2 * line + 2 * token, **common,
                ),
                CompileCase(
                    kernel=_conv_prefill_kernel, signature=many, options=options(warps=prefill["warps"]),
                    constexprs=shape | {"BLOCK": prefill["BLOCK"], "TOKENS": prefill["TOKENS"], "ACTIVATION": True},
                    bytes_per_token=token * (2 + (s.conv_width - 1) / prefill["TOKENS"]), floor_bytes=2 * token, **common,
                ),
                CompileCase(
                    kernel=_conv_lines_kernel, signature=keep, options=options(warps=prefill["warps"]),
                    constexprs=shape | {"BLOCK": prefill["BLOCK"]}, per="line",
                    bytes_per_token=3 * line, floor_bytes=2 * line, **common,
                ),
            ]  # fmt: skip
    return cases
