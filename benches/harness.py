"""How the benches measure: one thread, garbage collector off, best and median of several rounds.

A row is `{engine, id, shape, unit, us, us_median}`; ids and shapes are those of the engines' table, so that ours and
theirs join. Wall time on a shared machine is noisy: compare rows of one run, and medians.
"""

import gc
import statistics
import time


def measure(action, *, rounds=15, inner=1, setup=None):
    """Microseconds of one `action`: (best, median) over rounds of `inner` calls. `setup` runs before each round."""
    taken = []
    for _ in range(rounds):
        arguments = setup() if setup else ()
        gc.collect()
        gc.disable()
        try:
            start = time.perf_counter()
            for _ in range(inner):
                action(*arguments)
            taken.append((time.perf_counter() - start) / inner * 1e6)
        finally:
            gc.enable()
    return min(taken), statistics.median(taken)


def row(bench, shape, unit, times, per=1):
    """One result; `per` units happened in one action."""
    best, median = times
    return {
        "engine": "hybridkv",
        "id": bench,
        "shape": shape,
        "unit": unit,
        "us": best / per,
        "us_median": median / per,
    }
