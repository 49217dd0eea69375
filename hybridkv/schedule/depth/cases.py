"""Whole cases in the JSON form of the golden schedules: a case in, its trace out (D9, D43).

Owns the reading of cases and the arrival rule. Does not know how launches are chosen.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from hybridkv.errors import UsageError
from hybridkv.geometry.checks import size
from hybridkv.schedule.depth.config import DepthConfig, DepthRequest, KVPool
from hybridkv.schedule.depth.planner import DepthPlanner
from hybridkv.schedule.exits import effective_depth

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hybridkv.schedule.depth.batch import Entry

_KNOBS = frozenset({"age_bound", "idle_order", "max_prefill_run", "retire_lag"})


def config_of(case: Mapping[str, Any]) -> DepthConfig:
    """The configuration that a case names."""
    knobs = dict(case.get("knobs") or {})
    if unknown := sorted(knobs.keys() - _KNOBS):
        raise UsageError(f"knobs must be among {', '.join(sorted(_KNOBS))}, got {', '.join(unknown)}")
    rho = case.get("rho")
    return DepthConfig(
        mode=case["mode"],
        width=case["W"],
        min_coda=case.get("K", 1),
        prefill_tokens=case.get("M", 8192),
        open_slots=case.get("S"),
        headroom=0.0 if rho is None else rho,
        max_loops=case["rmax"],
        lookahead=case.get("lookahead", False),
        min_signal=case.get("rmin_signal", 1),
        planes=case.get("planes", "mixed"),
        layout=case.get("layout", "depth_indexed"),
        pool=KVPool(**case["kv"]) if case.get("kv") is not None else None,
        **knobs,
    )


def request_of(item: Mapping[str, Any], config: DepthConfig) -> DepthRequest:
    """The request that a case lists, its signals turned into effective depths (D2)."""
    if "signals" in item:
        depths = tuple(
            effective_depth(signal, config.max_loops, floor=config.min_signal, delay=int(config.lookahead))
            for signal in item["signals"]
        )
    else:
        depths = tuple(item["depths"])
    return DepthRequest.recorded(item["id"], item["prompt"], depths)


def run_case(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every launch and event of a case, in order, as JSON."""
    entries: list[dict[str, Any]] = []
    play_case(case, lambda entry: entries.append(entry.as_json()))
    return entries


def play_case(case: Mapping[str, Any], trace: Callable[[Entry], None]) -> DepthPlanner:
    """Run a case to its end, and hand every entry to `trace`. Bad cases are refused before anything runs (D5, D6)."""
    planner = DepthPlanner(config_of(case), trace)
    requests = [request_of(item, planner.config) for item in case["requests"]]
    arrivals: list[int] = [item.get("arrive", 0) for item in case["requests"]]
    if len({request.id for request in requests}) < len(requests):
        raise UsageError("requests must have distinct ids, got one twice")
    for request, arrive in zip(requests, arrivals, strict=True):
        request.check(planner.config)
        size(f"arrive of {request.id!r}", arrive, least=0)
        if case.get("resident"):
            size(f"decode_tokens of resident {request.id!r}", request.decode_tokens)
    seats = min(planner.config.width, len(requests)) if case.get("resident") else 0
    planner.seat(requests[:seats])
    order = sorted(range(seats, len(requests)), key=lambda index: arrivals[index])
    _play(planner, deque([(arrivals[index], requests[index]) for index in order]))
    return planner


def _play(planner: DepthPlanner, arrivals: deque[tuple[int, DepthRequest]]) -> None:
    while planner.unfinished or arrivals:
        now = planner.launches
        if arrivals and planner.idle:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            planner.submit(arrivals.popleft()[1])
        batch = planner.plan()
        if batch is not None:
            planner.apply(batch)
