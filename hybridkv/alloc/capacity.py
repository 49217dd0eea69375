"""What a budget holds: largest state mix, feasibility per pool, concurrent requests.

Ideal packing: an upper model, not a promise of the runtime, where slabs may be partly used after churn.
Formulas A8 and D2 of arXiv 2610.15755; section 2.7 of its reference page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hybridkv.alloc.organization import Layers, Organization
from hybridkv.errors import UsageError


class Mix(NamedTuple):
    """A set of states: attention blocks of the organization, and checkpoints."""

    attention: int
    checkpoints: int

    def times(self, count: int) -> Mix:
        """`count` such sets."""
        return Mix(self.attention * count, self.checkpoints * count)


class PoolNeed(NamedTuple):
    """What a mix takes of one pool, and what the pool has, in pages."""

    pool: str
    needed: int
    available: int

    @property
    def feasible(self) -> bool:
        """Whether it fits. Free space of another pool never helps."""
        return self.needed <= self.available


def needs(
    organization: Organization, mix: Mix, pages: Mapping[str, int], *, layers: Layers = 1
) -> tuple[PoolNeed, ...]:
    """Need and supply per pool; the mix is feasible if every pool's need is."""
    used = organization.used_pages(attention=mix.attention, checkpoints=mix.checkpoints, layers=layers)
    return tuple(PoolNeed(name, count, pages[name]) for name, count in used.items())


def feasible(organization: Organization, mix: Mix, pages: Mapping[str, int], *, layers: Layers = 1) -> bool:
    """Whether every pool holds its part of the mix."""
    return all(need.feasible for need in needs(organization, mix, pages, layers=layers))


def whole_pages(organization: Organization, budgets: Mapping[str, int]) -> dict[str, int]:
    """Pages that fit a budget of one layer per pool, in bytes; never more than the budget."""
    return {name: budget // organization.pool(name).page_bytes for name, budget in budgets.items()}


def largest(organization: Organization, unit: Mix, pages: Mapping[str, int], *, layers: Layers = 1) -> int:
    """C(M; a): how many times `unit` fits. O(log answer)."""
    if min(unit) < 0 or max(unit) < 1:
        raise UsageError(f"unit must have an attention block or a checkpoint, got {unit}")
    low, high = 0, 1
    while feasible(organization, unit.times(high), pages, layers=layers):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if feasible(organization, unit.times(middle), pages, layers=layers):
            low = middle
        else:
            high = middle
    return low


def request_mix(organization: Organization, tokens: int, live_checkpoints: int = 2) -> Mix:
    """What a running request of `tokens` tokens holds: its blocks, and the states it reads and writes."""
    blocks = -(-tokens // organization.block_tokens) if organization.attention_parts else 0
    states = (
        min(live_checkpoints, -(-tokens // organization.grid_tokens))
        if organization.geometry.recurrent
        else 0
    )
    return Mix(blocks, states)


def concurrent_requests(
    organization: Organization, tokens: int, pages: Mapping[str, int], *, live_checkpoints: int = 2
) -> int:
    """Requests of `tokens` tokens, nothing shared, that run at once in all layer groups."""
    return largest(organization, request_mix(organization, tokens, live_checkpoints), pages, layers="all")
