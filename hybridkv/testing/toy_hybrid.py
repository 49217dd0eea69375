"""A toy hybrid model served the whole way: planner, cache, tables, arena, ops. What an engine does, in small.

Everything but the ops is computed token by token, so that only what is under test could change bits: logits depend on
the tokens before them and on nothing else (I10). `ToyEngine.forward` is the part that an engine writes itself.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hybridkv import CachePolicy, HybridCache, ModelGeometry, Organization, ops
from hybridkv.alloc.builders import window_bytes
from hybridkv.alloc.organization import Placement, Pool, StateKind
from hybridkv.arena import Arena, StepTables, Tables
from hybridkv.geometry import AttentionSpec, RecurrentKind, RecurrentSpec
from hybridkv.schedule.hybrid import HybridConfig, HybridPlanner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hybridkv.alloc.requests import Request
    from hybridkv.arena.layout import Order
    from hybridkv.schedule.hybrid import StepPlan

BF16 = torch.bfloat16
VOCABULARY, WIDTH, HEAD = 61, 32, 16
QUERIES, KV_HEADS = 4, 2
ATTENTION, SSM, CONV, LIVE, WINDOW = StateKind
ORGANIZATIONS = ("s0", "s1", "s2", "d0", "striped", "nested")


def toy_geometry(kind: str = "mamba2", *, layers: tuple[int, int] = (1, 2), **changes: Any) -> ModelGeometry:
    """Return the smallest sizes that the ops take: heads of 16; `layers` with attention and with recurrent state."""
    attention, recurrent = layers
    return ModelGeometry(
        name="toy",
        layers=attention + recurrent,
        attention=AttentionSpec(layers=attention, kv_heads=KV_HEADS, key_dim=HEAD, value_dim=HEAD),
        recurrent=RecurrentSpec.derived(
            kind=RecurrentKind(kind), layers=recurrent, state_shape=(3, HEAD, HEAD), conv_width=4, groups=1
        ),
        **{"chunk_tokens": 16, **changes},
    )


def toy_organization(name: str, g: ModelGeometry) -> Organization:
    """Build one of the six around blocks of 16 tokens; three members where states are cut; slots of two sizes."""
    page = 4352 if name == "nested" else 2304
    states, attention = ("recurrent", "attention") if name == "d0" else ("shared", "shared")
    members = 3 if name in ("s1", "s2", "striped") else 1
    line: dict[str, Any] = {"within": SSM, "offset": -(-g.ssm_bytes // members // 16) * 16}
    line = {"s1": {"pages": 1}, "s2": {"slot_bytes": 576}}.get(name, line)
    block: dict[str, Any] = {"slot_bytes": 2048} if name == "nested" else {"pages": 1}
    places = {
        ATTENTION: Placement(pool=attention, payload_bytes=16 * g.kv_bytes_per_token, **block),
        SSM: Placement(pool=states, payload_bytes=g.ssm_bytes, pages=members),
        CONV: Placement(pool=states, payload_bytes=g.conv_bytes, **line),
        WINDOW: Placement(pool=states, payload_bytes=window_bytes(g), pages=1),
    }
    if g.live_ssm_bytes != g.ssm_bytes:
        places[LIVE] = Placement(pool=states, payload_bytes=g.live_ssm_bytes, pages=max(2, members))
    sizes = {"attention": 2048, "recurrent": page} if name == "d0" else {"shared": page}
    pools = tuple(Pool(name=n, page_bytes=b, share=Fraction(1, len(sizes))) for n, b in sizes.items())
    return Organization(
        name=name, geometry=g, pools=pools, placements=places, block_tokens=16, grid_tokens=32
    )


class Weights:
    """Random matrices, one set for each layer, the same on every device."""

    def __init__(self, g: ModelGeometry, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.g, self.device = g, torch.device(device)
        spec, draw = g.recurrent, torch.Generator().manual_seed(seed)
        assert spec is not None

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(self.device)

        def matrix(rows: int, columns: int) -> Tensor:
            return normal(rows, columns) / rows**0.5

        self.embedding, self.head = normal(VOCABULARY, WIDTH), matrix(WIDTH, VOCABULARY)
        self.qkv = [matrix(WIDTH, (QUERIES + 2 * KV_HEADS) * HEAD) for _ in range(g.attention_layers)]
        self.attended = [matrix(QUERIES * HEAD, WIDTH) for _ in range(g.attention_layers)]
        gates = spec.rows * (1 if spec.kind is RecurrentKind.MAMBA2 else 2)
        self.inputs = [matrix(WIDTH, spec.conv_dim + gates) for _ in range(spec.layers)]
        self.taps = [matrix(spec.conv_width, spec.conv_dim).to(BF16) for _ in range(spec.layers)]
        self.outputs = [matrix(spec.rows * HEAD, WIDTH) for _ in range(spec.layers)]
        self.A = -normal(spec.rows).abs() - 0.5
        self.D, self.bias = normal(spec.rows), normal(spec.rows) - 2


def each(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply row by row: the bits of a row do not depend on the others."""
    return torch.cat([row[None].float() @ matrix for row in x])


