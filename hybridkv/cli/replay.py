"""`python -m hybridkv replay`: which memory organization fits a model, a budget and a traffic.

Drives the real planner and the real cache; only the duration of a step is modelled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridkv.alloc.builders import BUILDERS
from hybridkv.alloc.cache import CachePolicy
from hybridkv.alloc.organization import Organization
from hybridkv.cli.output import (
    human_bytes,
    parse_bytes,
    parse_list,
    parse_seeds,
    print_table,
    progress,
    write_json,
)
from hybridkv.cli.plan import load_geometry
from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.geometry import ModelGeometry
from hybridkv.schedule.hybrid import HybridConfig
from hybridkv.simulate.cache_only import block_curve, reuse
from hybridkv.simulate.engine import Run, simulate
from hybridkv.simulate.stats import Row, mean_rows, summarize
from hybridkv.simulate.workload import Arrival, PaperWorkload, read_trace, rescale

HEADS = ("org", "tok/s", "TTFT 50/99", "E2E 50/99", "depth", "avoid", "prefill", "preempt", "reclaim", "peak")
CURVE_TOKENS = (0.1e6, 1e6, 3e6, 10e6, 50e6)
CURVE_PLACEMENTS = ("every_block", "interval(2048)", "end_only", "end_junction")


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "replay",
        help="replay traffic through every memory organization",
        description="Replay a trace, or the built-in workload, through the real allocator and planner of each organization.",
    )
    parser.add_argument(
        "trace", nargs="?", type=Path, metavar="TRACE", help="Mooncake JSONL, Azure or ServeGen CSV"
    )
    add_settings(parser)
    parser.add_argument(
        "--cache-only", action="store_true", help="reuse alone: no clock, one request at a time"
    )
    parser.set_defaults(run=run)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Options that the demo shares."""
    add = parser.add_argument
    add("--model", default="falcon-h1-7b", help="a preset, or a config.json (default: %(default)s)")
    add(
        "--budget",
        default="b83",
        help="b83: 83 uniform units a layer, as in the paper; or 6GiB over all layers (default: %(default)s)",
    )
    add("--organizations", default=",".join(BUILDERS), help="default: %(default)s")
    add("--rate", type=float, help="mean arrivals a second (default: 3 built-in, the trace's own otherwise)")
    add("--cap", type=int, default=63, help="sequences that run at once (default: %(default)s)")
    add(
        "--q",
        type=float,
        default=1.0,
        help="built-in: part of requests with a shared context (default: %(default)s)",
    )
    add(
        "--headroom",
        default="0",
        help="part of the pages that admissions leave obtainable (default: %(default)s)",
    )
    add(
        "--placement",
        default="every_block",
        help="every_block, end_only, end_junction, interval(N) (default: %(default)s)",
    )
    add("--seeds", default="42000", help="built-in: 1,2 or 42000-42011 (default: %(default)s)")
    add("--requests", type=int, help="the first so many requests (default: 300 built-in, all of a trace)")
    add(
        "--max-tokens",
        type=int,
        default=8192,
        help="leave out longer requests of a trace (default: %(default)s)",
    )
    add("--isolate", action="store_true", help="a salt for each request: nothing is shared between requests")
    add("--json", type=Path, metavar="FILE", help="write a row per organization and seed as JSON")
    add("--plot", type=Path, metavar="DIR", help="write PNG plots and Perfetto timelines there")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    geometry = load_geometry(args.model)
    workloads = load_workloads(args)
    organizations = load_organizations(args.organizations, geometry)
    if args.cache_only:
        return _cache_only(args, geometry, organizations, next(iter(workloads.values())))
    rows = replay(args, organizations, workloads)
    print_rows(rows, title(args, geometry, workloads))
    if geometry.name != "falcon-h1-7b":
        print("Step times are those of Falcon-H1-7B on an A100: compare organizations, not levels.")
    if args.json:
        write_json(args.json, rows)
    return 0


