"""Selective state update (Mamba-2) through member pages; the reference.

The `update` mode of decoding: the state is read, advanced and written at every token. Nothing is rounded but the state
as it is stored and the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.reference.common import softplus
from hybridkv.reference.recurrent import read_state, write_state


def state_update(
    pool: Tensor,
    src_members: Tensor,
    dst_members: Tensor,
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
) -> None:
    """Advance the state of every row by one token; see `hybridkv.ops.state_update`."""
    (heads, head_dim), state_dim, group = x.shape[1:], B.shape[2], x.shape[1] // B.shape[1]
    for b, (src, dst) in enumerate(zip(src_members.tolist(), dst_members.tolist(), strict=True)):
        if dst[0] < 0:
            continue
        state = read_state(pool, granule, src, heads_per_member, (heads, head_dim, state_dim))
        step, inputs = softplus(dt[b].float() + bias), x[b].float()
        keys, queries = (v[b].float().repeat_interleave(group, 0)[:, None] for v in (B, C))
        state = state * torch.exp(A * step)[:, None, None] + (step[:, None] * inputs)[..., None] * keys
        out[b] = ((state * queries).sum(-1) + inputs * D[:, None]).to(out.dtype)
        write_state(pool, granule, dst, heads_per_member, state)
