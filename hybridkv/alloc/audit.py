"""Looking at everything: the snapshot that `stats` gives, and the audit of I1-I5.

The audit counts from the requests and the index what every pool should hold, and compares; it trusts no counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.alloc import planes
from hybridkv.alloc.checkpoint import Lifecycle, State
from hybridkv.alloc.growth import ATTENTION
from hybridkv.alloc.organization import StateKind
from hybridkv.alloc.pages import PagePool
from hybridkv.alloc.plan import PoolStats, Stats
from hybridkv.alloc.requests import Status
from hybridkv.alloc.slots import SlotPool
from hybridkv.alloc.storage import KINDS
from hybridkv.errors import CorruptionError

if TYPE_CHECKING:
    from hybridkv.alloc.cache import HybridCache


def snapshot(cache: HybridCache) -> Stats:
    """`HybridCache.stats`."""
    counters = dict(cache.counters, coupled_reclaims=cache.storage.coupled)
    return Stats(
        pools={name: _pool_stats(pool) for name, pool in cache.storage.pools.items()},
        attention_blocks=len(cache.index.blocks),
        checkpoints=len(cache.index.checkpoints),
        running=cache.running,
        waiting=len(cache.requests) - cache.running,
        counters=counters,
    )


def _pool_stats(pool: PagePool) -> PoolStats:
    kinds = np.bincount(pool.kinds + 1, minlength=len(KINDS) + 1)[1:].tolist()
    by_kind = {kind.value: count for kind, count in zip(KINDS, kinds, strict=True) if count}
    return PoolStats(pool.size, pool.free, pool.cached, pool.held, pool.peak_held, by_kind)


def audit(cache: HybridCache) -> None:
    """`HybridCache.audit`."""
    _audit_index(cache)
    planes.audit(cache)
    for store, references in _expected(cache).items():
        if isinstance(store, SlotPool):
            _audit_slots(store, references)
        else:
            _audit_pages(store, references, cache.storage.slot_pools)
    running = sum(r.status is Status.RUNNING for r in cache.requests.values())
    _expect(running == cache.running, "I5", f"{cache.running} running requests are counted, {running} found")


def held(cache: HybridCache) -> Iterator[tuple[StateKind, np.ndarray]]:
    """Every unit that a request or a lease holds, once per reference."""
    for r in cache.requests.values():
        if r.blocks:
            yield ATTENTION, cache.growth.once(r.table[:, : r.blocks].T.ravel())
        for state in r.states():
            yield from state
    for state in cache.leases:
        yield from state


def _expected(cache: HybridCache) -> dict[PagePool | SlotPool, Counter[int]]:
    stores = [*cache.storage.pools.values(), *cache.storage.slot_pools]
    found: dict[PagePool | SlotPool, Counter[int]] = {store: Counter() for store in stores}
    for kind, units in held(cache):
        found[cache.storage.by_kind[kind]].update(units.ravel().tolist())
    return found


def _audit_index(cache: HybridCache) -> None:
    """I1, I3: what is discoverable is whole, and every unit would tell it."""
    for table in (cache.index.blocks, cache.index.checkpoints):
        for key, state in table.items():
            _expect(
                state.key == key and state.stage is Lifecycle.PUBLISHED, "I1", f"{state!r} is filed wrongly"
            )
            for kind, units in state:
                store = cache.storage.by_kind[kind]
                for unit in units.ravel().tolist():
                    owner = store.owner(unit) if isinstance(store, SlotPool) else store.owners[unit]
                    _expect(
                        owner is state,
                        "I3",
                        f"{state!r} depends on {kind.value} {unit}, which does not tell it",
                    )
                _expect((units >= 0).all(), "I4", f"{state!r} names an absent unit")
    for r in cache.requests.values():
        for state in r.states():
            _expect(state.stage is not Lifecycle.LOST, "I2", f"{r!r} holds {state!r}")


def _audit_pages(pool: PagePool, references: Counter[int], slot_pools: list[SlotPool]) -> None:
    slabs = {page: store for store in slot_pools if store.pool is pool for page in store.slabs}
    expected = np.zeros(pool.size, np.int32)
    for page, count in references.items():
        expected[page] = count
    for page, store in slabs.items():
        _expect(expected[page] == 0, "I8", f"page {page} is a slab and a page of its own")
        expected[page] = store.slabs[page].held > 0
    wrong = np.flatnonzero(expected != pool.references)
    _expect(not len(wrong), "I2", f"pages {wrong.tolist()} of {pool.name!r} have wrong references")
    free = pool.free_ids()
    cached = np.flatnonzero((pool.references == 0) & pool.published).tolist()
    is_held = np.flatnonzero(pool.references).tolist()
    _expect(
        sorted(free + cached + is_held) == list(range(pool.size)),
        "I5",
        f"pages of {pool.name!r} do not add up",
    )
    _expect(
        len(cached) == pool.cached and len(is_held) == pool.held, "I5", f"counts of {pool.name!r} are wrong"
    )
    _expect(
        set(pool.cached_ids()) == set(cached), "I5", f"reclaim queue of {pool.name!r} does not hold {cached}"
    )
    for page in np.flatnonzero(pool.published).tolist():
        owner = pool.owners[page]
        known = page in slabs if isinstance(owner, SlotPool) else isinstance(owner, State)
        _expect(known, "I3", f"page {page} of {pool.name!r} is published without an owner")


def _audit_slots(store: SlotPool, references: Counter[int]) -> None:
    width, spare, cached_slots = store.slots_per_page, 0, 0
    for page, slab in store.slabs.items():
        _expect(slab.used > 0, "I5", f"slab {page} is empty and not given back")
        free = {slot for slot in range(width) if slab.free >> slot & 1}
        cached = {s for s in range(width) if slab.owners[s] is not None and slab.references[s] == 0}
        _expect(len(free) == width - slab.used, "I5", f"slots of slab {page} do not add up")
        _expect(not free & cached, "I5", f"a slot of slab {page} is free and cached")
        for slot in range(width):
            expected = references.pop(page * width + slot, 0)
            _expect(
                slab.references[slot] == expected, "I2", f"slot {slot} of slab {page} has wrong references"
            )
            _expect(not (expected and slot in free), "I2", f"slot {slot} of slab {page} is free and held")
        spare += (width - slab.held) if slab.held else 0
        cached_slots += len(cached)
    _expect(not references, "I2", f"lines {sorted(references)} are held and in no slab")
    _expect(store.spare == spare and store.cached == cached_slots, "I5", "counts of slots are wrong")
    lines = {line for line in store.queue.order() if store.owner(line) is not None}
    owned = {
        p * width + s
        for p, b in store.slabs.items()
        for s in range(width)
        if b.owners[s] and not b.references[s]
    }
    _expect(owned <= lines, "I5", "a cached slot is not in the reclaim queue")


def _expect(true: object, invariant: str, message: str) -> None:
    if not true:
        raise CorruptionError(invariant, message)
