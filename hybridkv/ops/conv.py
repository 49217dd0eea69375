"""Causal depthwise convolution with its history in lines. Exact under cuts, batches and placement; graph-safe.

A line holds the last `width - 1` inputs `[width - 1, channels]`, oldest first, as they came: in the dtype of `x`. It
may lie in equal pieces of whole 16 bytes (`hybridkv.units.piece_elements`). An absent source line reads as zeros.
Sources are read before destinations are written, so that a line may be its own destination.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.ops._register import register
from hybridkv.ops._validate import (
    FLOATS,
    check_base,
    check_destinations,
    check_entries,
    check_pool,
    check_table,
    check_tensor,
    require,
    support,
)
from hybridkv.ops.state import check_activation, check_aligned_inputs, check_starts, lone
from hybridkv.units import piece_elements

if TYPE_CHECKING:
    from torch import Tensor

WIDTHS = (2, 3, 4)


def _check_lines(
    lines: Tensor, line_src: Tensor, line_dst: Tensor, x: Tensor, width: int, granule: int
) -> None:
    unit = piece_elements((width - 1) * x.shape[-1], line_src.shape[-1], x.element_size())
    check_base("lines", lines)
    check_entries("line_src", line_src, lines, granule=granule, unit=unit)
    check_entries("line_dst", line_dst, lines, granule=granule, unit=unit)


def _check_update(
    lines: Tensor, line_src: Tensor, line_dst: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor,
    *, granule: int, activation: bool = True,
) -> None:  # fmt: skip
    del activation, bias
    unit = piece_elements((len(weight) - 1) * x.shape[1], line_src.shape[1], x.element_size())
    _check_lines(lines, line_src, line_dst, x, len(weight), granule)
    check_destinations(
        "line_dst", line_dst, granule=granule, unit=unit, source_name="line_src", source=line_src
    )
    check_aligned_inputs(x=x, weight=weight, out=out)


def _check_prefill(
    lines: Tensor, line_src: Tensor, line_dst: Tensor, line_at: Tensor, starts: Tensor, x: Tensor, weight: Tensor,
    bias: Tensor | None, out: Tensor, *, granule: int, max_tokens: int, activation: bool = True,
) -> None:  # fmt: skip
    del activation, bias
    _check_lines(lines, line_src, line_dst, x, len(weight), granule)
    unit = piece_elements((len(weight) - 1) * x.shape[1], line_src.shape[1], x.element_size())
    check_destinations("line_dst", line_dst, granule=granule, unit=unit)
    tokens = check_starts(starts, len(x), max_tokens)
    if tokens is not None and line_at.numel():
        inside = (line_at >= 0) & (line_at <= tokens[:, None])
        kept = line_dst[..., 0] >= 0
        require(bool((inside | ~kept).all()), "line_at", "between 0 and the row's tokens", line_at.tolist())
    check_aligned_inputs(x=x, weight=weight, out=out)


_update = register("conv", "conv_update", mutates=["lines", "out"], check=_check_update)
_prefill = register("conv", "conv_prefill", mutates=["lines", "out"], check=_check_prefill)


def _check_shapes(
    lines: Tensor, line_src: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, granule: int
) -> int:
    check_tensor("x", x, (None, None), FLOATS, lines.device)
    check_activation("x", x)
    check_pool("lines", lines, granule, x.dtype)
    rows, dim = x.shape
    check_tensor("weight", weight, (None, dim), FLOATS, lines.device)
    support(len(weight) in WIDTHS, "weight.shape[0]", f"one of {WIDTHS}", len(weight))
    require(weight.is_contiguous(), "weight", "contiguous", f"strides {weight.stride()}")
    support(dim * x.element_size() % 16 == 0, "x.shape[1]", "a multiple of 16 bytes", dim)
    if bias is not None:
        check_tensor("bias", bias, (dim,), FLOATS, lines.device)
    check_tensor("out", out, (rows, dim), FLOATS, lines.device)
    check_activation("out", out)
    check_table("line_src", line_src, (None, None), lines.device)
    require(line_src.shape[1] > 0, "line_src.shape[1]", "positive", 0)
    return line_src.shape[1]


def conv_update(
    lines: Tensor,
    line_src: Tensor,
    line_dst: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    granule: int,
    activation: bool = True,
    impl: str = "",
) -> None:
    """Advance every row by one token. A row with an absent destination is inactive: its output is left alone.

    Products are fp32, added oldest tap first.

    Args:
        lines: raw storage of lines, mutated, `[elements]`, dtype of `x`.
        line_src: entries of the row's line, `[rows, pieces]`, int32; absent is zeros.
        line_dst: entries to write it to, `[rows, pieces]`, int32; may equal `line_src`.
        x: newest inputs, `[rows, channels]`, float; stride between rows a multiple of 8 elements.
        weight: taps, oldest first, `[width, channels]`, float, contiguous; width 2, 3 or 4.
        bias: `[channels]`, float, or None.
        out: mutated, `[rows, channels]`, float.
        granule: elements of `lines` that one entry counts.
        activation: apply SiLU.
        impl: "reference" or "triton"; empty for the device's own.
    """
    x, out = lone(x, out)
    pieces = _check_shapes(lines, line_src, x, weight, bias, out, granule)
    check_table("line_src", line_src, (len(x), pieces), lines.device)
    check_table("line_dst", line_dst, (len(x), pieces), lines.device)
    _update(
        lines, line_src, line_dst, x, weight, bias, out, granule=granule, activation=activation, impl=impl
    )


def conv_prefill(
    lines: Tensor,
    line_src: Tensor,
    line_dst: Tensor,
    line_at: Tensor,
    starts: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    granule: int,
    max_tokens: int,
    activation: bool = True,
    impl: str = "",
) -> None:
    """Convolve packed rows of tokens, and write the line as it is after chosen numbers of them.

    Any number of tokens, 0 included: a short row's line mixes old and new inputs. Outputs do not depend on the lines
    kept. One of a row's destinations may equal its source.

    Args:
        lines: raw storage of lines, mutated, `[elements]`, dtype of `x`.
        line_src: entries of the line before the row's first token, `[rows, pieces]`, int32; absent is zeros.
        line_dst: entries to write, `[rows, kept, pieces]`, int32; absent is not kept.
        line_at: after how many of the row's tokens, 0 to all, `[rows, kept]`, int32.
        starts: cumulative tokens, row r has `starts[r]` to `starts[r + 1]`, `[rows + 1]`, int32.
        x: inputs, `[tokens, channels]`, float; stride between tokens a multiple of 8 elements.
        weight: taps, oldest first, `[width, channels]`, float, contiguous; width 2, 3 or 4.
        bias: `[channels]`, float, or None.
        out: mutated, `[tokens, channels]`, float.
        granule: elements of `lines` that one entry counts.
        max_tokens: at least the tokens of the longest row; fixes the grid.
        activation: apply SiLU.
        impl: "reference" or "triton"; empty for the device's own.
    """
    x, out = lone(x, out)
    pieces = _check_shapes(lines, line_src, x, weight, bias, out, granule)
    rows = len(line_src)
    check_table("line_dst", line_dst, (rows, None, pieces), lines.device)
    check_table("line_at", line_at, (rows, line_dst.shape[1]), lines.device)
    check_table("starts", starts, (rows + 1,), lines.device)
    require(max_tokens >= 0, "max_tokens", "at least 0", max_tokens)
    _prefill(
        lines, line_src, line_dst, line_at, starts, x, weight, bias, out,
        granule=granule, max_tokens=max_tokens, activation=activation, impl=impl,
    )  # fmt: skip
