"""Compile small kernels without a GPU and print what was read from them as JSON. Run without TRITON_INTERPRET."""

import dataclasses
import json

import triton
import triton.language as tl

from hybridkv.testing import aot
from hybridkv.triton.common import CompileCase, options, signature


@triton.jit
def scan(weights_ptr, x_ptr, decay_ptr, out_ptr, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A product whose left operand is computed in registers, in a pipelined loop: the shape of a chunk scan."""
    o_m, o_n, o_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for k in range(0, n, K):
        w = tl.load(weights_ptr + o_m[:, None] * n + (k + o_k)[None, :]).to(tl.float32)
        w = w * tl.load(decay_ptr + k + o_k)[None, :]
        x = tl.load(x_ptr + (k + o_k)[:, None] * N + o_n[None, :])
        acc = tl.dot(w.to(x.dtype), x, acc)
    tl.store(out_ptr + o_m[:, None] * N + o_n[None, :], acc)


@triton.jit
def row_sum(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    o_m, o_n = tl.arange(0, M), tl.arange(0, N)
    tl.store(out_ptr + o_m, tl.sum(tl.load(x_ptr + o_m[:, None] * N + o_n[None, :]), 1))


@triton.jit
def _put(out_ptr, b_rows, odd, N: tl.constexpr):
    tl.store(out_ptr + odd + tl.arange(0, N), b_rows)  # at an odd place, for all that is known


@triton.jit
def gather(pool_ptr, table_ptr, out_ptr, odd, T: tl.constexpr, D: tl.constexpr):
    entry = tl.load(table_ptr + tl.arange(0, T)).to(tl.int64)
    b_rows = tl.load(pool_ptr + entry[:, None] * D + tl.arange(0, D)[None, :])
    _put(out_ptr, tl.reshape(b_rows, (T * D,)), odd, T * D)


def case(kernel, types, constexprs, warps=4, stages=1):
    return CompileCase(
        kernel=kernel, geometry="probe", signature=types, constexprs=constexprs,
        options=options(warps=warps, stages=stages), bytes_per_token=0, floor_bytes=0,
    )  # fmt: skip


def main():
    scans = signature(p_fp32_16="weights_ptr decay_ptr out_ptr", p_bf16_16="x_ptr", i32_16="n")
    flat = signature(p_fp32_16="x_ptr out_ptr")
    out = {"assembler": aot.ptxas_for_sm90()}
    for name, m, stages in (("wgmma", 64, 3), ("one stage", 64, 1), ("mma.sync", 32, 3)):
        out[name] = aot.measure(
            case(scan, scans, {"M": m, "N": 64, "K": 32}, stages=stages), "sm_90"
        )._asdict()
    for warps in (4, 8):
        row = aot.measure(case(row_sum, flat, {"M": 4, "N": 256}, warps), "sm_90")
        out[f"sum with {warps} warps"] = row._asdict()
    out["sum in other rows"] = aot.measure(case(row_sum, flat, {"M": 16, "N": 256}), "sm_90")._asdict()
    bare = {name: kind.removesuffix(":16") for name, kind in flat.items()}
    out["unaligned"] = aot.measure(case(row_sum, bare, {"M": 4, "N": 256}), "sm_90")._asdict()
    mixed = signature(p_bf16_16="pool_ptr out_ptr", p_i32_16="table_ptr", i32="odd")
    for target in ("sm_90", "gfx942"):
        row = aot.measure(case(gather, mixed, {"T": 64, "D": 64}), target)
        out[f"mixed on {target}"] = row._asdict()
    wide = case(scan, scans, {"M": 128, "N": 128, "K": 32}, warps=1)  # 512 sums a thread
    out["hoard"] = aot.measure(wide, "sm_90")._asdict()
    print(json.dumps(out))


if __name__ == "__main__":
    assert dataclasses.is_dataclass(CompileCase)
    main()
