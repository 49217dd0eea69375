"""`python -m hybridkv demo`: the built-in workload over all six organizations, with plots. About a minute."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hybridkv.cli import replay
from hybridkv.cli.output import write_json


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("demo", help="the built-in workload over all six organizations")
    replay.add_settings(parser)
    parser.set_defaults(run=run, trace=None, plot=Path("out/demo"))


def run(args: argparse.Namespace) -> int:
    """Replay, then say what was seen and what to try next."""
    geometry = replay.load_geometry(args.model)
    workloads = replay.load_workloads(args)
    rows = replay.replay(args, replay.load_organizations(args.organizations, geometry), workloads)
    replay.print_rows(rows, replay.title(args, geometry, workloads))
    best = max(rows, key=lambda row: float(row["throughput"]))
    print(
        f"\nMost tokens a second here: {best['organization']}. Each request shares one of 8 contexts of 3,072 tokens."
    )
    print("Next: python -m hybridkv plan --model granite-4.0-h-micro --memory 24GiB")
    print("      python -m hybridkv replay TRACE --organizations s2,striped --headroom 0.19")
    if args.json:
        write_json(args.json, rows)
    return 0
