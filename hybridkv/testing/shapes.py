"""Tiny caches to explore: what `make_cache` takes, and a list of them for each organization."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hybridkv.alloc.cache import CachePolicy, HybridCache
from hybridkv.testing.geometries import tiny_organization

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """One tiny cache: arguments of `tiny_organization`, page counts, policy, and the hash.

    `buckets`: size of the image of a deliberately weak token hash, 0 for the default hash.
    """

    organization: str = "s2"
    pages: tuple[int, ...] = (6,)
    shape: tuple[tuple[str, Any], ...] = ()
    decode: Literal["replay", "update", "update_shared"] = "update_shared"
    placement: str = "every_block"
    hold_source: bool = True
    headroom: str = "0"
    buckets: int = 0
    change: Callable[[HybridCache], None] | None = field(default=None, compare=False)

    def build(self, token_hash: Any) -> HybridCache:
        """The cache, with `change` (a mutant) applied."""
        organization = tiny_organization(self.organization, **dict(self.shape))
        pages = dict(zip((p.name for p in organization.pools), self.pages, strict=True))
        policy = CachePolicy(
            decode=self.decode, placement=self.placement, hold_source=self.hold_source, headroom=self.headroom
        )
        cache = HybridCache(organization, pages=pages, policy=policy, token_hash=token_hash)
        if self.change is not None:
            self.change(cache)
        return cache


# What is explored of each organization: the fewest pages that a request with a hit fits in, and two to four more.
SHAPES: dict[str, tuple[CacheSpec, ...]] = {
    "s0": (
        CacheSpec(organization="s0", pages=(5,)),
        CacheSpec(organization="s0", pages=(6,), shape=(("grid_tokens", 4),)),
    ),
    "s1": (CacheSpec(organization="s1", pages=(6,)), CacheSpec(organization="s1", pages=(8,))),
    "s2": (
        CacheSpec(organization="s2", pages=(5,)),
        CacheSpec(organization="s2", pages=(6,), shape=(("slots", 4),)),
    ),
    "d0": (CacheSpec(organization="d0", pages=(4, 3)), CacheSpec(organization="d0", pages=(3, 4))),
    "striped": (
        CacheSpec(organization="striped", pages=(6,), shape=(("members", 2),)),
        CacheSpec(organization="striped", pages=(5,)),
    ),
    "nested": (
        CacheSpec(organization="nested", pages=(4,)),
        CacheSpec(organization="nested", pages=(5,), shape=(("grid_tokens", 4), ("slots", 4))),
    ),
}
OTHER_SHAPES: dict[str, tuple[CacheSpec, ...]] = {
    "two attention groups, three recurrent": (
        CacheSpec(organization="s2", pages=(14,), shape=(("groups", (2, 3)),)),
        CacheSpec(organization="nested", pages=(12,), shape=(("groups", (2, 3)),)),
    ),
    "attention only": (
        CacheSpec(organization="s1", pages=(4,), shape=(("groups", (1, 0)),)),
        CacheSpec(organization="nested", pages=(3,), shape=(("groups", (2, 0)),)),
    ),
    "recurrent only": (
        CacheSpec(organization="s2", pages=(5,), shape=(("groups", (0, 1)),)),
        CacheSpec(organization="s0", pages=(4,), shape=(("groups", (0, 1)), ("grid_tokens", 4))),
    ),
    "live state of its own dtype": (
        CacheSpec(organization="s2", pages=(8,), shape=(("live", True),)),
        CacheSpec(organization="s0", pages=(6,), shape=(("live", True),)),
    ),
    "replay window": (
        CacheSpec(
            organization="s0",
            pages=(7,),
            shape=(("window", True), ("chunk_tokens", 2), ("grid_tokens", 4)),
            decode="replay",
        ),
        CacheSpec(
            organization="s2", pages=(7,), shape=(("window", True), ("chunk_tokens", 2)), decode="replay"
        ),
    ),
    "update decode": (
        CacheSpec(organization="s2", pages=(6,), decode="update"),
        CacheSpec(organization="nested", pages=(5,), decode="update"),
    ),
    "weak hash": (
        CacheSpec(organization="s2", pages=(6,), buckets=5),
        CacheSpec(organization="s0", pages=(5,), buckets=1),
    ),
    "end and junction": (
        CacheSpec(organization="s0", pages=(6,), placement="end_junction"),
        CacheSpec(organization="s2", pages=(6,), placement="end_only", hold_source=False),
    ),
}
specs = tuple(
    spec for shapes in SHAPES.values() for spec in shapes
)  # what `python -m hybridkv.testing` explores