class Served(NamedTuple):
    """What one request produced: sampled tokens, and the logits of every position that was computed."""

    tokens: list[int]
    logits: dict[int, Tensor]


class ToyEngine:
    """An engine around one cache. `pad`: rows and tokens that every step is padded by, as for a captured graph."""

    def __init__(
        self,
        organization: Organization,
        weights: Weights,
        *,
        pages: dict[str, int],
        decode: Any = "replay",
        config: HybridConfig | None = None,
        order: Order = "layer_major",
        impl: str = "reference",
        context: int = 512,
        pad: int = 0,
    ) -> None:
        self.weights, self.g, self.impl, self.pad = weights, organization.geometry, impl, pad
        assert self.g.recurrent is not None
        self.spec = self.g.recurrent
        self.cache = HybridCache(organization, pages=pages, policy=CachePolicy(decode=decode), check=3)
        self.planner = HybridPlanner(self.cache, config or HybridConfig(token_budget=64, max_running=4))
        self.device = weights.device
        self.arena = Arena(organization, pages, device=self.device, order=order, red_zone=64, poison=True)
        running, budget = self.planner.config.max_running, self.planner.config.token_budget
        self.tables = StepTables(
            self.arena, self.cache, rows=running + pad, tokens=budget + pad, context=context, check=2
        )
        self.served: dict[object, Served] = {}
        self.hits: dict[object, int] = {}
        self.idle = 0  # empty steps in a row: a step that preempts everybody is one

    def submit(self, name: str | int, tokens: Sequence[int], new: int) -> None:
        """Take a request for `new` tokens."""
        self.planner.submit(name, tokens, new)
        self.served[name] = Served([], {})

    def run(self) -> dict[object, Served]:
        """Serve until nothing waits."""
        while self.planner.waiting or self.planner.running:
            self.step()
        assert self.arena.violations() == []
        return self.served

    def step(self) -> None:
        """Plan, compute, commit."""
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
        starts = step.start.tolist()
        for r, rows, start, samples, token in zip(
            requests, logits, starts, step.samples, sampled, strict=True
        ):
            served = self.served[r.id]
            served.logits.update({start + k: row for k, row in enumerate(rows)})
            if samples:
                served.tokens.append(token)
        self.planner.commit(step, np.array(sampled))

    def forward(self, step: StepPlan, requests: list[Request]) -> list[Tensor]:
        """Run the model over one step; logits `[tokens, vocabulary]` of every row."""
        spans = (step.stop - step.start).tolist()
        total, rows = sum(spans), len(requests) + self.pad
        tables = self.tables.update(step, rows=rows, tokens=total + self.pad)
        self.arena.convert(tables.loads, self.impl)
        ids = [r.tokens[a:b] for r, a, b in zip(requests, step.start, step.stop, strict=True)]
        hidden = torch.zeros(total + self.pad, WIDTH, device=self.device)
        hidden[:total] = self.weights.embedding[torch.from_numpy(np.concatenate(ids)).long().to(self.device)]
        ratio = self.g.recurrent_layers // self.g.attention_layers
        for layer in range(self.g.attention_layers):
            hidden = hidden + self._attend(tables, layer, hidden, total)
            for inner in range(layer * ratio, (layer + 1) * ratio):
                hidden = hidden + self._recur(tables, inner, hidden, total)
        self.arena.convert(tables.saves, self.impl)
        return list(each(hidden[:total], self.weights.head).split(spans))

    def _attend(self, t: Tables, layer: int, hidden: Tensor, total: int) -> Tensor:
        group, inner = divmod(layer, self.g.layers_per_group)
        widths = [n * HEAD for n in (QUERIES, KV_HEADS, KV_HEADS)]
        qkv = each(hidden, self.weights.qkv[layer]).to(BF16).split(widths, 1)
        q, k, v = (part.unflatten(1, (-1, HEAD)) for part in qkv)
        pool, layout = self.arena.view(ATTENTION, inner), self.arena.kv_layout
        table, out = t.blocks[group], torch.full(q.shape, float("nan"), device=self.device)
        ops.write_kv(pool, k, v, table, t.token_seats, t.token_positions, layout=layout, impl=self.impl)
        ops.prefill_attention(
            pool, q, t.starts, table, t.seats, t.lengths, out,
            layout=layout, max_query=t.max_tokens, impl=self.impl,
        )  # fmt: skip
        return self._projected(out, total, self.weights.attended[layer])

    def _projected(self, out: Tensor, total: int, matrix: Tensor) -> Tensor:
        assert not out[:total].isnan().any(), "poison was read"
        assert out[total:].isnan().all(), "a padded token has an output (D1, D2)"
        out[total:] = 0
        return each(out.flatten(1), matrix)

    def _recur(self, t: Tables, layer: int, hidden: Tensor, total: int) -> Tensor:
        group, inner = divmod(layer, self.g.layers_per_group)
        w, spec, arena = self.weights, self.spec, self.arena
        inputs, gates = (
            each(hidden, w.inputs[layer])
            .to(BF16)
            .split([spec.conv_dim, w.inputs[layer].shape[1] - spec.conv_dim], 1)
        )
        mixed = torch.full(inputs.shape, float("nan"), dtype=BF16, device=self.device)
        ops.conv_prefill(
            arena.view(CONV, inner), t.line_src[group], t.line_dst[group], t.line_at, t.starts,
            inputs.contiguous(), w.taps[layer], None, mixed,
            granule=arena.granule(CONV), max_tokens=t.max_tokens, impl=self.impl,
        )  # fmt: skip
        mixed[total:] = 0
        parts = [p.contiguous().unflatten(1, (-1, HEAD)) for p in mixed.split(list(spec.conv_sections), 1)]
        out = torch.full((len(hidden), spec.rows, HEAD), float("nan"), device=self.device)
        if spec.kind is RecurrentKind.MAMBA2:
            self._mamba(t, group, inner, parts, gates.contiguous(), out)
        else:
            self._delta(t, group, inner, parts, gates, out)
        return self._projected(out, total, w.outputs[layer])

    def _mamba(self, t: Tables, group: int, inner: int, parts: list[Tensor], dt: Tensor, out: Tensor) -> None:
        (x, B, C), w, arena = parts, self.weights, self.arena
        pool, source = arena.view(self.tables.recurrent, inner), t.src_members[group]
        tokens = (x, dt, w.A, B, C, w.D, w.bias, out)
        held = {
            "granule": arena.granule(self.tables.recurrent),
            "heads_per_member": arena.heads_per_member(self.tables.recurrent),
            "impl": self.impl,
        }
        if self.cache.policy.decode != "replay":  # one token a row
            ops.state_update(pool, source, t.dst_members[group], *tokens, **held)
            return
        ends = t.boundaries[group]
        scratch = torch.full(
            (*ends.shape[:2], self.spec.rows, HEAD, HEAD), float("nan"), dtype=pool.dtype, device=self.device
        )
        ops.ssd(
            pool, source, ends, scratch, arena.view(WINDOW, inner), t.windows[group], t.starts, t.positions, *tokens,
            window_granule=arena.granule(WINDOW), chunk=self.g.chunk_tokens, max_tokens=t.max_tokens, **held,
        )  # fmt: skip

    def _delta(
        self, t: Tables, group: int, inner: int, parts: list[Tensor], gates: Tensor, out: Tensor
    ) -> None:
        w, arena = self.weights, self.arena
        q, k = (torch.nn.functional.normalize(p.float(), dim=-1).to(BF16) for p in parts[:2])
        a, b = (p.contiguous() for p in gates.split(self.spec.rows, 1))
        pool, source = arena.view(self.tables.recurrent, inner), t.src_members[group]
        tokens = (q, k, parts[2], a, b, w.A, w.bias, out)
        held = {
            "granule": arena.granule(self.tables.recurrent), "heads_per_member": arena.heads_per_member(self.tables.recurrent), "scale": HEAD**-0.5,
            "impl": self.impl,
        }  # fmt: skip
        if self.cache.policy.decode != "replay":
            ops.delta_update(pool, source, t.dst_members[group], *tokens, **held)
            return
        ops.delta_rule(
            pool, source, t.boundaries[group], arena.view(WINDOW, inner), t.windows[group], t.starts, t.positions,
            *tokens, window_granule=arena.granule(WINDOW), max_tokens=t.max_tokens, **held,
        )  # fmt: skip
