"""Steps: the rows `planner.*`. Prompts of 1,024 tokens, a budget of 8,192; pure decode steps that allocate nothing, and all."""

import gc
import statistics
import time

import numpy as np

from benches.layouts import LAYOUTS, cache
from hybridkv.schedule.hybrid import HybridConfig, HybridPlanner

STEPS = 200


def rows():
    for layout in LAYOUTS:
        for seqs in (16, 64, 256):
            yield from steps(layout, seqs)
            yield from steps(layout, seqs, together=True)
    for seqs in (1024, 4096):  # growth with sequences
        yield from steps("fa+1", seqs, pages=600_000, together=True)
    yield from steps("fa+1", 256, pages=1_000_000, together=True)  # growth with pages


def steps(layout, seqs, *, pages=65_536, together=False):
    """`together`: all prompts start in one step, so that rows cross blocks in the same step and in others none does."""
    budget = 1024 * seqs if together else 8192
    config = HybridConfig(token_budget=budget, max_running=seqs, cut_at_boundaries=not together)
    planner = HybridPlanner(cache(layout, 16, pages), config)
    for r in range(seqs):
        planner.submit(r, (7919 * r + np.arange(1024)) % 50_000, 2 * STEPS + 200)
    prefill, plans, commits, still_plans, still_commits = [], [], [], [], []
    gc.collect()
    gc.disable()
    while len(plans) < STEPS:
        start = time.perf_counter()
        step = planner.plan()
        planned = time.perf_counter()
        tokens = np.zeros(len(step.handles), np.int64)
        ready = time.perf_counter()
        planner.commit(step, tokens)
        done = time.perf_counter()
        if step.decode_rows < seqs:
            prefill.append(planned - start)
            continue
        plans.append(planned - start)
        commits.append(done - ready)
        if not step.plans and not (step.stop % 16 == 0).any():  # nothing is allocated, nothing published
            still_plans.append(planned - start)
            still_commits.append(done - ready)
    gc.enable()
    shape = f"{layout} block=16 seqs={seqs}"
    if together:
        both = [a + b for a, b in zip(still_plans, still_commits, strict=True)]
        shape += f" pages={pages}" if pages != 65_536 else ""
        yield entry("planner.still_step", shape, both)
        return
    yield entry("planner.decode_step", shape, plans)
    yield entry("planner.commit_step", shape, commits)
    yield entry("planner.prefill_step_max", shape + " budget=8192", [max(prefill[:5])])


def entry(name, shape, seconds):
    best, median = min(seconds) * 1e6, statistics.median(seconds) * 1e6
    return {"engine": "hybridkv", "id": name, "shape": shape, "unit": "step", "us": best, "us_median": median}
