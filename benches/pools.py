"""Pages and slots: the rows `pool.*` and `slot.*`."""

import numpy as np

from benches.harness import measure, row
from hybridkv.alloc.checkpoint import AttentionBlock
from hybridkv.alloc.organization import StateKind
from hybridkv.alloc.pages import PagePool
from hybridkv.alloc.prefix import PrefixIndex
from hybridkv.alloc.slots import SlotPool

PAGES = 65_536


def rows():
    yield from alloc_free()
    yield from evicting()
    yield from references()
    yield from slots()
    yield from finding()


def alloc_free():
    pool = PagePool("shared", PAGES)
    for n in (1, 16, 128):
        yield row(
            "pool.alloc_free",
            f"n={n}",
            "page",
            measure(lambda n=n: pool.release(pool.take(n, 0)), inner=2000),
            n,
        )
    held = [pool.take(128, 0) for _ in range(200)]
    for ids in held:
        pool.release(ids)
    times = measure(lambda: [pool.take(128, 0) for _ in range(200)], setup=lambda: free_all(pool))
    yield row("pool.alloc", "n=128", "page", times, 200 * 128)
    free_all(pool)
    times = measure(
        lambda taken: [pool.release(ids) for ids in taken],
        setup=lambda: ([pool.take(128, 0) for _ in range(200)],),
    )
    yield row("pool.free_uncached", "n=128", "page", times, 200 * 128)
    for size in (1_024, 65_536, 1_048_576):  # growth with the pool
        grown = PagePool("shared", size)
        times = measure(lambda grown=grown: grown.release(grown.take(128, 0)), inner=2000)
        yield row("pool.alloc_free", f"n=128 pages={size}", "page", times, 128)


def free_all(pool):
    held = np.flatnonzero(pool.references).astype(np.int32)
    if len(held):
        pool.release(held)
    return ()


def cached_pool():
    """400 chains of 128 published pages, none held."""
    pool = PagePool("shared", PAGES)
    chains = [pool.take(128, 0) for _ in range(400)]
    for ids in chains:
        pool.publish(ids, object())
        pool.release(ids)
    return pool, chains


def evicting():
    def some(pool, _chains):
        for _ in range(100):
            for _ in range(128):
                page = pool.coldest()
                pool.unpublish(np.array([page], np.int32))
            pool.take(128, 0)

    yield row("pool.alloc_evicting", "n=128", "page", measure(some, setup=exhausted, rounds=5), 100 * 128)


def exhausted():
    pool, chains = cached_pool()
    pool.take(pool.free, 0)
    return pool, chains


def references():
    pool, chains = cached_pool()
    times = measure(lambda: [pool.reference(ids) or pool.release(ids, touch=False) for ids in chains])
    yield row("pool.reference_cached", "n=128", "page", times, 400 * 128)
    for ids in chains:
        pool.reference(ids)
    times = measure(lambda: [pool.reference(ids) for ids in chains], rounds=7)
    yield row("pool.reference_live", "n=128", "page", times, 400 * 128)
    times = measure(lambda p, c: [p.release(ids) for ids in c], setup=held_chains, rounds=7)
    yield row("pool.free_cached", "n=128", "page", times, 400 * 128)


def held_chains():
    pool, chains = cached_pool()
    for ids in chains:
        pool.reference(ids)
    return pool, chains


def slots():
    """With slabs that have room, then in an empty pool, where each time a page becomes a slab and is given back."""
    for shape, used in (("n=1", 1000), ("n=1 slabs=4000", 60_008), ("n=1 empty", 0)):
        store = SlotPool(PagePool("shared", 4096), 16)
        store.take_many(used, 2)
        times = measure(lambda store=store: store.release_one(store.take(2)), inner=5000)
        yield row("slot.alloc_free", shape, "slot", times)


def finding():
    index = PrefixIndex(16, 512, attention=True, recurrent=False)
    keys = [i.to_bytes(32, "little") for i in range(51_200)]
    for i, key in enumerate(keys):
        index.publish(AttentionBlock(16, {StateKind.ATTENTION: np.array([[i]], np.int32)}), key)
    some = keys[:: len(keys) // 1000]
    absent = [(10**6 + i).to_bytes(32, "little") for i in range(len(some))]
    for name, wanted in (("pool.find_hit", some), ("pool.find_miss", absent)):
        yield row(
            name,
            "keys=51200",
            "key",
            measure(lambda wanted=wanted: [index.blocks.get(k) for k in wanted], inner=20),
            len(wanted),
        )
