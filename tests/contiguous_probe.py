"""Compile the paged state update and the same kernel on dense slots; print registers and memory instructions as JSON.

Run without TRITON_INTERPRET. The dense one is what engines do: `state[slot]` of shape `[slots, heads, P, N]`.
"""

import dataclasses
import json
import sys

import triton
import triton.language as tl

from hybridkv.testing import aot
from hybridkv.triton import ssu
from hybridkv.triton.common import PITCH, SHAPES, exp, softplus


@triton.jit
def _dense_update_kernel(
    pool_ptr, src_ptr, dst_ptr, stride_src: tl.int64, stride_dst: tl.int64,
    x_ptr, pitches_x: tl.int64,
    dt_ptr, stride_dt: tl.int64,
    A_ptr,
    B_ptr, pitches_B: tl.int64,
    C_ptr, pitches_C: tl.int64,
    D_ptr, bias_ptr,
    out_ptr, pitches_out: tl.int64,
    P: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    stride_x = pitches_x * PITCH
    stride_B = pitches_B * PITCH
    stride_C = pitches_C * PITCH
    stride_out = pitches_out * PITCH
    i_h = tl.program_id(1)
    i_row = tl.program_id(2).to(tl.int64)
    dst = tl.load(dst_ptr + i_row * stride_dst).to(tl.int64)
    if dst < 0:
        return
    src = tl.load(src_ptr + i_row * stride_src).to(tl.int64)
    o_p = tl.program_id(0) * BM + tl.arange(0, BM)
    o_n = tl.arange(0, N)
    b_x = tl.load(x_ptr + i_row * stride_x + i_h * P + o_p).to(tl.float32)
    o_head = i_h * (P * N) + tl.program_id(0) * (BM * N)
    o_state = tl.arange(0, BM)[:, None] * N + o_n[None, :]
    b_state = tl.load(pool_ptr + (src * (HEADS * P * N) + o_head) + o_state, mask=src >= 0, other=0.0).to(
        tl.float32
    )
    b_dt = softplus(tl.load(dt_ptr + i_row * stride_dt + i_h).to(tl.float32) + tl.load(bias_ptr + i_h))
    b_B = tl.load(B_ptr + i_row * stride_B + (i_h // GROUP) * N + o_n).to(tl.float32)
    b_C = tl.load(C_ptr + i_row * stride_C + (i_h // GROUP) * N + o_n).to(tl.float32)
    b_state = b_state * exp(tl.load(A_ptr + i_h) * b_dt) + (b_dt * b_x)[:, None] * b_B[None, :]
    b_out = tl.sum(b_state * b_C[None, :], axis=1) + b_x * tl.load(D_ptr + i_h)
    tl.store(pool_ptr + (dst * (HEADS * P * N) + o_head) + o_state, b_state.to(pool_ptr.dtype.element_ty))
    tl.store(out_ptr + i_row * stride_out + i_h * P + o_p, b_out.to(out_ptr.dtype.element_ty))


def main(targets):
    out = {}
    for target in targets:
        read = aot._read_nvidia if target.startswith("sm") else aot._read_amd
        for case in ssu.compile_cases(target):
            dense = {k: v for k, v in case.constexprs.items() if k != "GRANULE"}
            dense["HEADS"] = SHAPES[case.geometry].state[0]
            rows = [
                read(aot.compile_case(c, target))
                for c in (case, dataclasses.replace(case, kernel=_dense_update_kernel, constexprs=dense))
            ]
            out[f"{case.name} {case.geometry} {target}"] = [
                {"registers": registers, "spills": spills, "widths": widths,
                 "accesses": sum(widths.values()), "wide": widths.get(16, 0)}
                for registers, spills, widths in rows
            ]  # fmt: skip
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1:])
