"""Gated delta rule states through member pages: one-token update, and chunks that are prefill and replay decode in one.

A state `[value_heads, key_dim, value_dim]` lies in member pages of `heads_per_member` heads each, bf16 or fp32. A token
decays it by exp(A * softplus(a + bias)) and replaces what it holds under key k by a share sigmoid(b) of v. Keys and
queries come normalised. Chunks are `hybridkv.units.DELTA_CHUNK` tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybridkv.ops._register import register
from hybridkv.ops._validate import FLOATS, check_pool, check_table, check_tensor, require, support
from hybridkv.ops.state import (
    STATES,
    check_activation,
    check_aligned_inputs,
    check_heads,
    check_members,
    check_size,
    check_spans,
    check_starts,
    check_windows,
    lone,
)
from hybridkv.units import DELTA_CHUNK, delta_window

if TYPE_CHECKING:
    from torch import Tensor


def _check_layer(
    pool: Tensor, src: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor, bias: Tensor,
    out: Tensor, granule: int, heads_per_member: int,
) -> None:  # fmt: skip
    check_pool("pool", pool, granule, STATES)
    check_tensor("k", k, (None, None, None), FLOATS, pool.device)
    tokens, key_heads, key_dim = k.shape
    check_tensor("q", q, (tokens, key_heads, key_dim), k.dtype, pool.device)
    check_tensor("v", v, (tokens, None, None), k.dtype, pool.device)
    heads, value_dim = v.shape[1:]
    check_size("k.shape[2]", key_dim)
    check_size("v.shape[2]", value_dim)
    support(heads % key_heads == 0, "k.shape[1]", f"a divisor of {heads} value heads", key_heads)
    for name, gate in (("a", a), ("b", b)):
        check_tensor(name, gate, (tokens, heads), k.dtype, pool.device)
    for name, constant in (("A", A), ("bias", bias)):
        check_tensor(name, constant, (heads,), torch.float32, pool.device)
    check_tensor("out", out, (tokens, heads, value_dim), FLOATS, pool.device)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        check_activation(name, tensor)
    check_table("src_members", src, (None, None), pool.device)
    check_heads(heads, heads_per_member, src.shape[1])


def _check_update(
    pool: Tensor, src_members: Tensor, dst_members: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    A: Tensor, bias: Tensor, out: Tensor, *, granule: int, heads_per_member: int, scale: float,
) -> None:  # fmt: skip
    del a, b, A, bias, scale
    check_members(
        pool, src_members, dst_members, v.shape[1], k.shape[2] * v.shape[2], granule, heads_per_member
    )
    check_aligned_inputs(q=q, k=k, v=v, out=out)


def _check_rule(
    pool: Tensor, src_members: Tensor, boundaries: Tensor, window_pool: Tensor, windows: Tensor, starts: Tensor,
    positions: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor, bias: Tensor, out: Tensor,
    *, granule: int, heads_per_member: int, window_granule: int, scale: float, max_tokens: int,
) -> None:  # fmt: skip
    del a, b, A, bias, scale
    check_members(
        pool, src_members, boundaries, v.shape[1], k.shape[2] * v.shape[2], granule, heads_per_member
    )
    parts = delta_window(k.shape[1], k.shape[2], v.shape[1], v.shape[2], k.element_size())
    check_windows(windows, window_pool, window_granule, parts.size)
    check_starts(starts, len(k), max_tokens)
    if positions.device.type == "cpu" and positions.numel():
        require(int(positions.min()) >= 0, "positions", "at least 0", int(positions.min()))
    check_aligned_inputs(q=q, k=k, v=v, out=out)


_update = register("delta", "delta_update", mutates=["pool", "out"], check=_check_update)
_rule = register("delta", "delta_rule", mutates=["pool", "window_pool", "out"], check=_check_rule)


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
    impl: str = "",
) -> None:
    """Advance every row's state by one token, rounding it to the pool's dtype at each. Arithmetic is fp32.

    A row with an absent destination is inactive: nothing is written, its output included. A state made this way differs
    in bits from one that `delta_rule` makes.

    Args:
        pool: raw storage of states, mutated, `[elements]`, bf16 or fp32.
        src_members: entries of the row's state, `[rows, members]`, int32; absent is zeros.
        dst_members: entries to write it to, `[rows, members]`, int32; may equal `src_members`.
        q: queries, `[rows, key_heads, key_dim]`, dtype of `k`.
        k: keys, `[rows, key_heads, key_dim]`, float.
        v: values, `[rows, value_heads, value_dim]`, dtype of `k`.
        a: decay gates before bias and softplus, `[rows, value_heads]`, dtype of `k`.
        b: write strengths before the sigmoid, `[rows, value_heads]`, dtype of `k`.
        A: decay rates, negative, `[value_heads]`, fp32.
        bias: of `a`, `[value_heads]`, fp32.
        out: mutated, `[rows, value_heads, value_dim]`, float; q, k, v and out have strides between rows of whole 8
            elements.
        granule: elements of `pool` that one entry counts.
        heads_per_member: heads that a member page holds.
        scale: of the output.
        impl: "reference" or "triton"; empty for the device's own.
    """
    q, k, v, out = lone(q, k, v, out)
    _check_layer(pool, src_members, q, k, v, a, b, A, bias, out, granule, heads_per_member)
    check_table("src_members", src_members, (len(k), None), pool.device)
    check_table("dst_members", dst_members, tuple(src_members.shape), pool.device)
    _update(
        pool, src_members, dst_members, q, k, v, a, b, A, bias, out,
        granule=granule, heads_per_member=heads_per_member, scale=scale, impl=impl,
    )  # fmt: skip


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
    impl: str = "",
) -> None:
    """Advance every row by its tokens: prefill, one token of replay decode, or any mixture in one call.

    The contract is that of `ssd`: chunks lie at absolute multiples of 16, the state advances and is rounded at their
    ends, and the row's window keeps what the unfinished chunk needs, so that bits depend on the tokens before and on
    nothing else. A row with an absent window or without tokens is inactive. A row may end in its own source members.

    Args:
        pool: raw storage of states, mutated, `[elements]`, bf16 or fp32.
        src_members: the state before the chunk of the row's first token, `[rows, members]`, int32; absent is zeros.
        boundaries: entries for the state after every chunk that the row completes, in order, `[rows, ends, members]`,
            int32 with ends >= ceil(max_tokens / 16); absent is not kept.
        window_pool: raw storage of windows, mutated, `[elements]`, dtype of `k`; may share memory with `pool`.
        windows: entry of the row's window, `[rows]`, int32, sized by `hybridkv.units.delta_window`.
        starts: cumulative tokens, row r has `starts[r]` to `starts[r + 1]`, `[rows + 1]`, int32.
        positions: absolute position of the row's first token, `[rows]`, int32.
        q: queries, `[tokens, key_heads, key_dim]`, dtype of `k`.
        k: keys, `[tokens, key_heads, key_dim]`, float.
        v: values, `[tokens, value_heads, value_dim]`, dtype of `k`.
        a: decay gates before bias and softplus, `[tokens, value_heads]`, dtype of `k`.
        b: write strengths before the sigmoid, `[tokens, value_heads]`, dtype of `k`.
        A: decay rates, negative, `[value_heads]`, fp32.
        bias: of `a`, `[value_heads]`, fp32.
        out: mutated, `[tokens, value_heads, value_dim]`, float; q, k, v and out have strides between tokens of whole 8
            elements.
        granule: elements of `pool` that one entry counts.
        heads_per_member: heads that a member page holds.
        window_granule: elements of `window_pool` that one entry counts.
        scale: of the output.
        max_tokens: at least the tokens of the longest row; fixes the grid.
        impl: "reference" or "triton"; empty for the device's own.
    """
    q, k, v, out = lone(q, k, v, out)
    _check_layer(pool, src_members, q, k, v, a, b, A, bias, out, granule, heads_per_member)
    check_table("windows", windows, (len(src_members),), pool.device)
    check_spans(windows, starts, positions, boundaries, src_members.shape[1], DELTA_CHUNK, max_tokens)
    check_pool("window_pool", window_pool, window_granule, k.dtype)
    _rule(
        pool, src_members, boundaries, window_pool, windows, starts, positions, q, k, v, a, b, A, bias, out,
        granule=granule, heads_per_member=heads_per_member, window_granule=window_granule, scale=scale,
        max_tokens=max_tokens, impl=impl,
    )  # fmt: skip
