"""`python -m hybridkv plan`: which pools a memory budget buys, and what they hold, for every organization."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hybridkv.alloc.builders import BUILDERS
from hybridkv.alloc.capacity import Mix, concurrent_requests, largest, request_mix
from hybridkv.alloc.organization import Organization
from hybridkv.cli.output import human_bytes, parse_bytes, parse_list, print_table, write_json
from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.geometry import ModelGeometry

HEADS = ("org", "pages", "page", "block", "grid", "tokens", "ckpts", "requests", "unused")


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "plan",
        help="pool plans and capacities of a memory budget",
        description="Pool plans and capacities of a memory budget for every organization of a model.",
    )
    parser.add_argument(
        "--model", default="falcon-h1-7b", help="a preset, or a config.json (default: %(default)s)"
    )
    parser.add_argument(
        "--memory", default="6GiB", help="for caches on one device, all layers (default: %(default)s)"
    )
    parser.add_argument(
        "--context", type=int, default=4096, help="tokens of a request (default: %(default)s)"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default: %(default)s)")
    parser.add_argument("--organizations", default=",".join(BUILDERS), help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    geometry = load_geometry(args.model)
    if args.tp > 1:
        geometry = geometry.shard(args.tp)
    if args.context < 1:
        raise UsageError(f"context must be at least 1 token, got {args.context}")
    memory = parse_bytes(args.memory, "memory")
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for name in parse_list(args.organizations, "organizations"):
        try:
            rows.append(plan_row(Organization.named(name, geometry), memory, args.context))
        except UnsupportedError as error:
            skipped.append(str(error))
    title = f"{geometry.name}: {human_bytes(memory)} for caches, requests of {args.context} tokens"
    print_table(title, HEADS, [_cells(row) for row in rows])
    print(
        "tokens, ckpts: if the pools held nothing else. requests: running at once, nothing shared, with the"
    )
    print(
        "state they read and the state they write. unused: part of their pages that such requests leave empty."
    )
    for line in skipped:
        print(line)
    if args.json:
        write_json(args.json, rows)
    return 0


def load_geometry(model: str) -> ModelGeometry:
    """A preset by name, or the model of a config.json."""
    if Path(model).exists():
        return ModelGeometry.from_hf(model)
    return ModelGeometry.preset(model)


def plan_row(o: Organization, memory: int, context: int) -> dict[str, Any]:
    """One organization's plan."""
    g = o.geometry
    pages = o.pages(memory, layers="all")
    requests = concurrent_requests(o, context, pages)
    mix = request_mix(o, context)
    payload = requests * context * g.kv_bytes_per_sequence_token
    payload += requests * mix.checkpoints * g.recurrent_bytes_per_sequence
    taken = o.footprint(
        attention=mix.attention * requests, checkpoints=mix.checkpoints * requests, layers="all"
    )
    return {
        "organization": o.name,
        "model": g.name,
        "memory_bytes": memory,
        "pages": pages,
        "page_bytes": {p.name: p.page_bytes * g.layers_per_group for p in o.pools},
        "block_tokens": o.block_tokens,
        "grid_tokens": o.grid_tokens,
        "max_tokens": largest(o, Mix(1, 0), pages, layers="all") * o.block_tokens if o.attention_parts else 0,
        "max_checkpoints": largest(o, Mix(0, 1), pages, layers="all") if g.recurrent else 0,
        "context_tokens": context,
        "requests": requests,
        "unused_share": 1 - payload / taken if taken else 0.0,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["organization"],
        "+".join(str(count) for count in row["pages"].values()),
        "+".join(human_bytes(size) for size in row["page_bytes"].values()),
        str(row["block_tokens"]),
        str(row["grid_tokens"]),
        str(row["max_tokens"] or "-"),
        str(row["max_checkpoints"] or "-"),
        str(row["requests"]),
        f"{100 * row['unused_share']:.0f} %",
    ]
