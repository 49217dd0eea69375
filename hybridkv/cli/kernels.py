"""`python -m hybridkv kernels`: every kernel compiled for every model and target, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridkv.cli.output import print_table, write_json
from hybridkv.errors import UsageError

if TYPE_CHECKING:
    from hybridkv.testing.aot import Row

BUDGETS = Path(__file__).parent.parent / "triton" / "budgets.json"
DEFAULT_TARGETS = "sm_80,sm_90,sm_100,gfx942"
LONG = ("reductions", "narrow")  # fields of a row that only the JSON has


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "kernels", help="compile every kernel and print registers, spills, access widths"
    )
    parser.add_argument(
        "--targets", default=DEFAULT_TARGETS, help=f"comma-separated; default {DEFAULT_TARGETS}"
    )
    parser.add_argument("--only", default="", help="cases whose 'kernel geometry' contains this text")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    parser.add_argument(
        "--widen-budgets", action="store_true", help="change the checked-in budgets so that all rows fit"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile, print one row per kernel, model and target; 1 where a budget is exceeded."""
    from hybridkv.testing import aot

    targets = args.targets.split(",")
    for target in targets:
        if target not in aot.TARGETS:
            raise UsageError(f"targets must be among {', '.join(aot.TARGETS)}, got {target!r}")
    todo = [
        (case, t) for t in targets for case in aot.cases(t) if args.only in f"{case.name} {case.geometry}"
    ]
    rows: list[Row] = []
    for i, (case, target) in enumerate(todo, 1):
        print(f"[{i}/{len(todo)}] {case.name} {case.geometry} {target}", file=sys.stderr, flush=True)
        rows.append(aot.measure(case, target))
    if rows:
        heads = [name for name in rows[0]._fields if name not in LONG]
        print_table(
            "Kernels, compiled ahead of time",
            heads,
            [[_text(getattr(row, name)) for name in heads] for row in rows],
        )
        summary = aot.summary(rows)
        print_table("By target", list(summary[0]), [[str(v) for v in line.values()] for line in summary])
    if args.json:
        write_json(args.json, [row._asdict() for row in rows])
    budgets = json.loads(BUDGETS.read_text())
    if args.widen_budgets:
        budgets = aot.widened(budgets, rows)
        lines = (f"{json.dumps(key)}: {json.dumps(budget)}" for key, budget in budgets.items())
        BUDGETS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    broken = aot.violations(rows, budgets)
    print("\n".join(broken) or f"{len(rows)} rows within their budgets", file=sys.stderr)
    return 1 if broken else 0


def _text(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
