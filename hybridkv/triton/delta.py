"""Gated delta rule (Qwen3-Next): one-token update, and chunked prefill that is also replay decode; the kernels.

Chunks are 16 tokens: one tile of a matrix instruction, so that the triangular system of a chunk is solved in registers,
column by column, by the same steps whether its positions arrive at once or one by one. A program keeps its tile of the
state in registers over all chunks of a row and touches no other's, so that source and destination may be one. Tiles are
held transposed, values by keys: 32 rows is mma.sync on every NVIDIA target (rule R7), and the state is an operand
without leaving registers.

A window's rows are read below the row's first position and written from it on; keys and gates go there in a second
launch, since the programs of one key head share them.
"""

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
    sigmoid,
    signature,
    softplus,
)  # fmt: skip
from hybridkv.triton.tiles import member, piece, store_tile
from hybridkv.units import DELTA_CHUNK, delta_window

_UPDATE = {"default": {"BV": 32, "warps": 4}}
_RULE = {"default": {"BV": 32, "warps": 4}}
# Read as scalars: where they lie must not make another signature, nor may strides.
_SCALARS = (
    "src_ptr", "dst_ptr", "boundaries_ptr", "windows_ptr", "starts_ptr", "positions_ptr",
    "a_ptr", "b_ptr", "A_ptr", "bias_ptr",
)  # fmt: skip
_STRIDES = (
    "stride_src", "stride_dst", "stride_boundaries_row", "stride_boundaries_chunk", "stride_a", "stride_b",
    "pitches_q", "pitches_k", "pitches_v", "pitches_out",
)  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_SCALARS, do_not_specialize=_STRIDES)
def _delta_update_kernel(
    pool_ptr, src_ptr, dst_ptr, stride_src: tl.int64, stride_dst: tl.int64,
    q_ptr, pitches_q: tl.int64,
    k_ptr, pitches_k: tl.int64,
    v_ptr, pitches_v: tl.int64,
    a_ptr, stride_a: tl.int64,
    b_ptr, stride_b: tl.int64,
    A_ptr, bias_ptr,
    out_ptr, pitches_out: tl.int64, scale,
    K: tl.constexpr, V: tl.constexpr, GRANULE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    stride_q = pitches_q * PITCH
    stride_k = pitches_k * PITCH
    stride_v = pitches_v * PITCH
    stride_out = pitches_out * PITCH
    i_h = tl.program_id(1)
    i_row = tl.program_id(2).to(tl.int64)
    o_src, m_src = member(src_ptr + i_row * stride_src, i_h, GRANULE, HEADS, K * V)
    o_dst, m_dst = member(dst_ptr + i_row * stride_dst, i_h, GRANULE, HEADS, K * V)
    if not m_dst:
        return
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    o_k = tl.arange(0, K)
    o_state = o_k[:, None] * V + o_v[None, :]
    b_S = tl.load(pool_ptr + o_src + o_state, mask=m_src, other=0.0).to(tl.float32)
    b_g = tl.load(A_ptr + i_h) * softplus(
        tl.load(a_ptr + i_row * stride_a + i_h).to(tl.float32) + tl.load(bias_ptr + i_h)
    )
    b_beta = sigmoid(tl.load(b_ptr + i_row * stride_b + i_h).to(tl.float32))
    b_q = tl.load(q_ptr + i_row * stride_q + (i_h // GROUP) * K + o_k).to(tl.float32)
    b_k = tl.load(k_ptr + i_row * stride_k + (i_h // GROUP) * K + o_k).to(tl.float32)
    b_v = tl.load(v_ptr + i_row * stride_v + i_h * V + o_v).to(tl.float32)
    b_S = b_S * exp(b_g)
    b_v = b_beta * (b_v - tl.sum(b_S * b_k[:, None], axis=0))
    b_S = b_S + b_k[:, None] * b_v[None, :]
    b_out = tl.sum(b_S * b_q[:, None], axis=0) * scale
    tl.store(out_ptr + i_row * stride_out + i_h * V + o_v, b_out.to(out_ptr.dtype.element_ty))
    tl.store(pool_ptr + o_dst + o_state, b_S.to(pool_ptr.dtype.element_ty))


def delta_update(
    pool: Tensor, src_members: Tensor, dst_members: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor,
    b: Tensor, A: Tensor, bias: Tensor, out: Tensor, *, granule: int, heads_per_member: int, scale: float,
) -> None:  # fmt: skip
    """Advance the state of every row by one token; see `hybridkv.ops.delta_update`."""
    (rows, heads, value_dim), (key_heads, key_dim) = v.shape, k.shape[1:]
    if not rows:
        return
    c = constants(_UPDATE, architecture(v.device))
    bv = min(value_dim, c["BV"])
    _delta_update_kernel[(value_dim // bv, heads, rows)](
        pool, src_members, dst_members, src_members.stride(0), dst_members.stride(0),
        q, pitches(q), k, pitches(k), v, pitches(v), a, a.stride(0), b, b.stride(0), A, bias,
        out, pitches(out), scale,
        K=key_dim, V=value_dim, GRANULE=granule, HEADS=heads_per_member, GROUP=heads // key_heads, BV=bv,
        **options(warps=c["warps"]),
    )  # fmt: skip


def _window(
    key_heads: int, key_dim: int, heads: int, value_dim: int, itemsize: int, granule: int
) -> dict[str, int]:
    parts = delta_window(key_heads, key_dim, heads, value_dim, itemsize)
    return {
        "HV": heads,
        "L": DELTA_CHUNK,
        "WINDOW_GRANULE": granule,
        "AT_V": parts.second,
        "AT_A": parts.third,
    }


def _append_shape(key_heads: int, key_dim: int, heads: int, window: dict[str, int]) -> dict[str, int]:
    width = key_heads * key_dim
    return {name: window[name] for name in ("HV", "L", "WINDOW_GRANULE", "AT_A")} | {
        "WIDTH": width, "BLOCK": triton.next_power_of_2(width), "BLOCK_HV": triton.next_power_of_2(heads),
    }  # fmt: skip


@triton.jit
def _inputs(p_fresh, p_window, m_old, m_fresh):
    """Load a tile of inputs: old ones from the window, fresh ones from the tokens, zeros elsewhere."""
    return tl.where(
        m_old, tl.load(p_window, mask=m_old, other=0.0), tl.load(p_fresh, mask=m_fresh, other=0.0)
    )


@triton.jit
def _solve(b_X, b_A, m_fresh, o_r, hi, dtype: tl.constexpr):
    """Substitute forward: column j, rounded to the operands' type once it is final, leaves every later fresh one."""
    for j in range(hi):
        b_xj = tl.sum(tl.where(o_r[None, :] == j, b_X, 0.0), axis=1).to(dtype).to(tl.float32)
        b_aj = tl.sum(tl.where(o_r[:, None] == j, b_A, 0.0), axis=0)
        b_less = b_X - b_xj[:, None] * b_aj[None, :]
        b_X = tl.where(
            (m_fresh & (o_r > j))[None, :], b_less, tl.where(o_r[None, :] == j, b_xj[:, None], b_X)
        )
    return b_X


@triton.jit(do_not_specialize_on_alignment=_SCALARS, do_not_specialize=_STRIDES)
def _delta_rule_kernel(
    pool_ptr, src_ptr, stride_src: tl.int64,
    boundaries_ptr, stride_boundaries_row: tl.int64, stride_boundaries_chunk: tl.int64,
    window_ptr, windows_ptr,
    starts_ptr, positions_ptr,
    q_ptr, pitches_q: tl.int64,
    k_ptr, pitches_k: tl.int64,
    v_ptr, pitches_v: tl.int64,
    a_ptr, stride_a: tl.int64,
    b_ptr, stride_b: tl.int64,
    A_ptr, bias_ptr,
    out_ptr, pitches_out: tl.int64, scale,
    HK: tl.constexpr, K: tl.constexpr, HV: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    GRANULE: tl.constexpr, HEADS: tl.constexpr, WINDOW_GRANULE: tl.constexpr,
    AT_V: tl.constexpr, AT_A: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    stride_q = pitches_q * PITCH
    stride_k = pitches_k * PITCH
    stride_v = pitches_v * PITCH
    stride_out = pitches_out * PITCH
    i_h = tl.program_id(1)
    i_hk = i_h // (HV // HK)
    i_row = tl.program_id(2).to(tl.int64)
    entry = tl.load(windows_ptr + i_row).to(tl.int64)
    phase = tl.load(positions_ptr + i_row) % L
    tokens = tl.load(starts_ptr + i_row + 1) - tl.load(starts_ptr + i_row)
    if (entry < 0) | (tokens <= 0):
        return
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    v0 = tl.program_id(0) * BV
    o_v = v0 + tl.arange(0, BV)
    o_k = tl.arange(0, K)
    o_r = tl.arange(0, L)
    o_state = o_k[None, :] * V + o_v[:, None]
    o_src, m_src = member(src_ptr + i_row * stride_src, i_h, GRANULE, HEADS, K * V)
    b_S = tl.load(pool_ptr + o_src + o_state, mask=m_src, other=0.0)  # carried as stored: half the registers
    A = tl.load(A_ptr + i_h)
    bias = tl.load(bias_ptr + i_h)
    p_window = window_ptr + entry * WINDOW_GRANULE
    p_wk = p_window + i_hk * K + o_r[:, None] * (HK * K) + o_k[None, :]
    p_wv = p_window + AT_V + i_h * V + o_r[None, :] * (HV * V) + o_v[:, None]

    # The operand is carried beside the state: else the compiler carries it unrounded, and spills where that is fp32.
    b_s = b_S.to(dtype)
    for i_piece in range(tl.cdiv(phase + tokens, L)):
        origin, lo, hi = piece(starts_ptr, positions_ptr, i_row, i_piece, L)
        m_old = o_r < lo
        m_fresh = (o_r >= lo) & (o_r < hi)
        o_t = origin + o_r
        p_k = k_ptr + o_t[:, None] * stride_k + i_hk * K + o_k[None, :]
        b_k = _inputs(p_k, p_wk, m_old[:, None], m_fresh[:, None])
        p_v = v_ptr + o_t[None, :] * stride_v + i_h * V + o_v[:, None]
        b_v = _inputs(p_v, p_wv, m_old[None, :], m_fresh[None, :]).to(tl.float32)
        p_q = q_ptr + o_t[None, :] * stride_q + i_hk * K + o_k[:, None]
        b_q = tl.load(p_q, mask=m_fresh[None, :], other=0.0)
        p_a, p_wa = a_ptr + o_t * stride_a + i_h, p_window + AT_A + i_h + o_r * HV
        b_g = A * softplus(_inputs(p_a, p_wa, m_old, m_fresh).to(tl.float32) + bias)
        b_cs = tl.cumsum(tl.where(o_r < hi, b_g, 0.0), 0)
        b_beta = sigmoid(tl.load(b_ptr + o_t * stride_b + i_h, mask=m_fresh, other=0.0).to(tl.float32))

        b_kT = tl.trans(b_k)
        b_between = exp(tl.minimum(b_cs[None, :] - b_cs[:, None], 0.0))  # [earlier, later]
        b_w = tl.dot(b_k, b_q, input_precision="ieee") * b_between
        b_w = tl.where(o_r[:, None] <= o_r[None, :], b_w, 0.0).to(dtype)
        b_out = tl.dot(b_s, b_q, input_precision="ieee") * exp(b_cs)[None, :]
        b_A = tl.dot(b_k, b_kT, input_precision="ieee") * b_between * b_beta[None, :]
        b_A = tl.where(o_r[:, None] < o_r[None, :], b_A, 0.0)
        b_X = b_v - exp(b_cs)[None, :] * tl.dot(b_s, b_kT, input_precision="ieee")
        b_X = tl.where(m_fresh[None, :], b_beta[None, :] * b_X, b_v)
        b_X = _solve(b_X, b_A, m_fresh, o_r, hi, dtype)
        b_out = tl.dot(b_X.to(dtype), b_w, b_out, input_precision="ieee") * scale
        p_out = out_ptr + origin * stride_out + i_h * V + v0
        store_tile(p_out, stride_out, tl.trans(b_out.to(out_ptr.dtype.element_ty)), lo, hi, L, BV)
        if hi == L:
            last = tl.sum(tl.where(o_r == L - 1, b_cs, 0.0))
            b_u = (b_X * exp(tl.minimum(last - b_cs, 0.0))[None, :]).to(dtype)
            b_new = tl.dot(b_u, b_k, input_precision="ieee")
            b_S = (b_S.to(tl.float32) * exp(last) + b_new).to(pool_ptr.dtype.element_ty)
            b_s = b_S.to(dtype)
            p_table = boundaries_ptr + i_row * stride_boundaries_row + i_piece * stride_boundaries_chunk
            o_dst, m_dst = member(p_table, i_h, GRANULE, HEADS, K * V)
            if m_dst:
                store_tile(pool_ptr + o_dst + v0, V, tl.trans(b_S), 0, K, K, BV)
        else:
            tl.debug_barrier()  # a row that ends one chunk and starts the next: its old v' are read above
            store_tile(p_window + AT_V + i_h * V + v0, HV * V, tl.trans(b_X.to(dtype)), lo, hi, L, BV)


@triton.jit(do_not_specialize_on_alignment=_SCALARS, do_not_specialize=_STRIDES)
def _delta_append_kernel(
    window_ptr, windows_ptr,
    starts_ptr, positions_ptr,
    k_ptr, pitches_k: tl.int64,
    a_ptr, stride_a: tl.int64,
    WINDOW_GRANULE: tl.constexpr, L: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    HV: tl.constexpr, BLOCK_HV: tl.constexpr, AT_A: tl.constexpr,
):  # fmt: skip
    """Copy keys and gates of one token of the unfinished last piece."""
    stride_k = pitches_k * PITCH
    i_row = tl.program_id(1).to(tl.int64)
    entry = tl.load(windows_ptr + i_row).to(tl.int64)
    phase = tl.load(positions_ptr + i_row) % L
    tokens = tl.load(starts_ptr + i_row + 1) - tl.load(starts_ptr + i_row)
    origin, lo, hi = piece(starts_ptr, positions_ptr, i_row, (phase + tokens) // L, L)
    at = lo + tl.program_id(0)
    if (entry < 0) | (at >= hi):
        return
    p_window = window_ptr + entry * WINDOW_GRANULE
    o_k = tl.arange(0, BLOCK)
    b_k = tl.load(k_ptr + (origin + at) * stride_k + o_k, mask=o_k < WIDTH)
    tl.store(p_window + at * WIDTH + o_k, b_k, mask=o_k < WIDTH)
    o_h = tl.arange(0, BLOCK_HV)
    b_a = tl.load(a_ptr + (origin + at) * stride_a + o_h, mask=o_h < HV)
    tl.store(p_window + AT_A + at * HV + o_h, b_a, mask=o_h < HV)


def delta_rule(
    pool: Tensor, src_members: Tensor, boundaries: Tensor, window_pool: Tensor, windows: Tensor, starts: Tensor,
    positions: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor, bias: Tensor,
    out: Tensor, *, granule: int, heads_per_member: int, window_granule: int, scale: float, max_tokens: int,
) -> None:  # fmt: skip
    """Advance every row by its tokens; see `hybridkv.ops.delta_rule`."""
    rows, (key_heads, key_dim), (heads, value_dim) = len(windows), k.shape[1:], v.shape[1:]
    if not rows or not max_tokens:
        return
    c = constants(_RULE, architecture(v.device))
    bv, spans = min(value_dim, c["BV"]), (window_pool, windows, starts, positions)
    window = _window(key_heads, key_dim, heads, value_dim, k.element_size(), window_granule)
    _delta_rule_kernel[(value_dim // bv, heads, rows)](
        pool, src_members, src_members.stride(0), boundaries, boundaries.stride(0), boundaries.stride(1),
        *spans, q, pitches(q), k, pitches(k), v, pitches(v), a, a.stride(0), b, b.stride(0), A, bias,
        out, pitches(out), scale,
        HK=key_heads, K=key_dim, V=value_dim, GRANULE=granule, HEADS=heads_per_member, BV=bv, **window,
        **options(warps=c["warps"]),
    )  # fmt: skip
    _delta_append_kernel[(min(DELTA_CHUNK, max_tokens), rows)](
        *spans, k, pitches(k), a, a.stride(0),
        **_append_shape(key_heads, key_dim, heads, window), **options(warps=4),
    )  # fmt: skip


def compile_cases(arch: str) -> list[CompileCase]:
    """Qwen3-Next with S1's member pages at 16-byte granules; bytes of the rule are those of a decode step."""
    update, rule, name = constants(_UPDATE, arch), constants(_RULE, arch), "qwen3-next"
    s, L = SHAPES[name], DELTA_CHUNK
    HV, K, V = s.state
    HK, row, token = (
        s.groups,
        2.0 * (s.groups * K + HV * V + HV),
        2.0 * (2 * s.groups * K + 2 * HV * V + 2 * HV),
    )
    gates = {"p_bf16": "a_ptr b_ptr", "p_fp32": "A_ptr bias_ptr", "fp32": "scale"}
    strides = "stride_src stride_a stride_b pitches_q pitches_k pitches_v pitches_out"
    cases = []
    for itemsize, variant in ((2, "bf16"), (4, "fp32")):
        tensors, state = "q_ptr k_ptr v_ptr out_ptr", HV * K * V * itemsize
        types = {"p_bf16_16": f"{tensors} window_ptr"} | gates
        types |= (
            {"p_fp32_16": "pool_ptr"} if itemsize == 4 else {"p_bf16_16": f"{tensors} window_ptr pool_ptr"}
        )
        heads = min(HV, s.page_bytes // (K * V * itemsize))
        shape = {"K": K, "V": V, "GRANULE": 16 // itemsize, "HEADS": heads}
        one = signature(p_i32="src_ptr dst_ptr", i64=f"{strides} stride_dst", **types)
        many = signature(
            p_i32="src_ptr boundaries_ptr windows_ptr starts_ptr positions_ptr",
            i64=f"{strides} stride_boundaries_row stride_boundaries_chunk", **types,
        )  # fmt: skip
        del one["window_ptr"]
        window = state * (1 + 1 / L) + (L + 1) / 2 * row + token  # the state is written once a chunk
        cases += [
            CompileCase(
                kernel=_delta_update_kernel, geometry=name, variant=variant, signature=one,
                constexprs=shape | {"GROUP": HV // HK, "BV": update["BV"]}, options=options(warps=update["warps"]),
                bytes_per_token=2 * state + token, floor_bytes=2 * state + token,
            ),
            CompileCase(
                kernel=_delta_rule_kernel, geometry=name, variant=variant, signature=many,
                constexprs=shape | _window(HK, K, HV, V, 2, 8) | {"HK": HK, "BV": rule["BV"]},
                options=options(warps=rule["warps"]), bytes_per_token=window, floor_bytes=window,
            ),
        ]  # fmt: skip
    cases.append(
        CompileCase(
            kernel=_delta_append_kernel, geometry=name, options=options(warps=4),
            signature=signature(
                p_bf16_16="window_ptr k_ptr", p_bf16="a_ptr", p_i32="windows_ptr starts_ptr positions_ptr",
                i64="stride_a pitches_k",
            ),
            constexprs=_append_shape(HK, K, HV, _window(HK, K, HV, V, 2, 8)),
            bytes_per_token=4.0 * (HK * K + HV), floor_bytes=4.0 * (HK * K + HV),
        )
    )  # fmt: skip
    return cases
