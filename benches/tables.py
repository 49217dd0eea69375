"""Step tables: the rows `tables.update`. Decode steps in which nothing changes, and those in which every row crosses a block."""

import gc
import statistics
import time

import numpy as np

from benches.layouts import cache
from hybridkv.arena import Arena, StepTables
from hybridkv.schedule.hybrid import HybridConfig, HybridPlanner

STEPS = 120


def rows():
    for seqs in (64, 256, 512):
        yield from updates("fa+1", seqs)
    yield from updates("fa+3", 256)


def updates(layout, seqs):
    c = cache(layout, 16)
    config = HybridConfig(token_budget=1024 * seqs, max_running=seqs, cut_at_boundaries=False)
    planner = HybridPlanner(c, config)
    for r in range(seqs):
        planner.submit(r, (7919 * r + np.arange(1024)) % 50_000, STEPS + 20)
    arena = Arena(c.organization, {name: pool.size for name, pool in c.storage.pools.items()})
    tables = StepTables(arena, c, rows=seqs, tokens=1024 * seqs, context=4096, updates=4 * seqs)
    still, crossing = [], []
    gc.collect()
    gc.disable()
    for _ in range(STEPS):
        step = planner.plan()
        start = time.perf_counter()
        tables.update(step)
        taken = time.perf_counter() - start
        if step.decode_rows == seqs:
            (crossing if step.plans else still).append(taken * 1e6)
        planner.commit(step, np.zeros(len(step.handles), np.int64))
    gc.enable()
    for name, us in (("still", still), ("all rows cross", crossing)):
        shape = f"{layout} block=16 seqs={seqs} {name}"
        times = {"us": min(us), "us_median": statistics.median(us)}
        yield {"engine": "hybridkv", "id": "tables.update", "shape": shape, "unit": "step"} | times
