"""A planner keeps nothing of what is over: memory is flat however long it runs."""

import gc
import tracemalloc

import pytest

from hybridkv.schedule.depth import DepthConfig, DepthPlanner, DepthRequest, KVPool
from hybridkv.schedule.exits import ExitRouter, Threshold


def serve(planner, launches, start=0, router=None):
    """Keep five requests alive, for so many launches. Returns the number of the next request."""
    number, until = start, planner.launches + launches
    while planner.launches < until:
        while planner.unfinished < 5:
            planner.submit(
                DepthRequest(id=f"r{number % 40}", prompt=1 + number % 7, decode_tokens=number % 9)
            )
            number += 1
        batch = planner.plan()
        exits = None
        if router is not None and batch.stage == "prelude":
            router.begin(batch)
        elif router is not None and batch.stage == "recurrent":
            router.observe(batch, [float((row.position * 7 + row.loop) % 5) for row in batch.rows])
            exits = router.exits(batch)
        entry = planner.apply(batch, exits)
        if router is not None and entry is not None:
            router.forget(entry.done)
    return number


def planner_under_pressure():
    pool = KVPool(blocks=9, block_tokens=2, preemption="offload")
    return DepthPlanner(DepthConfig(mode="refill", width=4, max_loops=4, pool=pool, retire_lag=1))


def test_memory_is_flat():
    planner, router = planner_under_pressure(), ExitRouter(Threshold(1.0), max_loops=4)
    number = serve(planner, 3_000, router=router)
    tracemalloc.start()
    number = serve(planner, 2_000, number, router)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    serve(planner, 20_000, number, router)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 4_096
    assert len(router._rows) <= 5


@pytest.mark.nightly
def test_memory_is_flat_over_a_million_launches():
    planner = planner_under_pressure()
    number = serve(planner, 10_000)
    gc.collect()
    before = len(gc.get_objects())
    serve(planner, 1_000_000, number)
    gc.collect()
    after = len(gc.get_objects())
    print(f"{planner.launches:,} launches: {after - before:+} objects")
    assert after - before < 100
