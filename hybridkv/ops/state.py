"""Mamba-2 states through member pages: one-token update, and chunked SSD that is prefill and replay decode in one.

A state `[heads, head_dim, state_dim]` lies in member pages of `heads_per_member` heads each (the last may be used in
part), bf16 or fp32. Source and destination members are separate; a state may be its own destination. An absent source
is a zero state.

`ssd` cuts tokens at absolute multiples of its chunk. The state advances at their ends only, rounded to the pool's
dtype; a token's output comes from the state before its chunk and from the chunk's inputs, the old ones of which the
row's window keeps. So outputs, states and windows depend on the tokens before and on nothing else: not on the batch,
the placement, or how the tokens were cut into calls. Products take operands of x's dtype and sum in fp32. Tokens are
taken back (drafts refused) by going on from an earlier position with the state of its chunk, until the row begins a
later chunk in the same window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybridkv.errors import UsageError
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
from hybridkv.units import PITCH, ssd_window

if TYPE_CHECKING:
    from torch import Tensor

STATES = (torch.bfloat16, torch.float32)


def lone(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one token, as a slice of a wider one has them: any stride between tokens means the same."""
    return tuple(
        t.as_strided(t.shape, (-(-t.stride(0) // PITCH) * PITCH, *t.stride()[1:]))
        if t.dim() > 1 and t.shape[0] <= 1 and t.stride(0) % PITCH
        else t
        for t in tensors
    )


def check_activation(name: str, tensor: Tensor) -> None:
    """Check that tokens lie `PITCH` elements apart, and that what a token has lies packed."""
    require(tensor.stride(0) % PITCH == 0, f"{name}.stride(0)", f"a multiple of {PITCH}", tensor.stride(0))
    if tensor.dim() == 3:
        packed = tensor.shape[1] == 1 or tensor.stride(1) == tensor.shape[2]
        require(packed, f"{name}.stride(1)", tensor.shape[2], tensor.stride(1))


def check_aligned_inputs(**tensors: Tensor) -> None:
    """Check base addresses. For a `check`, since a traced tensor has none."""
    for name, tensor in tensors.items():
        check_base(name, tensor)


def check_size(name: str, size: int) -> None:
    """Check an axis of a state: a power of two that tiles divide."""
    support(16 <= size <= 256 and size & (size - 1) == 0, name, "a power of two from 16 to 256", size)


def check_starts(starts: Tensor, tokens: int, max_tokens: int) -> Tensor | None:
    """Check cumulative tokens where they can be read; return the tokens of every row."""
    if starts.device.type != "cpu":
        return None
    counts = starts[1:] - starts[:-1]
    rising = int(starts[0]) >= 0 and bool((counts >= 0).all()) and int(starts[-1]) <= tokens
    require(rising, "starts", f"rising from 0 to at most {tokens}", starts.tolist())
    if counts.numel():
        require(int(counts.max()) <= max_tokens, "max_tokens", f"at least {int(counts.max())}", max_tokens)
    return counts


def check_members(
    pool: Tensor, src: Tensor, dst: Tensor, heads: int, elements: int, granule: int, heads_per_member: int
) -> None:
    """Check values of member tables: entries inside the pool, destinations apart from each other and from sources.

    `dst` is `[rows, members]` or `[rows, chunk ends, members]`.
    """
    unit = min(heads, heads_per_member) * elements
    check_base("pool", pool)
    check_entries("src_members", src, pool, granule=granule, unit=unit)
    check_entries("dst_members" if dst.dim() == 2 else "boundaries", dst, pool, granule=granule, unit=unit)
    if dst.dim() == 2:
        check_destinations(
            "dst_members", dst, granule=granule, unit=unit, source_name="src_members", source=src
        )
    else:
        check_destinations("boundaries", dst, granule=granule, unit=unit)
        check_boundaries(src, dst, apart=-(-unit // granule))


def check_boundaries(src: Tensor, boundaries: Tensor, *, apart: int) -> None:
    """Check that no row writes what another reads. A row may end in its own source, member by member."""
    if boundaries.device.type != "cpu" or not boundaries.numel():
        return
    rows, ends, members = boundaries.shape
    written, read = boundaries.reshape(-1, 1).long(), src.reshape(1, -1).long()
    own = (
        torch.eye(rows * members, dtype=torch.bool).view(rows, 1, members, -1).expand(rows, ends, members, -1)
    )
    near = ((written - read).abs() < apart) & (written >= 0) & (read >= 0)
    clash = torch.nonzero(near & ~((written == read) & own.reshape(near.shape)))
    if clash.numel():
        i, j = clash[0].tolist()
        pair = f"{int(written[i])} against {int(read[0, j])}"
        raise UsageError(f"boundaries must be disjoint from src_members of other rows, got {pair}")


def check_heads(heads: int, heads_per_member: int, members: int) -> None:
    """Check that the members hold the heads."""
    require(heads_per_member > 0, "heads_per_member", "positive", heads_per_member)
    needed = -(-heads // heads_per_member)
    require(members == needed, "src_members.shape[1]", f"{needed} for {heads} heads", members)


def check_spans(
    windows: Tensor, starts: Tensor, positions: Tensor, boundaries: Tensor, members: int, chunk: int, max_tokens: int
) -> None:  # fmt: skip
    """Check the shapes of what says which tokens each row has, and where its boundary states go."""
    rows, device = len(windows), boundaries.device
    require(max_tokens >= 0, "max_tokens", "at least 0", max_tokens)
    check_table("windows", windows, (rows,), device)
    check_table("starts", starts, (rows + 1,), device)
    check_table("positions", positions, (rows,), device)
    check_table("boundaries", boundaries, (rows, None, members), device)
    ends = (max_tokens + chunk - 1) // chunk
    require(boundaries.shape[1] >= ends, "boundaries.shape[1]", f"at least {ends}", boundaries.shape[1])


def check_windows(windows: Tensor, window_pool: Tensor, granule: int, size: int) -> None:
    """Check values of the window table: inside the pool, and one row each."""
    check_base("window_pool", window_pool)
    check_entries("windows", windows, window_pool, granule=granule, unit=size)
    check_destinations("windows", windows, granule=granule, unit=size)


def _check_layer(
    pool: Tensor, src: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor,
    out: Tensor, granule: int, heads_per_member: int,
) -> None:  # fmt: skip
    check_pool("pool", pool, granule, STATES)
    check_tensor("x", x, (None, None, None), FLOATS, pool.device)
    tokens, heads, head_dim = x.shape
    check_size("x.shape[2]", head_dim)
    check_tensor("B", B, (tokens, None, None), x.dtype, pool.device)
    groups, state_dim = B.shape[1:]
    check_size("B.shape[2]", state_dim)
    support(heads % groups == 0, "B.shape[1]", f"a divisor of {heads} heads", groups)
    check_tensor("C", C, (tokens, groups, state_dim), x.dtype, pool.device)
    check_tensor("dt", dt, (tokens, heads), x.dtype, pool.device)
    for name, constant in (("A", A), ("D", D), ("bias", bias)):
        check_tensor(name, constant, (heads,), torch.float32, pool.device)
    check_tensor("out", out, (tokens, heads, head_dim), FLOATS, pool.device)
    for name, tensor in (("x", x), ("B", B), ("C", C), ("out", out)):
        check_activation(name, tensor)
    check_table("src_members", src, (None, None), pool.device)
    check_heads(heads, heads_per_member, src.shape[1])


def _check_scratch(
    scratch: Tensor | None, pool: Tensor, shape: tuple[int | None, ...], chunk: int, max_tokens: int
) -> None:
    require(scratch is not None or max_tokens <= 1, "scratch", "a tensor for more than one token", None)
    if scratch is not None:
        check_tensor("scratch", scratch, shape, pool.dtype, pool.device)
        ends = (max_tokens + chunk - 1) // chunk
        require(scratch.shape[1] >= ends, "scratch.shape[1]", f"at least {ends}", scratch.shape[1])
        require(scratch.is_contiguous(), "scratch", "contiguous", f"strides {scratch.stride()}")


def _check_update(
    pool: Tensor, src_members: Tensor, dst_members: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor, bias: Tensor, out: Tensor, *, granule: int, heads_per_member: int,
) -> None:  # fmt: skip
    del dt, A, D, bias
    size = x.shape[2] * B.shape[2]
    check_members(pool, src_members, dst_members, x.shape[1], size, granule, heads_per_member)
    check_aligned_inputs(x=x, B=B, C=C, out=out)


def _check_ssd(
    pool: Tensor, src_members: Tensor, boundaries: Tensor, scratch: Tensor | None, window_pool: Tensor, windows: Tensor,
    starts: Tensor, positions: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
    bias: Tensor, out: Tensor,
    *, granule: int, heads_per_member: int, window_granule: int, chunk: int, max_tokens: int,
) -> None:  # fmt: skip
    del dt, A, D, bias, scratch
    size = x.shape[2] * B.shape[2]
    check_members(pool, src_members, boundaries, x.shape[1], size, granule, heads_per_member)
    parts = ssd_window(chunk, x.shape[1], x.shape[2], B.shape[1], B.shape[2], x.element_size())
    check_windows(windows, window_pool, window_granule, parts.size)
    check_starts(starts, len(x), max_tokens)
    if positions.device.type == "cpu" and positions.numel():
        require(int(positions.min()) >= 0, "positions", "at least 0", int(positions.min()))
    check_aligned_inputs(x=x, B=B, C=C, out=out)


_update = register("ssu", "state_update", mutates=["pool", "out"], check=_check_update)
_ssd = register("ssd", "ssd", mutates=["pool", "scratch", "window_pool", "out"], check=_check_ssd)


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
    impl: str = "",
) -> None:
    """Advance every row's state by one token, rounding it to the pool's dtype at each. Arithmetic is fp32.

    A row with an absent destination is inactive: nothing is written, its output included. A state made this way differs
    in bits from one that `ssd` makes.

    Args:
        pool: raw storage of states, mutated, `[elements]`, bf16 or fp32.
        src_members: entries of the row's state, `[rows, members]`, int32; absent is zeros.
        dst_members: entries to write it to, `[rows, members]`, int32; may equal `src_members`.
        x: inputs, `[rows, heads, head_dim]`, float.
        dt: step sizes before bias and softplus, `[rows, heads]`, dtype of `x`.
        A: decay rates, negative, `[heads]`, fp32.
        B: input projections, `[rows, groups, state_dim]`, dtype of `x`.
        C: output projections, `[rows, groups, state_dim]`, dtype of `x`.
        D: skip weights, `[heads]`, fp32.
        bias: of `dt`, `[heads]`, fp32.
        out: mutated, `[rows, heads, head_dim]`, float; x, B, C and out have strides between rows of whole 8 elements.
        granule: elements of `pool` that one entry counts.
        heads_per_member: heads that a member page holds.
        impl: "reference" or "triton"; empty for the device's own.
    """
    x, B, C, out = lone(x, B, C, out)
    _check_layer(pool, src_members, x, dt, A, B, C, D, bias, out, granule, heads_per_member)
    check_table("src_members", src_members, (len(x), None), pool.device)
    check_table("dst_members", dst_members, tuple(src_members.shape), pool.device)
    _update(
        pool, src_members, dst_members, x, dt, A, B, C, D, bias, out,
        granule=granule, heads_per_member=heads_per_member, impl=impl,
    )  # fmt: skip


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
    impl: str = "",
) -> None:
    """Advance every row by its tokens: prefill, one token of replay decode, or any mixture (see the module).

    A row with an absent window or without tokens is inactive: nothing is written, its output included.

    Args:
        pool: raw storage of states, mutated, `[elements]`, bf16 or fp32.
        src_members: the state before the chunk of the row's first token, `[rows, members]`, int32; absent is zeros.
        boundaries: entries for the state after every chunk that the row completes, in order, `[rows, ends, members]`,
            int32 with ends >= ceil(max_tokens / chunk); absent is not kept.
        scratch: room for states that are not kept but read by the row's next chunk, mutated,
            `[rows, ends, heads, head_dim, state_dim]`, dtype of `pool`; None while `max_tokens` is 1.
        window_pool: raw storage of windows, mutated, `[elements]`, dtype of `x`; may share memory with `pool`.
        windows: entry of the row's window, `[rows]`, int32, sized by `hybridkv.units.ssd_window`.
        starts: cumulative tokens, row r has `starts[r]` to `starts[r + 1]`, `[rows + 1]`, int32.
        positions: absolute position of the row's first token, `[rows]`, int32.
        x: inputs, `[tokens, heads, head_dim]`, float.
        dt: step sizes before bias and softplus, `[tokens, heads]`, dtype of `x`.
        A: decay rates, negative, `[heads]`, fp32.
        B: input projections, `[tokens, groups, state_dim]`, dtype of `x`.
        C: output projections, `[tokens, groups, state_dim]`, dtype of `x`.
        D: skip weights, `[heads]`, fp32.
        bias: of `dt`, `[heads]`, fp32.
        out: mutated, `[tokens, heads, head_dim]`, float; token strides of x, B, C, out are whole 8 elements.
        granule: elements of `pool` that one entry counts.
        heads_per_member: heads that a member page holds.
        window_granule: elements of `window_pool` that one entry counts.
        chunk: tokens between roundings of the state: 16, 32, 64 or 128.
        max_tokens: at least the tokens of the longest row; fixes the grid.
        impl: "reference" or "triton"; empty for the device's own.
    """
    x, B, C, out = lone(x, B, C, out)
    _check_layer(pool, src_members, x, dt, A, B, C, D, bias, out, granule, heads_per_member)
    support(chunk in (16, 32, 64, 128), "chunk", "16, 32, 64 or 128", chunk)
    check_table("windows", windows, (len(src_members),), pool.device)
    check_spans(windows, starts, positions, boundaries, src_members.shape[1], chunk, max_tokens)
    check_pool("window_pool", window_pool, window_granule, x.dtype)
    _check_scratch(scratch, pool, (len(src_members), None, *x.shape[1:], B.shape[2]), chunk, max_tokens)
    _ssd(
        pool, src_members, boundaries, scratch, window_pool, windows, starts, positions,
        x, dt, A, B, C, D, bias, out, granule=granule, heads_per_member=heads_per_member,
        window_granule=window_granule, chunk=chunk, max_tokens=max_tokens, impl=impl,
    )  # fmt: skip
