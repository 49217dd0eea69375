"""Exactness on any device: one result computed along two histories, compared bit by bit.

The property tests draw thousands of small histories on a CPU; these are a handful at the shapes of a model, for a GPU.
Each function returns {what was varied: whether no bit differs}, always of fp32 outputs: rounding hides changed sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hybridkv import ops
from hybridkv.kv_layout import KVLayout
from hybridkv.units import DELTA_CHUNK, delta_window, ssd_window

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BF16 = torch.bfloat16


class Sizes(NamedTuple):
    """What to run: a model's shapes, or small ones where an interpreter runs."""

    kv_heads: int = 2
    group: int = 6
    head_dim: int = 128
    context: int = 1100
    block_tokens: int = 16
    state: tuple[int, int, int] = (24, 128, 256)
    delta: tuple[int, int, int, int] = (16, 128, 32, 128)  # key heads and width, value heads and width
    chunk: int = 64
    chunks: int = 3
    steps: int = 70  # newest tokens that are also computed one by one
    seed: int = 0


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def indices(values: Any, device: torch.device) -> Tensor:
    """Return int32 indices on a device."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def draw(device: torch.device, *shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    """Draw the same normal values on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def attention(device: torch.device, sizes: Sizes) -> dict[str, bool]:
    """Run the last tokens of a sequence at other cuts, in other blocks, among others, and as decode steps."""
    n, heads = sizes.context, sizes.kv_heads * sizes.group
    key, value = (draw(device, n, sizes.kv_heads, sizes.head_dim, seed=sizes.seed + i) for i in (1, 2))
    query = draw(device, n, heads, sizes.head_dim, seed=sizes.seed + 3)

    def place(block_tokens: int, shuffled: bool) -> tuple[Tensor, Tensor, KVLayout]:
        layout = KVLayout.token_major(sizes.kv_heads, sizes.head_dim, block_tokens, 16)
        blocks = -(-n // block_tokens)
        order = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(sizes.seed)).tolist()
        order = order if shuffled else list(range(2 * blocks))
        step = layout.extent // layout.granule
        pool = torch.full((2 * blocks * layout.extent,), float("nan"), dtype=BF16, device=device)
        table = indices([[step * e for e in order[i * blocks : (i + 1) * blocks]] for i in (0, 1)], device)
        for row in (0, 1):  # the second sequence is another's: reversed in time
            positions = torch.arange(n, dtype=torch.int32, device=device)
            k, v = (key, value) if row == 0 else (key.flip(0), value.flip(0))
            ops.write_kv(
                pool, k, v, table, torch.full_like(positions, row), positions, layout=layout, impl="triton"
            )
        return pool, table, layout

    def run(placed: tuple[Tensor, Tensor, KVLayout], begin: int, end: int, mate: bool = False) -> Tensor:
        pool, table, layout = placed
        q = torch.cat([query[:7], query[begin:end]]) if mate else query[begin:end]
        starts = [0, 7, len(q)] if mate else [0, len(q)]
        out = torch.empty(q.shape, dtype=torch.float32, device=device)
        ops.prefill_attention(
            pool, q, indices(starts, device), table, indices([1, 0] if mate else [0], device),
            indices([n // 2, end] if mate else [end], device), out,
            layout=layout, max_query=max(7, end - begin), impl="triton",
        )  # fmt: skip
        return out[7:] if mate else out

    def decode(placed: tuple[Tensor, Tensor, KVLayout], length: int) -> Tensor:
        pool, table, layout = placed
        q = torch.stack([query[length - 1], query[0]])
        out = torch.empty(q.shape, dtype=torch.float32, device=device)
        workspace = torch.empty(ops.decode_workspace(2, heads, table, layout), device=device)
        ops.decode_attention(
            pool, q, table, indices([0, 1], device), indices([length, n // 3], device), out, workspace,
            layout=layout, impl="triton",
        )  # fmt: skip
        return out[:1]

    plain = place(sizes.block_tokens, shuffled=False)
    moved, large = place(sizes.block_tokens, shuffled=True), place(512, shuffled=True)
    begin = n - sizes.steps
    whole = run(plain, begin, n)
    return {
        "blocks elsewhere": same(whole, run(moved, begin, n)),
        "blocks of 512 tokens": same(whole, run(large, begin, n)),
        "another sequence in the batch": same(whole, run(moved, begin, n, mate=True)),
        "cut after 3": same(whole, torch.cat([run(plain, begin, begin + 3), run(moved, begin + 3, n)])),
        "token by token": same(whole, torch.cat([run(moved, p, p + 1) for p in range(begin, n)])),
        "decode steps": same(whole, torch.cat([decode(moved, p + 1) for p in range(begin, n)])),
    }


class Family(NamedTuple):
    """A recurrent op, the inputs of its tokens, its per-head constants and the size of its window."""

    op: Callable[..., None]
    tokens: dict[str, Tensor]
    constants: dict[str, Any]
    window: int
    chunk: int
    out: tuple[int, int]
    state: int  # elements of all heads
    heads: int


def ssd_family(device: torch.device, sizes: Sizes) -> Family:
    """Mamba-2."""
    heads, rows, columns = sizes.state
    n, seed = sizes.chunk * sizes.chunks, sizes.seed
    return Family(
        op=ops.ssd,
        tokens={
            "x": draw(device, n, heads, rows, seed=seed),
            "dt": draw(device, n, heads, seed=seed + 1),
            "B": draw(device, n, 1, columns, seed=seed + 2),
            "C": draw(device, n, 1, columns, seed=seed + 3),
        },
        constants={
            "A": -draw(device, heads, seed=seed + 4, dtype=torch.float32).abs() - 0.5,
            "D": draw(device, heads, seed=seed + 5, dtype=torch.float32),
            "bias": draw(device, heads, seed=seed + 6, dtype=torch.float32) - 4,
            "chunk": sizes.chunk,
            "scratch": torch.empty(1, sizes.chunks, heads, rows, columns, dtype=BF16, device=device),
        },
        window=ssd_window(sizes.chunk, heads, rows, 1, columns).size,
        chunk=sizes.chunk, out=(heads, rows), state=heads * rows * columns, heads=heads,
    )  # fmt: skip


def delta_family(device: torch.device, sizes: Sizes) -> Family:
    """Gated delta rule."""
    key_heads, key_dim, heads, width = sizes.delta
    n, seed = DELTA_CHUNK * sizes.chunks, sizes.seed
    normal = torch.nn.functional.normalize
    return Family(
        op=ops.delta_rule,
        tokens={
            "q": normal(draw(device, n, key_heads, key_dim, seed=seed).float(), dim=-1).to(BF16),
            "k": normal(draw(device, n, key_heads, key_dim, seed=seed + 1).float(), dim=-1).to(BF16),
            "v": draw(device, n, heads, width, seed=seed + 2),
            "a": draw(device, n, heads, seed=seed + 3),
            "b": draw(device, n, heads, seed=seed + 4),
        },
        constants={
            "A": -draw(device, heads, seed=seed + 5, dtype=torch.float32).abs() - 0.5,
            "bias": draw(device, heads, seed=seed + 6, dtype=torch.float32) - 4,
            "scale": key_dim**-0.5,
        },
        window=delta_window(key_heads, key_dim, heads, width).size,
        chunk=DELTA_CHUNK, out=(heads, width), state=heads * width * key_dim, heads=heads,
    )  # fmt: skip


def history(family: Family, cuts: list[int], members: int, order: int) -> tuple[Tensor, Tensor]:
    """Run tokens [0, cuts[-1]) in calls that end at `cuts`, the state in so many members; outputs and final states."""
    device, n = family.tokens[next(iter(family.tokens))].device, cuts[-1]
    ends = -(-n // family.chunk)
    per_member = -(-family.heads // members)
    size = per_member * (family.state // family.heads)
    places = torch.randperm(ends * members, generator=torch.Generator().manual_seed(order)).tolist()
    pool = torch.full((ends * members * size,), float("nan"), dtype=BF16, device=device)
    kept = [[p * size // 16 for p in places[c * members : (c + 1) * members]] for c in range(ends)]
    window = torch.full((-(-family.window // 16) * 16,), float("nan"), dtype=BF16, device=device)
    out = torch.full((n, *family.out), float("nan"), device=device)
    begin = 0
    for end in cuts:
        first = begin // family.chunk
        absent = [[-1] * members]
        span = max(1, -(-(end - begin) // family.chunk))
        boundaries = (kept[first:] + absent * span)[:span]
        family.op(
            pool,
            indices([kept[first - 1]] if first else absent, device),
            indices([boundaries], device),
            window_pool=window, windows=indices([0], device), starts=indices([0, end - begin], device),
            positions=indices([begin], device), out=out[begin:end],
            **{name: tensor[begin:end] for name, tensor in family.tokens.items()}, **family.constants,
            granule=16, heads_per_member=per_member, window_granule=16, max_tokens=end - begin, impl="triton",
        )  # fmt: skip
        begin = end
    full = n // family.chunk
    states = torch.empty(full, family.state, dtype=BF16, device=device)
    ops.gather_units(pool, indices(kept[:full], device), states, granule=16, unit=size, impl="triton")
    return out, states


def recurrent(family: Family, steps: int) -> dict[str, bool]:
    """Run a prompt at other cuts, in other members, and its newest tokens as decode steps."""
    n = len(next(iter(family.tokens.values())))
    whole = history(family, [n], 3, 0)

    def equal(cuts: list[int], members: int, order: int) -> bool:
        return all(same(a, b) for a, b in zip(whole, history(family, cuts, members, order), strict=True))

    return {
        "again": equal([n], 3, 0),
        "one page, elsewhere": equal([n], 1, 1),
        "cut at a boundary": equal([family.chunk, n], 3, 2),
        "cut inside a chunk": equal([family.chunk + 5, n - 3, n], 3, 3),
        "replay decode": equal(list(range(max(1, n - steps), n + 1)), 3, 4),
    }


def served(device: torch.device, impl: str = "triton", new: int = 8) -> dict[str, bool]:
    """Serve a toy model over every organization, and through host memory; against each request alone."""
    from hybridkv.arena.offload import HostTier
    from hybridkv.testing import toy_hybrid as toy

    prompts = [[7 * k % 61 for k in range(n)] for n in (70, 40, 50)]
    found: dict[str, bool] = {}
    for kind in ("mamba2", "gated_delta_net"):
        weights = toy.Weights(toy.toy_geometry(kind), device=device)

        def engine(name: str, budget: int, weights: toy.Weights = weights) -> toy.ToyEngine:
            o = toy.toy_organization(name, weights.g)
            config = toy.HybridConfig(token_budget=budget, max_running=2, cut_at_boundaries=False)
            return toy.ToyEngine(o, weights, pages={p.name: 60 for p in o.pools}, config=config, impl=impl)

        def run(e: toy.ToyEngine, names: list[int]) -> list[toy.Served]:
            for n in names:
                e.submit(n, prompts[n % len(prompts)], new)
            return [e.run()[n] for n in names]

        def equal(got: toy.Served, want: toy.Served) -> bool:
            return got.tokens == want.tokens and all(same(x, want.logits[p]) for p, x in got.logits.items())

        alone = [run(engine("s0", 256), [n])[0] for n in range(len(prompts))]
        for name in toy.ORGANIZATIONS:
            got = run(engine(name, 25), [0, 1, 2])
            found[f"{kind} served, {name}"] = all(map(equal, got, alone))
        e = engine("s2", 25)
        run(e, [0])
        r, host = e.cache.request("again", prompts[0]), HostTier(e.arena, e.cache, budget_bytes=1 << 20)
        host.store_prefix(r)
        while host.poll():
            pass
        e.cache.clear()
        host.fetch(r)
        while host.poll():
            pass
        e.cache.release(r)
        found[f"{kind} served, from the host"] = equal(run(e, [3])[0], alone[0]) and e.hits[3] == 64
    return found
