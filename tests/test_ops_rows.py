"""Activations as engines have them: slices of the rows of a fused projection give the bits of packed tensors."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from hybridkv import ops
from hybridkv.testing.guard import guard
from tests.recurrent import ABSENT, BF16, FP32, Delta, Ssd, i32, same

Tensor = torch.Tensor
NAN = float("nan")


class Call(NamedTuple):
    """An op, its activations packed (inputs, and an output to fill), and everything else; `pools` are mutated too."""

    op: Callable[..., None]
    inputs: dict[str, Tensor]
    out: Tensor
    pools: dict[str, Tensor]
    rest: dict[str, object]

    def run(self, impl: str, inputs: dict[str, Tensor], out: Tensor) -> list[Tensor]:
        """Return the output and the pools after the call."""
        pools = {name: pool.clone() for name, pool in self.pools.items()}
        with guard(order="shuffle"):
            self.op(**inputs, out=out, **pools, **self.rest, impl=impl)
        return [out, *pools.values()]


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def spans(tokens: int, dtype: torch.dtype, members: list[int]) -> dict:
    """One row from position 5 on; all its states are kept."""
    return {
        "src_members": i32([members[:1]]), "boundaries": i32([[[m] for m in members[1:]]]), "windows": i32([0]),
        "starts": i32([0, tokens]), "positions": i32([5]), "granule": 8, "window_granule": 16 // dtype.itemsize,
        "max_tokens": tokens,
    }  # fmt: skip


def one_token(tokens: int) -> dict:
    """Rows of one token each: the first ends in place, the second comes from nothing."""
    src, dst = [[0], [ABSENT], [256]], [[0], [512], [768]]
    return {"src_members": i32(src[:tokens]), "dst_members": i32(dst[:tokens]), "granule": 8}


def ssd(tokens: int, dtype: torch.dtype) -> Call:
    f = Ssd(heads=2, groups=1, chunk=16, dtype=dtype)
    pools = {
        "pool": random(2**14), "window_pool": random(f.window_size + 64, dtype=dtype),
        "scratch": torch.zeros(1, 2, 2, 16, 64, dtype=BF16),
    }  # fmt: skip
    rest = spans(tokens, dtype, [0, 512, 1024]) | f.constants() | {"heads_per_member": 2, "chunk": 16}
    return Call(ops.ssd, f.tokens(tokens, 0), f.output(tokens), pools, rest)


def state_update(tokens: int, dtype: torch.dtype) -> Call:
    f = Ssd(heads=2, groups=1, dtype=dtype)
    rest = one_token(tokens) | f.constants() | {"heads_per_member": 2}
    return Call(ops.state_update, f.tokens(tokens, 0), f.output(tokens), {"pool": random(2**14)}, rest)


def delta_rule(tokens: int, dtype: torch.dtype) -> Call:
    f = Delta(dtype=dtype)
    pools = {"pool": random(2**14), "window_pool": random(f.window_size + 64, dtype=dtype)}
    rest = spans(tokens, dtype, [0, 512, 1024]) | f.constants() | {"heads_per_member": 3, "scale": 0.5}
    return Call(ops.delta_rule, f.tokens(tokens, 0), f.output(tokens), pools, rest)


def delta_update(tokens: int, dtype: torch.dtype) -> Call:
    f = Delta(dtype=dtype)
    rest = one_token(tokens) | f.constants() | {"heads_per_member": 3, "scale": 0.5}
    return Call(ops.delta_update, f.tokens(tokens, 0), f.output(tokens), {"pool": random(2**14)}, rest)


def conv(tokens: int, dtype: torch.dtype) -> tuple[dict, Tensor, dict, dict]:
    rest = {"weight": random(4, 48), "bias": random(48), "granule": 8}
    inputs, pools = {"x": random(tokens, 48, dtype=dtype)}, {"lines": random(4096, dtype=dtype)}
    return inputs, torch.full((tokens, 48), NAN), pools, rest


def conv_update(tokens: int, dtype: torch.dtype) -> Call:
    inputs, out, pools, rest = conv(tokens, dtype)
    tables = {"line_src": i32([[0], [ABSENT], [40]][:tokens]), "line_dst": i32([[0], [80], [120]][:tokens])}
    return Call(ops.conv_update, inputs, out, pools, rest | tables)


def conv_prefill(tokens: int, dtype: torch.dtype) -> Call:
    inputs, out, pools, rest = conv(tokens, dtype)
    tables = {
        "line_src": i32([[0]]), "line_dst": i32([[[0], [80]]]), "line_at": i32([[tokens, tokens // 2]]),
        "starts": i32([0, tokens]), "max_tokens": tokens,
    }  # fmt: skip
    return Call(ops.conv_prefill, inputs, out, pools, rest | tables)


OPS = [ssd, state_update, delta_rule, delta_update, conv_update, conv_prefill]
TOKENS = {ssd: 20, state_update: 3, delta_rule: 20, delta_update: 3, conv_update: 3, conv_prefill: 20}


def fused(tensors: dict[str, Tensor], width: Callable[[int], int]) -> tuple[dict[str, Tensor], Tensor]:
    """Slices of rows that are `width` of what they need; and the rows. Gates, which any address does, come last."""
    first = sorted(tensors.items(), key=lambda item: -item[1].dim())
    flat = {name: t.flatten(1) for name, t in first}
    needed, tokens = sum(t.shape[1] for t in flat.values()), len(first[0][1])
    rows = torch.full((tokens + 2, width(needed)), NAN, dtype=first[0][1].dtype)
    at, slices = 0, {}
    for name, t in flat.items():
        part = rows[:tokens, at : at + t.shape[1]]
        part.copy_(t)
        # Not a view of it, which forgets how far apart the rows of one row lie.
        strides = (width(needed), *tensors[name].contiguous().stride()[1:])
        slices[name] = part.as_strided(tensors[name].shape, strides)
        at += t.shape[1]
    return slices, rows


def check(call: Call, impl: str, width: Callable[[int], int]) -> None:
    """Slices give the bits of packed tensors, and what lies around the output stays."""
    packed = {name: t.contiguous() for name, t in call.inputs.items()}
    want = call.run(impl, packed, call.out.clone())
    inputs, _ = fused(packed, width)
    outs, rows = fused({"out": call.out}, width)
    for name, t in (inputs | outs).items():
        assert t.stride(0) % 16
        assert torch.equal(t, packed[name]) if name in packed else t.isnan().all()
    got = call.run(impl, inputs, outs["out"])
    assert not want[0].isnan().any()
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    outs["out"].fill_(NAN)
    assert rows.isnan().all()


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("op", OPS)
def test_slices_of_rows_of_an_odd_multiple_of_8(op, impl, dtype):
    """Falcon-H1-7B's in_proj has 8 x 835 outputs: no engine copies its slices."""
    torch.manual_seed(0)
    check(op(TOKENS[op], dtype), impl, lambda needed: needed + (8 - needed) % 16)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("op", OPS)
def test_one_token_of_rows_of_any_width(op, impl, dtype):
    """Where there is no second token, its distance means nothing, however odd."""
    torch.manual_seed(0)
    check(op(1, dtype), impl, lambda needed: (needed + 35) | 1)
