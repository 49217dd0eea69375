"""Hypothesis strategies: prompts that share prefixes, and tiny cache specs. Needs hypothesis.

Plain integers throughout, to be reduced modulo what is alive: that shrinks far faster than drawing from data that
depends on the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st

from hybridkv.testing.cache_adapter import CacheSpec
from hybridkv.testing.geometries import ORGANIZATIONS

if TYPE_CHECKING:
    from hybridkv.testing._adapter import Tokens

small = st.integers(0, 7)
tokens = st.integers(0, 1)


def prompts(max_tokens: int = 12) -> st.SearchStrategy[Tokens]:
    """Prompts of two symbols: few distinct prefixes, many lengths, so that hits are the rule."""
    head = st.sampled_from(((), (0, 0), (0, 0, 0, 0), (1, 1, 0, 0), (0, 0, 0, 0, 0, 0, 0, 0)))
    tail = st.lists(tokens, min_size=1, max_size=max(1, max_tokens - 8))
    return st.builds(lambda a, b: (*a, *b), head, tail)


def cache_specs(organization: str | None = None) -> st.SearchStrategy[CacheSpec]:
    """Tiny caches of one organization, or of any: grids, members, slots, groups, dtypes and decode modes vary."""
    names = st.just(organization) if organization else st.sampled_from(ORGANIZATIONS)
    return st.builds(_spec, names, small, small, small, st.integers(0, 5))


def _spec(name: str, size: int, form: int, extra: int, policy: int) -> CacheSpec:
    shape: dict[str, Any] = {
        "grid_tokens": (2, 4)[form & 1],
        "slots": (2, 4)[form >> 1 & 1],
        "members": 1 + (form >> 2),
    }
    pages = 7 + size
    decode = "update" if policy & 1 else "update_shared"
    if extra == 1:
        shape["groups"], pages = (2, 3), pages + 12
    elif extra == 2:
        shape["live"], pages = True, pages + 2
    elif extra == 3:
        shape |= {"window": True, "chunk_tokens": 2}
        decode, pages = "replay", pages + 2
    counts = (pages, max(4, pages - 2)) if name == "d0" else (pages,)
    placement = ("every_block", "every_block", "end_only", "end_junction")[policy >> 1]
    return CacheSpec(
        organization=name,
        pages=counts,
        shape=tuple(sorted(shape.items())),
        decode=decode,
        placement=placement,
        hold_source=extra != 4,
        buckets=5 if extra == 5 else 0,
    )
