"""Gated delta rule (Qwen3-Next): one-token update, and chunked prefill that is also replay decode; the reference.

A head's state is `[key_dim, value_dim]`. A token decays it by exp(g), g = A * softplus(a + bias), then replaces what it
holds under the key: v' = sigmoid(b) * (v - state^T k), state += k v'^T. Inside a chunk every v' is solved from the state
before the chunk and the keys and v' of earlier positions, so a window of k, v' and a lets decode go on where prefill
stopped, with the same bits. The state is rounded to the pool's dtype at every chunk end (rule R3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv.reference.common import sigmoid, softplus
from hybridkv.reference.recurrent import pieces, read_state, write_state
from hybridkv.units import DELTA_CHUNK, delta_window


def delta_update(
    pool: Tensor,
    src_members: Tensor,
    dst_members: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    bias: Tensor,
    out: Tensor,
    *,
    granule: int,
    heads_per_member: int,
    scale: float,
) -> None:
    """Advance the state of every row by one token; see `hybridkv.ops.delta_update`."""
    (heads, value_dim), key_dim, group = v.shape[1:], k.shape[2], v.shape[1] // k.shape[1]
    for i, (src, dst) in enumerate(zip(src_members.tolist(), dst_members.tolist(), strict=True)):
        if dst[0] < 0:
            continue
        state = read_state(pool, granule, src, heads_per_member, (heads, key_dim, value_dim))
        key, query = (t[i].float().repeat_interleave(group, 0)[..., None] for t in (k, q))
        state = state * torch.exp(A * softplus(a[i].float() + bias))[:, None, None]
        change = sigmoid(b[i].float())[:, None] * (v[i].float() - (state * key).sum(1))
        state = state + key * change[:, None]
        out[i] = ((state * query).sum(1) * scale).to(out.dtype)
        write_state(pool, granule, dst, heads_per_member, state)


class _Chunk(NamedTuple):
    """Inputs of one chunk: q, k, v, a, b, zero from `hi` on; below `lo`, v is the window's v'."""

    inputs: tuple[Tensor, ...]
    lo: int
    hi: int


def _solve(c: _Chunk, state: Tensor, A: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and v' of every position of the chunk, and the state after it."""
    q, k, v, a, b = c.inputs
    operand, place, group = k.dtype, torch.arange(len(k), device=k.device), v.shape[1] // k.shape[1]
    known = place < c.hi
    gates = torch.where(known, A[:, None] * softplus(a.float() + bias).T, 0.0)
    decay = torch.cumsum(gates, 1)  # [heads, chunk]
    strength = sigmoid(b.float()).T[..., None]
    keys, queries = (t.float().repeat_interleave(group, 1).transpose(0, 1) for t in (k, q))
    held = state.to(operand).float()  # what the products read
    since = torch.exp(decay)[..., None]
    between = torch.exp((decay[:, :, None] - decay[:, None]).clamp(max=0.0))
    coupling = (keys @ keys.mT * between * strength).tril(-1)
    values = v.float().transpose(0, 1)
    fresh = ((place >= c.lo) & known)[:, None]
    values = torch.where(fresh, strength * (values - since * (keys @ held)), values)
    for j in range(c.hi):
        values[:, j] = values[:, j].to(operand).float()
        later = fresh & (place > j)[:, None]
        values = torch.where(later, values - coupling[:, :, j : j + 1] * values[:, j : j + 1], values)
    weights = (queries @ keys.mT * between).tril().to(operand).float()
    out = (queries @ held * since + weights @ values) * scale
    last = decay[:, -1:]
    carried = (values * torch.exp((last - decay).clamp(max=0.0))[..., None]).to(operand).float()
    return out.transpose(0, 1), values.transpose(0, 1), state * torch.exp(last)[..., None] + keys.mT @ carried


def delta_rule(
    pool: Tensor,
    src_members: Tensor,
    boundaries: Tensor,
    window_pool: Tensor,
    windows: Tensor,
    starts: Tensor,
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    bias: Tensor,
    out: Tensor,
    *,
    granule: int,
    heads_per_member: int,
    window_granule: int,
    scale: float,
    max_tokens: int,
) -> None:
    """Advance every row by its tokens; see `hybridkv.ops.delta_rule`."""
    del max_tokens  # the kernels' grid
    chunk, (key_heads, key_dim), (heads, value_dim) = DELTA_CHUNK, k.shape[1:], v.shape[1:]
    parts = delta_window(key_heads, key_dim, heads, value_dim, k.element_size())
    bounds = starts.tolist()
    for i, entry in enumerate(windows.tolist()):
        if entry < 0:
            continue
        unit = window_pool[entry * window_granule : entry * window_granule + parts.size]
        window = (
            unit[: chunk * key_heads * key_dim].view(chunk, key_heads, key_dim),
            unit[parts.second : parts.second + chunk * heads * value_dim].view(chunk, heads, value_dim),
            unit[parts.third : parts.third + chunk * heads].view(chunk, heads),
        )
        shape = (heads, key_dim, value_dim)
        state = read_state(pool, granule, src_members[i].tolist(), heads_per_member, shape)
        for number, origin, lo, hi in pieces(bounds[i], bounds[i + 1], int(positions[i]), chunk):
            inputs = [t.new_zeros((chunk, *t.shape[1:])) for t in (q, k, v, a, b)]
            for whole, tokens in zip(inputs, (q, k, v, a, b), strict=True):
                whole[lo:hi] = tokens[origin + lo : origin + hi]
            for whole, kept in zip(inputs[1:4], window, strict=True):
                whole[:lo] = kept[:lo]
            y, values, after = _solve(_Chunk(tuple(inputs), lo, hi), state, A, bias, scale)
            out[origin + lo : origin + hi] = y[lo:hi].to(out.dtype)
            if hi == chunk:
                state = after.to(pool.dtype).float()
                write_state(pool, granule, boundaries[i, number].tolist(), heads_per_member, state)
            else:
                for kept, new in zip(window, (inputs[1], values.to(v.dtype), inputs[3]), strict=True):
                    kept[lo:hi] = new[lo:hi]
