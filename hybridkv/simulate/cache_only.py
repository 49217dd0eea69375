"""A trace through the cache alone: how much of it could be reused, without a clock and without concurrency.

Requests come in file order, one at a time; each is admitted whole, written and released before the next looks up. So
running requests take no room, and figures are to be compared with each other, not with a served system.
Definitions: section 11 of the memory-organization reference and `derived` of its goldens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hybridkv.alloc.cache import CachePolicy, HybridCache
from hybridkv.alloc.organization import Organization, Placement, Pool, StateKind
from hybridkv.alloc.plan import Admitted
from hybridkv.errors import UsageError
from hybridkv.geometry import AttentionSpec, ModelGeometry
from hybridkv.simulate.workload import TRACE_BLOCK_TOKENS, Arrival

Progress = Callable[[int, int], None]


class Reuse(NamedTuple):
    """What one pass found. Tokens; `attention` counts the grid boundary that attention alone reached."""

    input_tokens: int
    attention_tokens: int
    joint_tokens: int
    blocks: int
    hit_blocks: int
    checkpoints: int

    @property
    def joint_share(self) -> float:
        """Part of the attention hit that recurrent state lets one use."""
        return self.joint_tokens / self.attention_tokens if self.attention_tokens else 1.0

    @property
    def joint_hit(self) -> float:
        """Part of the input that need not be computed."""
        return self.joint_tokens / self.input_tokens

    @property
    def attention_hit(self) -> float:
        """Part of the input whose KV is cached."""
        return self.attention_tokens / self.input_tokens

    @property
    def block_hit(self) -> float:
        """Part of the blocks that are cached."""
        return self.hit_blocks / self.blocks


def reuse(
    organization: Organization,
    arrivals: Sequence[Arrival],
    *,
    pages: dict[str, int] | None = None,
    placement: str = "every_block",
    whole_blocks: bool = False,
    progress: Progress | None = None,
) -> Reuse:
    """Pass a trace through one cache; `pages` None: pools that hold everything.

    `whole_blocks`: the last block of a prompt counts as a full one, as block-hit curves of the field do.
    """
    pages = pages or _unbounded(organization, arrivals)
    cache = HybridCache(organization, pages=pages, policy=CachePolicy(placement=placement))
    totals = np.zeros(5, np.int64)
    for i, arrival in enumerate(arrivals):
        tokens = _whole(arrival) if whole_blocks else arrival.tokens()
        blocks = -(-arrival.input_tokens // organization.block_tokens)
        r = cache.request(i, tokens)
        match = cache.match(r)
        # Attention counts as tokens of full blocks, which may reach below a boundary of a coarser grid (D0).
        reached = cache.attention_reach(r)
        totals += (arrival.input_tokens, reached, match.joint, blocks, reached // organization.block_tokens)
        if isinstance(cache.admit(r), Admitted):
            cache.commit(r, r.length)
        cache.release(r)
        if progress is not None and i % 200 == 0:
            progress(i, len(arrivals))
    return Reuse(*totals.tolist(), checkpoints=cache.counters["published_checkpoints"])


def attention_only(geometry: ModelGeometry, block_tokens: int = TRACE_BLOCK_TOKENS) -> Organization:
    """One page per block of tokens, no recurrent state: a plain prefix cache."""
    spec = geometry.attention or AttentionSpec(layers=1, kv_heads=1, key_dim=64, value_dim=64)
    plain = ModelGeometry(name="attention", layers=spec.layers, attention=spec, recurrent=None)
    page = plain.kv_bytes_per_token * block_tokens
    return Organization(
        name="attention",
        geometry=plain,
        pools=(Pool(name="shared", page_bytes=page),),
        placements={StateKind.ATTENTION: Placement(pool="shared", payload_bytes=page, pages=1)},
        block_tokens=block_tokens,
        grid_tokens=block_tokens,
    )


def block_curve(
    geometry: ModelGeometry, arrivals: Sequence[Arrival], tokens: Sequence[float]
) -> dict[float, float]:
    """LRU block hit ratio of a prefix cache of so many tokens (Mooncake's curve)."""
    if not any(a.hash_ids for a in arrivals):
        raise UsageError("arrivals must carry hash ids for a block-hit curve, got lengths only")
    o = attention_only(geometry)
    found: dict[float, float] = {}
    for size in tokens:
        # One page more than the cache holds: the token that is always computed needs a block of its own.
        pages = {"shared": int(size) // TRACE_BLOCK_TOKENS + 1}
        found[size] = reuse(o, arrivals, pages=pages, whole_blocks=True).block_hit
    return found


def _whole(arrival: Arrival) -> np.ndarray:
    """The prompt with every block filled up, and one token more, so that the last block can be hit."""
    runs = [(first, TRACE_BLOCK_TOKENS) for first, _ in arrival.runs]
    return np.append(arrival._replace(runs=tuple(runs)).tokens(), np.int32(0))


def _unbounded(organization: Organization, arrivals: Sequence[Arrival]) -> dict[str, int]:
    """Pages for every block and boundary of the whole trace, none shared."""
    blocks = sum(-(-a.input_tokens // organization.block_tokens) + 1 for a in arrivals)
    states = sum(a.input_tokens // organization.grid_tokens + 1 for a in arrivals)
    used = organization.used_pages(attention=blocks, checkpoints=states, layers="all")
    return {name: count + 1 for name, count in used.items()}
