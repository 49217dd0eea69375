"""What the depth planner itself costs: plan + apply of one launch, by stage and rows, on one core."""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator

from hybridkv.schedule.depth import DepthConfig, DepthPlanner, DepthRequest, KVPool, Stage

ROWS = (64, 256, 1024)
LAUNCHES = 400
PREFILLS = 40


def planner_of(rows: int, mode: str = "refill", *, planes: str = "mixed", pool: bool = False) -> DepthPlanner:
    """A planner with `rows` residents to be. In step with planes mixed, so that every launch has all rows; else spread."""
    blocks = KVPool(blocks=rows * 512, block_tokens=16, preemption="offload") if pool else None
    config = DepthConfig(mode=mode, width=rows, max_loops=4, planes=planes, pool=blocks, open_slots=1)
    planner = DepthPlanner(config)
    for row in range(rows):
        spread = row if planes == "aged" else 0
        depths = bytes(1 + (spread + token) % 4 for token in range(4096))
        planner.submit(DepthRequest.recorded(f"r{row}", 4, depths))
    return planner


def timed(planner: DepthPlanner, rows: int, launches: int = LAUNCHES) -> dict[str, list[float]]:
    """Microseconds of plan + apply by stage, once all rows decode. A launch counts if it has, or chose from, all rows."""
    seen = defaultdict(list)
    while planner.residents < rows:
        planner.apply(planner.plan())
    for _ in range(launches):
        start = time.perf_counter()
        batch = planner.plan()
        planner.apply(batch)
        micros = (time.perf_counter() - start) * 1e6
        chosen = batch.stage is Stage.RECURRENT and batch.plane is not None
        if chosen or len(batch.rows) == rows:
            seen[batch.stage.value].append(micros)
    return seen


def prefills(rows: int) -> list[float]:
    """Microseconds of the first launch, which admits 64 prompts: a build looks at no more (D20)."""
    seen = []
    for _ in range(PREFILLS):
        planner = planner_of(rows, pool=True)
        start = time.perf_counter()
        planner.apply(planner.plan())
        seen.append((time.perf_counter() - start) * 1e6)
    return seen


def rows() -> Iterator[dict]:
    """One row for each variant, stage and size."""
    variants = {
        "refill": {}, "refill pool": {"pool": True}, "refill aged": {"planes": "aged"}, "cb": {"mode": "cb"}
    }  # fmt: skip
    for name, settings in variants.items():
        for count in ROWS:
            for stage, micros in timed(planner_of(count, **settings), count).items():
                yield row(stage, f"rows={count} {name}", micros)
    yield row("prefill", "rows=64 refill pool", prefills(64))


def row(stage: str, shape: str, micros: list[float]) -> dict:
    return {
        "engine": "hybridkv",
        "id": f"depth.{stage}",
        "shape": shape,
        "unit": "launch",
        "us": round(min(micros), 2),
        "us_median": round(statistics.median(micros), 2),
    }


if __name__ == "__main__":
    for line in rows():
        print(json.dumps(line))
