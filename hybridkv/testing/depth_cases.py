"""Random cases for depth planners, and what must hold for every one of them (depth-batching properties 1 to 8).

Owns the drawing and the audit. Does not know how a planner works: it sees cases, entries and counts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from hybridkv.schedule.depth import DepthPlanner, Entry, Preemption, Stage, config_of, play_case
from hybridkv.schedule.depth.config import OVERTAKEN_AT_MOST

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from hybridkv.schedule.depth import DepthConfig
    from hybridkv.schedule.depth.batch import Row

Case = dict[str, Any]


def draw_case(rng: random.Random) -> Case:
    """A small case: any mode, W 1 to 8, any K and S, M from 1, with and without a pool, with and without knobs."""
    width = rng.randint(1, 8)
    max_loops = rng.randint(1, 5)
    resident = rng.random() < 0.25
    pressed = not resident and rng.random() < 0.6
    count = rng.randint(1, 16 if pressed else 9)
    requests = [_draw_request(rng, index, max_loops, resident, pressed) for index in range(count)]
    case = {
        "mode": rng.choice(("cb", "norefill", "refill", "refill")),
        "W": width,
        "K": rng.randint(1, width),
        "M": rng.choice((1, 2, 3, 5, 8, 13, 8192)),
        "S": rng.choice((None, rng.randint(1, width))),
        "rho": rng.choice((None, 0.0, 0.2, 0.5)),
        "rmax": max_loops,
        "resident": resident,
        "planes": rng.choice(("mixed", "mixed", "aged", "fifo")),
        "kv": _draw_pool(rng, requests) if pressed else None,
        "requests": requests,
    }
    if rng.random() < 0.4:
        case["knobs"] = _draw_knobs(rng)
    return case


def _draw_request(
    rng: random.Random, index: int, max_loops: int, resident: bool, pressed: bool
) -> dict[str, Any]:
    tokens = rng.randint(1 if resident else 0, 10 if pressed else 5)
    return {
        "id": f"r{index}",
        "prompt": rng.choice((1, 2, rng.randint(1, 12), rng.randint(8, 24))),
        "depths": [rng.randint(1, max_loops) for _ in range(tokens)],
        "arrive": rng.choice((0, 0, rng.randint(0, 40))),
    }


def _draw_pool(rng: random.Random, requests: list[dict[str, Any]]) -> dict[str, Any]:
    block_tokens = rng.choice((1, 2, 4, 16))
    needs = [-(-(r["prompt"] + len(r["depths"]) + 1) // block_tokens) for r in requests]
    return {
        "blocks": max(needs) + rng.choice((0, 1, rng.randint(0, max(1, sum(needs) // 3)))),
        "block_tokens": block_tokens,
        "preemption": rng.choice(("offload", "recompute")),
        "allow_semantic_change": True,
        "admission": rng.choice(("demand", "demand", "demand", "reserve")),
    }


def _draw_knobs(rng: random.Random) -> dict[str, Any]:
    return {
        "age_bound": rng.choice((1, 3, 8)),
        "idle_order": rng.choice(("prefill_first", "coda_first")),
        "max_prefill_run": rng.choice((None, 1, 2)),
        "retire_lag": rng.choice((0, 1)),
    }


class Audit:
    """Watches one case, entry by entry, and knows at the end whether its sums are right. Violations raise AssertionError."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.case = case
        self.config: DepthConfig = config_of(case).clamped()
        self.emitted = self.tokens = self.loops = self.loop_rows = self.full_rows = 0
        self.stage_rows: Counter[Stage] = Counter()
        self.recomputed = False
        self.passed: dict[str, int] = {}
        """By request in the core: recurrent launches in a row that left it out."""

    def run(self) -> Audit:
        """Play the case, then check the totals."""
        planner = play_case(self.case, self.see)
        self._check_totals(planner)
        return self

    def see(self, entry: Entry) -> None:
        """Check one entry."""
        counts, width = entry.counts, self.config.width
        assert counts.q_r + counts.q_c <= width
        if self.config.pool is not None:
            assert counts.free is not None
            assert 0 <= counts.free <= self.config.pool.blocks
        if entry.stage in {Stage.STALL, Stage.RESTORE, Stage.PREEMPT}:
            pool = self.config.pool
            assert pool is not None
            self.recomputed |= entry.stage is Stage.PREEMPT and pool.preemption is Preemption.RECOMPUTE
            return
        assert counts.rows == len(entry.rows) >= 1
        assert entry.stage is Stage.PREFILL or counts.rows <= width
        assert counts.tokens <= self.config.prefill_tokens
        self.emitted += counts.emitted
        self.tokens += counts.tokens
        self.loops += counts.loops
        self.loop_rows += counts.loops * counts.rows
        self.stage_rows[entry.stage] += counts.rows
        if entry.stage is Stage.PRELUDE:
            self.passed.update((row.request, 0) for row in entry.rows)
        elif entry.stage is Stage.RECURRENT:
            self._age(entry.rows, entry.exits)  # pyright: ignore[reportArgumentType]  (rows of a launch)

    def _age(self, rows: tuple[Row, ...], exits: tuple[str, ...]) -> None:
        """Under `aged` nobody is passed over more than the bound and rmax - 1 (property 8)."""
        ran = {row.request for row in rows}
        for request in self.passed:
            self.passed[request] = 0 if request in ran else self.passed[request] + 1
        if self.config.planes == "aged":
            bound = self.config.age_bound + self.config.max_loops - 1
            assert max(self.passed.values()) <= bound
        for request in exits:
            del self.passed[request]

    def _check_totals(self, planner: DepthPlanner) -> None:
        requests, config = self.case["requests"], self.config
        seats = min(config.width, len(requests)) if self.case["resident"] else 0
        decode = sum(len(r["depths"]) for r in requests)
        assert self.emitted == decode + len(requests) - seats
        assert self.loops >= -(-self.loop_rows // config.width)
        assert planner.idle
        assert planner.unfinished == 0
        if config.pool is not None:
            assert planner.queues.free == config.pool.blocks
        if self.recomputed:
            return
        assert self.tokens == sum(r["prompt"] for r in requests[seats:])
        depths = sum(sum(r["depths"]) for r in requests)
        if config.mode == "cb":
            assert self.stage_rows[Stage.DECODE] == decode
            assert self.loop_rows == config.max_loops * decode
        else:
            assert self.stage_rows[Stage.PRELUDE] == self.stage_rows[Stage.CODA] == decode
            assert self.stage_rows[Stage.RECURRENT] == self.loop_rows == depths


def check_case(case: Case) -> None:
    """Everything that must hold for one case by itself."""
    Audit(case).run()


def check_fullest_coda(case: Case) -> None:
    """With K = W = residents, refill is no-refill launch for launch (property 4)."""
    residents = [{**request, "depths": request["depths"] or [1], "arrive": 0} for request in case["requests"]]
    width = len(residents)
    plain = {
        **case, "W": width, "K": width, "M": 8192, "S": None, "kv": None, "resident": True, "planes": "mixed",
        "requests": residents, "knobs": None,
    }  # fmt: skip
    refill, norefill = ([], [])
    play_case({**plain, "mode": "refill"}, refill.append)
    play_case({**plain, "mode": "norefill"}, norefill.append)
    assert len(refill) == len(norefill)
    assert all(mine == other for mine, other in zip(refill, norefill, strict=True))


__all__ = ["OVERTAKEN_AT_MOST", "Audit", "Case", "check_case", "check_fullest_coda", "draw_case"]