def replay(
    args: argparse.Namespace, organizations: Sequence[Organization], workloads: dict[int, list[Arrival]]
) -> list[Row]:
    """A row per organization and seed; plots and timelines of the first seed where asked for."""
    rows: list[Row] = []
    policy = CachePolicy(headroom=args.headroom, placement=args.placement, decode="update_shared")
    config = HybridConfig(max_running=args.cap)
    for o in organizations:
        pages = budget_pages(args.budget, o)
        for seed, arrivals in workloads.items():
            with progress(f"{o.name}, seed {seed}") as show:
                done = simulate(
                    o, pages, arrivals, policy=policy, config=config, isolate=args.isolate, progress=show
                )
            rows.append(summarize(done, o.name, seed))
            if args.plot and seed == next(iter(workloads)):
                draw(done, o.name, args)
    if args.plot:
        from hybridkv.simulate.report import plot_comparison

        plot_comparison(rows, f"{args.model}, {args.budget}", args.plot / "comparison.png")
        print(f"plots and timelines (open in ui.perfetto.dev): {args.plot}", file=sys.stderr)
    return rows


def draw(done: Run, name: str, args: argparse.Namespace) -> None:
    """One run's plot and timeline."""
    from hybridkv.simulate.report import plot_run, write_timeline

    args.plot.mkdir(parents=True, exist_ok=True)
    plot_run(done, f"{name}: {args.model}, {args.budget}", args.plot / f"{name}.png")
    write_timeline(done, name, args.plot / f"{name}.trace.json")


def load_workloads(args: argparse.Namespace) -> dict[int, list[Arrival]]:
    """Arrivals by seed; a trace has the one seed 0."""
    if args.rate is not None and not args.rate > 0:
        raise UsageError(f"rate must be above 0, got {args.rate}")
    if args.requests is not None and args.requests < 1:
        raise UsageError(f"requests must be at least 1, got {args.requests}")
    if args.trace is None:
        workload = PaperWorkload(requests=args.requests or 300, rate=args.rate or 3.0, q=args.q)
        return {seed: workload.arrivals(seed) for seed in parse_seeds(args.seeds)}
    arrivals = read_trace(args.trace, limit=args.requests, max_tokens=args.max_tokens)
    return {0: rescale(arrivals, args.rate) if args.rate else arrivals}


def load_organizations(names: str, geometry: ModelGeometry) -> list[Organization]:
    """Organizations by name; those that the model cannot have are said on stderr and left out."""
    found: list[Organization] = []
    for name in parse_list(names, "organizations"):
        try:
            found.append(Organization.named(name, geometry))
        except UnsupportedError as error:
            print(f"left out: {error}", file=sys.stderr)
    if not found:
        raise UsageError(f"organizations must name one that {geometry.name} can have, got {names}")
    return found


def budget_pages(text: str, o: Organization) -> dict[str, int]:
    """Pages of a budget: bN uniform units of one layer, or an amount of memory over all layers."""
    if text[:1] == "b" and text[1:].isdecimal():
        unit = o.geometry.uniform_unit
        if unit is None:
            raise UsageError(f"budget must be an amount of memory for {o.geometry.name}, got {text!r}")
        return o.pages(int(text[1:]) * unit.bytes)
    return o.pages(parse_bytes(text, "budget"), layers="all")


def title(args: argparse.Namespace, geometry: ModelGeometry, workloads: dict[int, list[Arrival]]) -> str:
    """What was run."""
    arrivals = next(iter(workloads.values()))
    source = args.trace.name if args.trace else f"built-in workload, q={args.q:g}, seeds {args.seeds}"
    rate = (len(arrivals) - 1) / max(1e-9, arrivals[-1].arrival_s - arrivals[0].arrival_s)
    return (
        f"{geometry.name}, {args.budget}, cap {args.cap}, headroom {args.headroom}: {len(arrivals)} requests at "
        f"{rate:.2f}/s ({source})"
    )


