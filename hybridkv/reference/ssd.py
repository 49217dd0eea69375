"""Chunked SSD (Mamba-2): prefill, replay decode, and any mixture, by one function; the reference.

A row owns the state at its last chunk boundary and a window with the inputs of the unfinished chunk. Outputs come from
both; the state advances at chunk ends only, rounded to the pool's dtype (rule R3). Every chunk is computed at its full
length with unknown positions zero, so the bits of a position depend on the tokens before it and on nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hybridkv.reference.common import softplus
from hybridkv.reference.recurrent import Piece, pieces, read_state, write_state
from hybridkv.units import ssd_window

if TYPE_CHECKING:
    from collections.abc import Sequence


class Layer(NamedTuple):
    """Per-head constants, each `[heads]` fp32."""

    A: Tensor
    D: Tensor
    bias: Tensor


def _chunk(layer: Layer, state: Tensor, inputs: Sequence[Tensor], hi: int) -> tuple[Tensor, Tensor]:
    """Outputs of all positions of one chunk, and the state after it. `inputs`: x, B, dt, C with zeros where unknown."""
    x, B, dt, C = inputs
    operand, heads = x.dtype, x.shape[1]
    known = torch.arange(len(x), device=x.device) < hi
    step = torch.where(known[:, None], softplus(dt.float() + layer.bias), 0.0).T  # [heads, chunk]
    decay = torch.cumsum(layer.A[:, None] * step, 1)
    xs = x.float().transpose(0, 1)
    keys, queries = (v.float().repeat_interleave(heads // v.shape[1], 1).transpose(0, 1) for v in (B, C))
    between = torch.exp((decay[:, :, None] - decay[:, None]).clamp(max=0.0))
    weights = (queries @ keys.mT * between * step[:, None]).tril().to(operand).float()
    out = queries @ state.to(operand).float().mT * torch.exp(decay)[..., None] + weights @ xs
    out = out + layer.D[:, None, None] * xs
    last = decay[:, -1:]
    carried = (keys * (torch.exp((last - decay).clamp(max=0.0)) * step)[..., None]).to(operand).float()
    return out.transpose(0, 1), state * torch.exp(last)[..., None] + xs.mT @ carried


def _assemble(piece: Piece, window: Tensor, tokens: Tensor, chunk: int) -> Tensor:
    """Inputs of a chunk: from the window below `lo`, from the packed tokens up to `hi`, zeros above."""
    whole = tokens.new_zeros((chunk, *tokens.shape[1:]))
    whole[: piece.lo] = window[: piece.lo]
    whole[piece.lo : piece.hi] = tokens[piece.origin + piece.lo : piece.origin + piece.hi]
    return whole


def ssd(
    pool: Tensor,
    src_members: Tensor,
    boundaries: Tensor,
    scratch: Tensor | None,
    window_pool: Tensor,
    windows: Tensor,
    starts: Tensor,
    positions: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    bias: Tensor,
    out: Tensor,
    *,
    granule: int,
    heads_per_member: int,
    window_granule: int,
    chunk: int,
    max_tokens: int,
) -> None:
    """Advance every row by its tokens; see `hybridkv.ops.ssd`."""
    del scratch, max_tokens  # the kernels' room for states that are not kept, and their grid
    (heads, head_dim), (groups, state_dim) = x.shape[1:], B.shape[1:]
    parts = ssd_window(chunk, heads, head_dim, groups, state_dim, x.element_size())
    layer, bounds = Layer(A, D, bias), starts.tolist()
    for b, entry in enumerate(windows.tolist()):
        if entry < 0:
            continue
        unit = window_pool[entry * window_granule : entry * window_granule + parts.size]
        window = (
            unit[: chunk * heads * head_dim].view(chunk, heads, head_dim),
            unit[parts.second : parts.second + chunk * groups * state_dim].view(chunk, groups, state_dim),
            unit[parts.third : parts.third + chunk * heads].view(chunk, heads),
        )
        state = read_state(
            pool, granule, src_members[b].tolist(), heads_per_member, (heads, head_dim, state_dim)
        )
        for piece in pieces(bounds[b], bounds[b + 1], int(positions[b]), chunk):
            _, origin, lo, hi = piece
            inputs = [_assemble(piece, w, v, chunk) for w, v in zip(window, (x, B, dt), strict=True)]
            queries = C.new_zeros((chunk, *C.shape[1:]))
            queries[lo:hi] = C[origin + lo : origin + hi]
            y, after = _chunk(layer, state, [*inputs, queries], hi)
            out[origin + lo : origin + hi] = y[lo:hi].to(out.dtype)
            if lo or hi < chunk:
                for w, v in zip(window, inputs, strict=True):
                    w[lo:hi] = v[lo:hi]
            if hi == chunk:
                state = after.to(pool.dtype).float()
                write_state(pool, granule, boundaries[b, piece.number].tolist(), heads_per_member, state)
