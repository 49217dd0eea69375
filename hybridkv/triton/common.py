"""What the kernels share: one function per quantity (rule R5), launch constants, and the form of a compile case.

A decode step and a prefill agree in every bit only if both take each exponential, softplus and division from here.
Contraction of a product and a sum into one instruction is off everywhere, since the compiler chooses it per kernel.

A kernel has one signature per dtypes and geometry, whatever batch, length and tables are: what is read as scalars is
never specialized on its alignment, nor are their strides on values (vllm #43009, #52413: a compilation in the middle of
serving). Tokens of the recurrent ops and of the convolution lie whole pitches of 8 elements apart, and a launch passes
how many: the kernel multiplies, which proves 128-bit accesses at every stride by one signature (`tl.multiple_of` on an
argument proves nothing: Triton drops it). Where other ops let rows of data be other than a multiple of 16 elements
apart, they make a second one.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hybridkv import units

PITCH = tl.constexpr(units.PITCH)


def pitches(tensor: torch.Tensor) -> int:
    """Count the pitches between tokens, for an argument `pitches_*`: never specialized, multiplied by PITCH."""
    return tensor.stride(0) // units.PITCH


@triton.jit
def exp(v):
    """e**v in fp32."""
    return tl.exp(v)


@triton.jit
def exp2(v):
    """2**v in fp32."""
    return tl.math.exp2(v)


@triton.jit
def softplus(v):
    """log(1 + e**v) in fp32, good to 1e-7 relative at every v; log(exp(v) + 1) alone is 100 % off below -17."""
    e = tl.exp(v)
    u = 1.0 + e
    return tl.where(v > 20.0, v, tl.where(u == 1.0, e, tl.log(u) * e / (u - 1.0)))


@triton.jit
def sigmoid(v):
    """1 / (1 + e**-v) in fp32."""
    return 1.0 / (1.0 + tl.exp(-v))


@triton.jit
def silu(v):
    """Return v * sigmoid(v) in fp32, with one division."""
    return v / (1.0 + tl.exp(-v))


@functools.cache
def architecture(device: torch.device) -> str:
    """Name the target as the launch tables do: sm_90, gfx942; "cpu" under the interpreter."""
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def constants(table: Mapping[str, Any], arch: str) -> Any:
    """Look up a launch table: constants of the architecture, else those of "default". Never of batch or length (R4)."""
    return table.get(arch, table["default"])


def options(*, warps: int, stages: int = 1) -> dict[str, Any]:
    """Launch options; multiply-add fusion is always off."""
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shapes of one model's layers that kernels are compiled for."""

    query_heads: int
    kv_heads: int
    head_dim: int
    state: tuple[int, int, int]  # heads, head dimension (or values), state (or keys)
    groups: int  # B/C groups, or key heads
    conv_dim: int
    page_bytes: int = 512 * 1024
    conv_width: int = 4


SHAPES = {
    "falcon-h1-7b": Shapes(
        query_heads=12, kv_heads=2, head_dim=128, state=(24, 128, 256), groups=1, conv_dim=3584
    ),
    "granite-4.0-h-micro": Shapes(
        query_heads=32, kv_heads=8, head_dim=64, state=(64, 64, 128), groups=1, conv_dim=4352
    ),
    "qwen3-next": Shapes(
        query_heads=16, kv_heads=2, head_dim=256, state=(32, 128, 128), groups=16, conv_dim=8192
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCase:
    """A kernel as it runs for one model; `python -m hybridkv kernels` compiles it without a GPU.

    `signature` gives the type of every argument that is not a constexpr; ":16" promises divisibility by 16, which a
    launch finds out for itself. Bytes are those of one token (`per`: of one of what it names) and layer.
    """

    kernel: Any
    geometry: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, Any]
    bytes_per_token: float
    floor_bytes: float
    variant: str = ""
    per: str = "token"

    @property
    def name(self) -> str:
        """The kernel's name as the report and the budgets write it."""
        return self.kernel.__name__.strip("_").removesuffix("_kernel") + (
            f"[{self.variant}]" if self.variant else ""
        )


def signature(**types: str) -> dict[str, str]:
    """Invert {type: "names ..."} where a type is written p_bf16_16 for "*bf16:16" and i64_16 for "i64:16"."""
    out = {}
    for code, names in types.items():
        kind = ("*" if code.startswith("p_") else "") + code.removeprefix("p_").replace("_16", ":16")
        out.update(dict.fromkeys(names.split(), kind))
    return out
