"""`python -m hybridkv depth`: simulate depth batching of a looped model, offline or at a request rate.

Owns arguments, tables and files. The numbers come from `hybridkv.simulate.depth`.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridkv.cli.output import parse_list, parse_seeds, print_table, progress, write_json
from hybridkv.errors import UsageError
from hybridkv.schedule.depth import Mode
from hybridkv.schedule.latency import LATENCIES
from hybridkv.simulate.chrome import ChromeTrace
from hybridkv.simulate.depth import DepthRow, Observer, compare
from hybridkv.simulate.depth_timeline import ScheduleTable, Timeline, write_schedules
from hybridkv.simulate.depth_workload import WORKLOADS, Arrivals, default_depths, draw_workload, read_trace

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

COLUMNS = {
    "mode": "mode", "k": "K", "seed": "seed", "rate": "rate", "throughput": "tokens/s", "speedup": "speedup",
    "bound": "bound", "share_of_bound": "share", "recurrent_batch": "core B", "coda_batch": "coda B",
    "boundary_share": "boundary", "normalized_latency_s": "s/token",
}  # fmt: skip
"""What the table shows of a row, and under which heading: short enough for a terminal of 80 columns."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `depth` command."""
    parser = subparsers.add_parser(
        "depth",
        help="continuous depth batching of a looped model",
        description="Simulate continuous depth batching with a latency model; no device is needed. Times are modelled.",
    )
    parser.add_argument(
        "--model", default="ouro-1.4b", choices=sorted(LATENCIES), help="default: %(default)s"
    )
    parser.add_argument(
        "--workload",
        default="sharegpt",
        metavar="NAME|FILE",
        help=f"{', '.join(WORKLOADS)}, or a CSV or JSONL trace",
    )
    parser.add_argument("--width", type=int, help="residents W (default: the workload's, 64 or 8)")
    parser.add_argument("--modes", default="cb,norefill,refill", help="default: %(default)s")
    parser.add_argument(
        "--k", default="1", metavar="K,...", help="smallest coda batches of refill (default: 1)"
    )
    parser.add_argument(
        "--rate", metavar="R,...", help="Poisson arrivals a second, or 'trace'; without it all arrive at 0"
    )
    parser.add_argument("--seeds", default="0", metavar="S,...", help="1,2 or 1-9 (default: %(default)s)")
    parser.add_argument("--requests", type=int, help="how many (default: the workload's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write plots (needs matplotlib)")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="write the first launches of every run: .json a Perfetto timeline, else CSV",
    )  # fmt: skip
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    views = _Views(args.trace)
    rows = _rows(args, views)
    title = f"{args.model}, {Path(args.workload).stem}, W = {_width(args)}"
    _print(rows, title)
    views.write()
    if args.json is not None:
        write_json(args.json, [asdict(row) for row in rows])
    if args.plot is not None:
        from hybridkv.simulate.depth_plot import plot_rows

        for path in plot_rows(rows, args.plot, title):
            print(path, file=sys.stderr)
    return 0


def _rows(args: argparse.Namespace, views: _Views) -> list[DepthRow]:
    runs = _runs(parse_list(args.modes, "modes"), _integers("k", args.k))
    rates = parse_list(args.rate, "rate") if args.rate else [None]
    rows: list[DepthRow] = []
    for seed in parse_seeds(args.seeds):
        drawn = _requests(args, seed)
        for rate in rates:
            arrivals, per_second = _arrivals(drawn, rate, seed)
            label = f"seed {seed}: {len(drawn.requests)} requests, {drawn.tokens} tokens"
            with progress(label if rate is None else f"{label}, rate {rate}") as tell:
                rows += compare(
                    args.model, arrivals, runs, width=_width(args), seed=seed, rate=per_second,
                    observe=views.observer, progress=tell,
                )  # fmt: skip
            views.done = True
    return rows


def _runs(modes: Sequence[str], ks: Sequence[int]) -> list[tuple[str, int]]:
    for mode in modes:
        if mode not in set(Mode):
            raise UsageError(f"modes must be among {', '.join(Mode)}, got {mode!r}")
    return [(mode, k) for mode in modes for k in (ks if mode == "refill" else ks[:1])]


def _width(args: argparse.Namespace) -> int:
    named = WORKLOADS.get(args.workload)
    return args.width if args.width is not None else named.width if named is not None else 64


def _requests(args: argparse.Namespace, seed: int) -> Arrivals:
    depths = default_depths(LATENCIES[args.model].max_loops)
    named = WORKLOADS.get(args.workload)
    if named is None:
        return read_trace(args.workload, depths, seed, requests=args.requests)
    return draw_workload(named, depths, seed, requests=args.requests)


def _arrivals(drawn: Arrivals, rate: str | None, seed: int) -> tuple[Arrivals, float | None]:
    if rate is None:
        return Arrivals(drawn.requests, (0.0,) * len(drawn.requests)), None
    if rate == "trace":
        if drawn.times[-1] <= 0:
            raise UsageError("rate must be a number for a workload without arrival times, got 'trace'")
        return drawn, len(drawn.requests) / drawn.times[-1]
    try:
        return drawn.poisson(float(rate), seed), float(rate)
    except ValueError:
        raise UsageError(f"rate must be a positive number or 'trace', got {rate!r}") from None


class _Views:
    """Timelines or schedule tables of the runs of the first seed and rate."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.chrome = ChromeTrace()
        self.tables: list[tuple[str, ScheduleTable]] = []
        self.done = False

    def observer(self, name: str) -> Observer | None:
        if self.path is None or self.done:
            return None
        if self.path.suffix == ".json":
            return Timeline(self.chrome, name)
        self.tables.append((name, ScheduleTable()))
        return self.tables[-1][1]

    def write(self) -> None:
        if self.path is None:
            return
        if self.path.suffix == ".json":
            self.chrome.write(self.path)
        else:
            write_schedules(self.tables, self.path)


def _integers(name: str, text: str) -> list[int]:
    try:
        return [int(item) for item in parse_list(text, name)]
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{name} must be integers separated by commas, got {text!r}") from None


def _print(rows: Sequence[DepthRow], title: str) -> None:
    shown = [c for c in COLUMNS if c in {"mode", "bound"} or len({getattr(row, c) for row in rows}) > 1]
    lines = [[_cell(getattr(row, c)) for c in shown] for row in rows]
    print_table(title, [COLUMNS[c] for c in shown], lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3f}" if value < 10 else f"{value:.1f}"
    return str(value)
