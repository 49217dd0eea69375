"""What the depth planner itself costs: plan + apply of one launch, by stage and rows, on one core."""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator

from hybridkv.schedule.depth import DepthConfig, DepthPlanner, DepthRequest, KVPool

LAUNCHES = 600
ROWS = (64, 256, 1024)


def planner_of(rows: int, mode: str, planes: str = "mixed", pool: bool = False) -> DepthPlanner:
    """A planner in its steady state: `rows` residents whose tokens leave after loops 1 to 4."""
    blocks = KVPool(blocks=rows * 512, block_tokens=16, preemption="offload") if pool else None
    config = DepthConfig(
        mode=mode,
        width=rows,
        max_loops=4,
        min_coda=max(1, rows // 4),
        planes=planes,
        pool=blocks,
        prefill_tokens=8192,
    )
    planner = DepthPlanner(config)
    for row in range(rows):
        depths = bytes(1 + (row + token) % 4 for token in range(4096))
        planner.submit(DepthRequest.recorded(f"r{row}", 4 + row % 5, depths))
    return planner


def timed(planner: DepthPlanner, rows: int) -> dict[str, list[float]]:
    """Microseconds of plan + apply by stage, full launches only."""
    seen = defaultdict(list)
    for _ in range(LAUNCHES):
        start = time.perf_counter()
        batch = planner.plan()
        planner.apply(batch)
        micros = (time.perf_counter() - start) * 1e6
        if len(batch.rows) >= rows // 4:
            seen[batch.stage.value].append(micros * rows / len(batch.rows))
    return seen


def rows() -> Iterator[dict]:
    """One row for each stage and size; times are scaled to a launch of all rows."""
    variants = (
        ("refill", "mixed", False), ("refill", "mixed", True), ("refill", "aged", False), ("cb", "mixed", False)
    )  # fmt: skip
    for mode, planes, pool in variants:
        for count in ROWS:
            for stage, micros in timed(planner_of(count, mode, planes, pool), count).items():
                yield {
                    "engine": "hybridkv",
                    "id": f"depth-planner-{mode}-{planes}{'-pool' if pool else ''}-{stage}",
                    "shape": f"rows={count}",
                    "unit": "launch",
                    "us": round(statistics.fmean(micros), 2),
                    "us_median": round(statistics.median(micros), 2),
                }


if __name__ == "__main__":
    for row in rows():
        print(json.dumps(row))
