"""Causal depthwise convolution whose history lies in packed lines; the reference.

A line is `[width - 1][dim]`, oldest token first, in the dtype of the inputs and therefore exact. It may be cut into
equal pieces (`striped` keeps one in the tail of every member page). Does not know what the channels mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.reference.common import silu
from hybridkv.units import piece_elements


def _read(lines: Tensor, granule: int, entries: list[int], shape: tuple[int, int]) -> Tensor:
    """Gather a line, zeros where a piece is absent."""
    size = shape[0] * shape[1]
    step = piece_elements(size, len(entries), lines.element_size())
    line = lines.new_zeros(size)
    for at, entry in zip(range(0, size, step), entries, strict=False):
        part = line[at : at + step]
        if entry >= 0:
            part.copy_(lines[entry * granule : entry * granule + part.numel()])
    return line.view(shape)


def _write(lines: Tensor, granule: int, entries: list[int], line: Tensor) -> None:
    flat = line.reshape(-1)
    step = piece_elements(flat.numel(), len(entries), lines.element_size())
    for at, entry in zip(range(0, flat.numel(), step), entries, strict=False):
        part = flat[at : at + step]
        if entry >= 0:
            lines[entry * granule : entry * granule + part.numel()] = part


def _convolve(taps: Tensor, weight: Tensor, bias: Tensor | None, activation: bool) -> Tensor:
    """Outputs of the last `len(taps) - width + 1` tokens: fp32 products, taps oldest to newest."""
    width, tokens = len(weight), len(taps) - len(weight) + 1
    total = taps.new_zeros((tokens, taps.shape[1]), dtype=torch.float32)
    if bias is not None:
        total += bias.float()
    for w in range(width):
        total += taps[w : w + tokens].float() * weight[w].float()
    return silu(total) if activation else total


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
) -> None:
    """Advance every row by one token; see `hybridkv.ops.conv_update`."""
    history = (len(weight) - 1, x.shape[1])
    for b, (src, dst) in enumerate(zip(line_src.tolist(), line_dst.tolist(), strict=True)):
        if dst[0] < 0:
            continue
        taps = torch.cat([_read(lines, granule, src, history), x[b : b + 1]])
        out[b] = _convolve(taps, weight, bias, activation)[0].to(out.dtype)
        _write(lines, granule, dst, taps[1:])


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
) -> None:
    """Convolve packed rows of tokens and keep lines at chosen positions; see `hybridkv.ops.conv_prefill`."""
    del max_tokens  # the kernels' grid
    history = (len(weight) - 1, x.shape[1])
    bounds, kept = starts.tolist(), line_dst.tolist()
    for b, (src, at) in enumerate(zip(line_src.tolist(), line_at.tolist(), strict=True)):
        taps = torch.cat([_read(lines, granule, src, history), x[bounds[b] : bounds[b + 1]]])
        if bounds[b + 1] > bounds[b]:
            out[bounds[b] : bounds[b + 1]] = _convolve(taps, weight, bias, activation).to(out.dtype)
        for dst, token in zip(kept[b], at, strict=True):
            _write(lines, granule, dst, taps[token : token + history[0]])