def print_rows(rows: Sequence[Row], head: str) -> None:
    """Means over seeds, one line an organization."""
    print_table(head, HEADS, [_cells(row) for row in mean_rows(rows)])
    print(
        "TTFT, E2E: seconds, p50/p99. depth: tokens cached at first admission. avoid, prefill: 1,000 tokens."
    )
    print("preempt, reclaim: times. peak: pages held at once.")


def _cells(row: Row) -> list[str]:
    def pair(name: str) -> str:
        values = (float(row[f"{name}_{p}"]) for p in ("p50", "p99"))
        return "/".join(f"{v:.2f}" if v < 1 else f"{v:.1f}" if v < 100 else f"{v:.0f}" for v in values)

    thousands = (f"{float(row[c]) / 1000:.0f}" for c in ("avoided_tokens", "prefill_tokens"))
    counts = (f"{float(row[c]):.0f}" for c in ("preemptions", "reclaims", "peak_pages"))
    depth = f"{float(row['joint_mean']):.0f}"
    return [
        str(row["organization"]),
        f"{float(row['throughput']):.1f}",
        pair("ttft"),
        pair("e2e"),
        depth,
        *thousands,
        *counts,
    ]


def _cache_only(
    args: argparse.Namespace,
    geometry: ModelGeometry,
    organizations: Sequence[Organization],
    arrivals: list[Arrival],
) -> int:
    """The block-hit curve, joint reuse by placement in a boundless cache, and joint reuse within the budget."""
    rows: list[dict[str, Any]] = []
    if arrivals[0].hash_ids:
        with progress("block-hit curve"):
            curve = block_curve(geometry, arrivals, CURVE_TOKENS)
        rows += [{"table": "curve", "cache_tokens": size, "block_hit": hit} for size, hit in curve.items()]
        heads = ["LRU cache of", *(f"{size / 1e6:g}M tokens" for size in curve)]
        print_table(
            "Block hits of a plain prefix cache",
            heads,
            [["hit", *(f"{100 * h:.1f} %" for h in curve.values())]],
        )
    lines: list[list[str]] = []
    for o, placement in _unbounded_cases(geometry):
        with progress(f"boundless cache, {placement}, grid {o.grid_tokens}") as show:
            found = reuse(o, arrivals, placement=placement, progress=show)
        row = {"table": "placement", "placement": placement, "grid_tokens": o.grid_tokens}
        rows.append(
            row
            | {
                "attention_hit": found.attention_hit,
                "joint_share": found.joint_share,
                "checkpoints": found.checkpoints,
            }
        )
        lines.append(
            [
                f"{placement}, grid {o.grid_tokens}",
                f"{100 * found.attention_hit:.2f} %",
                f"{100 * found.joint_share:.1f} %",
                str(found.checkpoints),
            ]
        )
    print_table(
        "Joint reuse in a boundless cache",
        ["placement", "attention hit", "joint share", "checkpoints"],
        lines,
    )
    lines = []
    for o in organizations:
        with progress(f"{o.name} within {args.budget}") as show:
            pages = budget_pages(args.budget, o)
            found = reuse(o, arrivals, pages=pages, placement=args.placement, progress=show)
        rows.append(
            {
                "table": "budget",
                "organization": o.name,
                "placement": args.placement,
                "joint_hit": found.joint_hit,
            }
        )
        size = sum(o.pool(name).page_bytes * count for name, count in pages.items())
        lines.append([o.name, human_bytes(size), f"{100 * found.joint_hit:.1f} %"])
    print_table(
        f"Joint token hit within the budget, {args.placement}",
        ["organization", "per layer", "joint hit"],
        lines,
    )
    if args.json:
        write_json(args.json, rows)
    return 0


def _unbounded_cases(geometry: ModelGeometry) -> list[tuple[Organization, str]]:
    """Placements on the paper's grid, and D0's coarser grid."""
    fine = Organization.named("s2", geometry)
    cases = (
        [(fine, placement) for placement in CURVE_PLACEMENTS]
        if geometry.recurrent
        else [(fine, "every_block")]
    )
    if geometry.recurrent and geometry.attention:
        cases.append((Organization.named("d0", geometry), "every_block"))
    return cases
