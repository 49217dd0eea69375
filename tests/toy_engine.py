"""A toy hybrid model served the whole way: planner, cache, tables, arena, ops. Tokens and logits must not depend on how.

Everything but the ops is computed token by token, so that only what is under test could change bits.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridkv import CachePolicy, HybridCache, ModelGeometry, Organization, ops
from hybridkv.alloc.builders import window_bytes
from hybridkv.alloc.organization import Placement, Pool, StateKind
from hybridkv.arena import Arena, StepTables
from hybridkv.geometry import AttentionSpec, RecurrentKind, RecurrentSpec
from hybridkv.schedule.hybrid import HybridConfig, HybridPlanner

BF16, FP32 = torch.bfloat16, torch.float32
VOCABULARY, WIDTH = 61, 32
ATTENTION, SSM, CONV, WINDOW, LIVE = (StateKind(k) for k in ("attention", "ssm", "conv", "window", "live"))


def toy_geometry(
    kind: str = "mamba2", *, layers: tuple[int, int] = (1, 2), **changes: object
) -> ModelGeometry:
    """Sizes that the ops take: 2 KV heads of 16; 3 heads of 16 by 16."""
    attention, recurrent = layers
    return ModelGeometry(
        name="toy",
        layers=attention + recurrent,
        attention=AttentionSpec(layers=attention, kv_heads=2, key_dim=16, value_dim=16),
        recurrent=RecurrentSpec.derived(
            kind=RecurrentKind(kind), layers=recurrent, state_shape=(3, 16, 16), conv_width=4, groups=1
        ),
        **{"chunk_tokens": 16, **changes},  # type: ignore[arg-type]
    )


ORGANIZATIONS = ("s0", "s1", "s2", "d0", "striped", "nested")


def toy_organization(
    name: str, g: ModelGeometry, *, block_tokens: int = 16, grid_tokens: int = 32
) -> Organization:
    """One of the six around blocks of 16 tokens; three members where states are cut; slots of two sizes."""
    page = 4352 if name == "nested" else 2304
    states = "recurrent" if name == "d0" else "shared"
    ssm, conv = g.ssm_bytes, g.conv_bytes
    kv = {
        "pool": "attention" if name == "d0" else "shared",
        "payload_bytes": g.kv_bytes_per_token * block_tokens,
    }
    members = 3 if name in ("s1", "s2", "striped") else 1
    line: dict[str, object] = {"within": SSM, "offset": -(-ssm // members // 16) * 16}
    line = {"s1": {"pages": 1}, "s2": {"slot_bytes": 576}}.get(name, line)
    places = {
        ATTENTION: Placement(**kv, **({"slot_bytes": 2048} if name == "nested" else {"pages": 1})),
        SSM: Placement(pool=states, payload_bytes=ssm, pages=members),
        CONV: Placement(pool=states, payload_bytes=conv, **line),
        WINDOW: Placement(pool=states, payload_bytes=window_bytes(g), pages=1),
    }
    if g.live_ssm_bytes != ssm:
        places[LIVE] = Placement(pool=states, payload_bytes=g.live_ssm_bytes, pages=max(2, members))
    pools = (Pool(name="shared", page_bytes=page),)
    if name == "d0":
        half = Fraction(1, 2)
        pools = tuple(
            Pool(name=n, page_bytes=b, share=half) for n, b in (("attention", 2048), ("recurrent", page))
        )
    return Organization(
        name=name,
        geometry=g,
        pools=pools,
        placements=places,
        block_tokens=block_tokens,
        grid_tokens=grid_tokens,
    )


class Weights:
    """Random matrices, one set for each layer."""

    def __init__(self, g: ModelGeometry, seed: int = 0) -> None:
        self.g = g
        draw = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=draw) / rows**0.5

        spec = g.recurrent
        self.embedding, self.head = torch.randn(VOCABULARY, WIDTH, generator=draw), matrix(WIDTH, VOCABULARY)
        self.qkv = [matrix(WIDTH, (4 + 2 + 2) * 16) for _ in range(g.attention_layers)]
        self.attended = [matrix(4 * 16, WIDTH) for _ in range(g.attention_layers)]
        extra = spec.rows * (1 if spec.kind is RecurrentKind.MAMBA2 else 2)
        self.inputs = [matrix(WIDTH, spec.conv_dim + extra) for _ in range(spec.layers)]
        self.taps = [matrix(spec.conv_width, spec.conv_dim).to(BF16) for _ in range(spec.layers)]
        self.outputs = [matrix(spec.rows * 16, WIDTH) for _ in range(spec.layers)]
        self.A = -torch.rand(spec.rows, generator=draw) - 0.5
        self.D, self.bias = torch.randn(spec.rows, generator=draw), torch.randn(spec.rows, generator=draw) - 2


def each(x: Tensor, matrix: Tensor) -> Tensor:
    """Row by row: the bits of a row do not depend on the others."""
    rows = [row[None].float() @ matrix for row in x]
    return torch.cat(rows) if rows else x.new_zeros(0, matrix.shape[1], dtype=FP32)


class Served(NamedTuple):
    """What one request produced: sampled tokens, and the logits of every position that was computed."""

    tokens: list[int]
    logits: dict[int, Tensor]


class ToyEngine:
    """One organization, one policy, one impl."""

    def __init__(
        self,
        organization: Organization,
        weights: Weights,
        *,
        pages: dict[str, int],
        decode: str = "replay",
        config: HybridConfig | None = None,
        order: str = "layer_major",
        impl: str = "reference",
        context: int = 512,
        pad: int = 0,
    ) -> None:
        self.weights, self.g, self.impl, self.pad, self.decode = (
            weights,
            organization.geometry,
            impl,
            pad,
            decode,
        )
        self.cache = HybridCache(organization, pages=pages, policy=CachePolicy(decode=decode), check=3)
        self.planner = HybridPlanner(self.cache, config or HybridConfig(token_budget=64, max_running=4))
        self.arena = Arena(organization, pages, order=order, red_zone=64, poison=True)
        budget = self.planner.config.token_budget
        self.tables = StepTables(
            self.arena, self.cache, rows=8 + pad, tokens=budget + pad, context=context, check=2
        )
        self.served: dict[object, Served] = {}
        self.hits: dict[object, int] = {}
        self.idle = 0  # empty steps in a row: a step that preempts everybody is one

    def submit(self, name: object, tokens: list[int], new: int) -> None:
        self.planner.submit(name, tokens, new)
        self.served[name] = Served([], {})

    def run(self) -> dict[object, Served]:
        while self.planner.waiting or self.planner.running:
            self.step()
        assert self.arena.violations() == []
        return self.served

    def step(self) -> None:
        step = self.planner.plan()
        if not len(step.handles):
            self.idle += 1
            assert self.idle < 4, "nothing runs any more"
            return
        self.idle = 0
        requests = [self.cache.at(int(h)) for h in step.handles]
        for r in step.admitted:
            self.hits.setdefault(r.id, r.cached)
        logits = self.forward(step, requests)
        sampled = [int(rows[-1].argmax()) for rows in logits]
        for r, rows, start, samples, token in zip(
            requests, logits, step.start.tolist(), step.samples, sampled, strict=True
        ):
            served = self.served[r.id]
            served.logits.update({start + k: row for k, row in enumerate(rows)})
            if samples:
                served.tokens.append(token)
        self.planner.commit(step, np.array(sampled))

    def forward(self, step, requests) -> list[Tensor]:
        """One step of the model; logits of every row's tokens."""
        tables = self.tables.update(
            step, rows=len(requests) + self.pad, tokens=int((step.stop - step.start).sum()) + self.pad
        )
        spans = (step.stop - step.start).tolist()
        ids = [r.tokens[a:b] for r, a, b in zip(requests, step.start, step.stop, strict=True)]
        total = sum(spans)
        hidden = torch.zeros(total + self.pad, WIDTH)
        hidden[:total] = self.weights.embedding[torch.from_numpy(np.concatenate(ids)).long()]
        ratio = self.g.recurrent_layers // self.g.attention_layers
        for layer in range(self.g.attention_layers):
            hidden = hidden + self.attend(tables, layer, hidden, total)
            for inner in range(layer * ratio, (layer + 1) * ratio):
                hidden = hidden + self.recur(tables, inner, hidden, total)
        return list(each(hidden[:total], self.weights.head).split(spans))

    def attend(self, t, layer: int, hidden: Tensor, total: int) -> Tensor:
        group, inner = divmod(layer, self.g.layers_per_group)
        q, k, v = each(hidden, self.weights.qkv[layer]).to(BF16).split([64, 32, 32], 1)
        q, k, v = (part.contiguous().unflatten(1, (-1, 16)) for part in (q, k, v))
        pool, layout = self.arena.view(ATTENTION, inner), self.arena.kv_layout
        ops.write_kv(
            pool, k, v, t.blocks[group], t.token_seats, t.token_positions, layout=layout, impl=self.impl
        )
        out = torch.full(q.shape, float("nan"))
        ops.prefill_attention(
            pool, q, t.starts, t.blocks[group], t.seats, t.lengths, out,
            layout=layout, max_query=t.max_tokens, impl=self.impl,
        )  # fmt: skip
        return self.padded(out, total, self.weights.attended[layer])

    def padded(self, out: Tensor, total: int, matrix: Tensor) -> Tensor:
        assert not out[:total].isnan().any()
        assert out[total:].isnan().all()  # D1, D2: padded tokens' outputs are untouched
        out[total:] = 0
        return each(out.flatten(1), matrix)

    def recur(self, t, layer: int, hidden: Tensor, total: int) -> Tensor:
        group, inner = divmod(layer, self.g.layers_per_group)
        w, spec, arena = self.weights, self.g.recurrent, self.arena
        wide = each(hidden, w.inputs[layer]).to(BF16)
        channels, gates = wide[:, : spec.conv_dim], wide[:, spec.conv_dim :].contiguous()
        mixed = torch.full((len(hidden), spec.conv_dim), float("nan"), dtype=BF16)
        ops.conv_prefill(
            arena.view(CONV, inner), t.line_src[group], t.line_dst[group], t.line_at, t.starts,
            channels.contiguous(), w.taps[layer], None, mixed,
            granule=arena.granule(CONV), max_tokens=t.max_tokens, impl=self.impl,
        )  # fmt: skip
        mixed[total:] = 0
        out = torch.full((len(hidden), spec.rows, 16), float("nan"))
        mamba = spec.kind is RecurrentKind.MAMBA2
        parts = [p.contiguous() for p in mixed.split(list(spec.conv_sections), 1)]
        parts = [p.unflatten(1, (-1, 16)) for p in parts]
        common = {
            "granule": arena.granule(SSM),
            "heads_per_member": arena.heads_per_member(),
            "impl": self.impl,
        }
        if mamba:
            x, B, C = parts
            tokens = (x, gates, w.A, B, C, w.D, w.bias)
        else:
            q, k, v = parts
            q, k = (torch.nn.functional.normalize(p.float(), dim=-1).to(BF16) for p in (q, k))
            a, b = (p.contiguous() for p in gates.split(spec.rows, 1))
            tokens, common["scale"] = (q, k, v, a, b, w.A, w.bias), 0.25
        pool = arena.view(SSM, inner)
        if self.decode != "replay":  # one token a row
            (ops.state_update if mamba else ops.delta_update)(
                pool, t.src_members[group], t.dst_members[group], *tokens, out, **common
            )
        else:
            spans = (t.windows[group], t.starts, t.positions)
            window = (arena.view(WINDOW, inner), *spans)
            common |= {"window_granule": arena.granule(WINDOW), "max_tokens": t.max_tokens}
            ends = t.boundaries[group]
            if mamba:
                scratch = torch.full((*ends.shape[:2], 3, 16, 16), float("nan"), dtype=pool.dtype)
                ops.ssd(
                    pool,
                    t.src_members[group],
                    ends,
                    scratch,
                    *window,
                    *tokens,
                    out,
                    chunk=self.g.chunk_tokens,
                    **common,
                )
            else:
                ops.delta_rule(pool, t.src_members[group], ends, *window, *tokens, out, **common)
        return self.padded(out, total, w.outputs[layer])
