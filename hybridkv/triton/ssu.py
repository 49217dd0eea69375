"""Selective state update (Mamba-2) through member pages; the kernel.

A program owns rows of one head's state, reads them once and writes them once in the same layout, so that source and
destination may be one. Addresses are a scalar and an offset in the tile, and the state is stored before the output:
registers as on contiguous slots (a test compares), and fewer of them than the other way round.
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

# BM x 256 in bf16 is two 128-bit loads a thread at 16 rows and 4 warps; vLLM's default for this state, 4 rows and 8
# warps, has none. Rows are independent: what BM must not change is the layout of the summed axis.
_CONSTANTS = {"default": {"BM": 16, "warps": 4}}


def _shape(
    heads: int, head_dim: int, groups: int, state_dim: int, granule: int, per_member: int
) -> dict[str, Any]:
    return {"P": head_dim, "N": state_dim, "GRANULE": granule, "HEADS": per_member, "GROUP": heads // groups}


# Read as scalars: where they lie must not make another signature, nor may strides.
_SCALARS = ("src_ptr", "dst_ptr", "dt_ptr", "A_ptr", "D_ptr", "bias_ptr")
_STRIDES = ("stride_src", "stride_dst", "stride_dt", "pitches_x", "pitches_B", "pitches_C", "pitches_out")


@triton.jit(do_not_specialize_on_alignment=_SCALARS, do_not_specialize=_STRIDES)
def _state_update_kernel(
    pool_ptr, src_ptr, dst_ptr, stride_src: tl.int64, stride_dst: tl.int64,
    x_ptr, pitches_x: tl.int64,
    dt_ptr, stride_dt: tl.int64,
    A_ptr,
    B_ptr, pitches_B: tl.int64,
    C_ptr, pitches_C: tl.int64,
    D_ptr, bias_ptr,
    out_ptr, pitches_out: tl.int64,
    P: tl.constexpr, N: tl.constexpr, GRANULE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    stride_out = pitches_out * PITCH  # here, the others where they are used: the fewest registers
    i_h = tl.program_id(1)
    i_row = tl.program_id(2).to(tl.int64)
    dst = tl.load(dst_ptr + i_row * stride_dst + i_h // HEADS).to(tl.int64)
    if dst < 0:
        return
    src = tl.load(src_ptr + i_row * stride_src + i_h // HEADS).to(tl.int64)
    o_p = tl.program_id(0) * BM + tl.arange(0, BM)
    o_n = tl.arange(0, N)
    b_x = tl.load(x_ptr + i_row * pitches_x * PITCH + i_h * P + o_p).to(tl.float32)
    o_head = (i_h % HEADS) * (P * N) + tl.program_id(0) * (BM * N)
    o_state = tl.arange(0, BM)[:, None] * N + o_n[None, :]
    b_state = tl.load(pool_ptr + (src * GRANULE + o_head) + o_state, mask=src >= 0, other=0.0).to(tl.float32)
    b_dt = softplus(tl.load(dt_ptr + i_row * stride_dt + i_h).to(tl.float32) + tl.load(bias_ptr + i_h))
    b_B = tl.load(B_ptr + i_row * pitches_B * PITCH + (i_h // GROUP) * N + o_n).to(tl.float32)
    b_C = tl.load(C_ptr + i_row * pitches_C * PITCH + (i_h // GROUP) * N + o_n).to(tl.float32)
    b_state = b_state * exp(tl.load(A_ptr + i_h) * b_dt) + (b_dt * b_x)[:, None] * b_B[None, :]
    b_out = tl.sum(b_state * b_C[None, :], axis=1) + b_x * tl.load(D_ptr + i_h)
    tl.store(pool_ptr + (dst * GRANULE + o_head) + o_state, b_state.to(pool_ptr.dtype.element_ty))
    tl.store(out_ptr + i_row * stride_out + i_h * P + o_p, b_out.to(out_ptr.dtype.element_ty))


def state_update(
    pool: Tensor, src_members: Tensor, dst_members: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor,
    C: Tensor, D: Tensor, bias: Tensor, out: Tensor, *, granule: int, heads_per_member: int,
) -> None:  # fmt: skip
    """Advance the state of every row by one token; see `hybridkv.ops.state_update`."""
    rows, heads, head_dim = x.shape
    groups, state_dim = B.shape[1:]
    if not rows:
        return
    c = constants(_CONSTANTS, architecture(x.device))
    _state_update_kernel[(head_dim // c["BM"], heads, rows)](
        pool, src_members, dst_members, src_members.stride(0), dst_members.stride(0),
        x, pitches(x), dt, dt.stride(0), A, B, pitches(B), C, pitches(C), D, bias, out, pitches(out),
        BM=c["BM"], **_shape(heads, head_dim, groups, state_dim, granule, heads_per_member),
        **options(warps=c["warps"]),
    )  # fmt: skip


def compile_cases(arch: str) -> list[CompileCase]:
    """Mamba-2 models with S1's member pages at 16-byte granules, bf16 and fp32 states."""
    c, cases = constants(_CONSTANTS, arch), []
    for name, s in SHAPES.items():
        if name == "qwen3-next":
            continue
        H, P, N = s.state
        for itemsize, variant in ((2, "bf16"), (4, "fp32")):
            types = {
                "p_bf16_16": "x_ptr B_ptr C_ptr out_ptr", "p_bf16": "dt_ptr", "p_fp32": "A_ptr D_ptr bias_ptr",
                "p_i32": "src_ptr dst_ptr", "i64": " ".join(_STRIDES),
            }  # fmt: skip
            types |= (
                {"p_fp32_16": "pool_ptr"}
                if itemsize == 4
                else {"p_bf16_16": types["p_bf16_16"] + " pool_ptr"}
            )
            moved = 2.0 * (H * P * N * itemsize + 2 * H * P + 2 * s.groups * N + H)
            heads = min(H, s.page_bytes // (P * N * itemsize))
            cases.append(
                CompileCase(
                    kernel=_state_update_kernel, geometry=name, variant=variant, signature=signature(**types),
                    constexprs=_shape(H, P, s.groups, N, 16 // itemsize, heads) | {"BM": c["BM"]},
                    options=options(warps=c["warps"]), bytes_per_token=moved, floor_bytes=moved,
                )
            )  # fmt: skip
    return cases
