"""What commands share: tables that fit a terminal, progress on stderr, JSON rows, words for amounts of memory.

Progress bars are rich's where it is installed (extra `cli`); without it the same facts come as plain lines.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from hybridkv.errors import UsageError

UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
}


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout: the first column to the left, numbers to the right, narrower gaps where the terminal is."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    room = get_terminal_size().columns if sys.stdout.isatty() else 0
    gap = " " if 0 < room < sum(widths) + 2 * (len(widths) - 1) else "  "
    print(f"\n{title}")
    for line in (heads, *rows):
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        cells[0] = line[0].ljust(widths[0])
        print(gap.join(cells).rstrip())
        if line is heads:
            print(gap.join("-" * width for width in widths))


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Progress on stderr while something long runs: call it with (done, total). A bar where rich and a terminal are."""
    bar = _bar() if sys.stderr.isatty() else None
    if bar is None:
        print(f"{label} ...", file=sys.stderr, flush=True)
        yield lambda *_: None
        return
    with bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def write_json(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows for machines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(rows), indent=1) + "\n", encoding="utf-8")


def parse_bytes(text: str, name: str) -> int:
    """An amount of memory: 24GiB, 512MB, or plain bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B|)", text.strip())
    if not found or float(found[1]) <= 0:
        raise UsageError(f"{name} must be an amount of memory such as 24GiB, got {text!r}")
    return int(float(found[1]) * UNITS[found[2]])


def parse_list(text: str, name: str) -> list[str]:
    """Items between commas, at least one."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise UsageError(f"{name} must name at least one item, got {text!r}")
    return items


def parse_seeds(text: str) -> list[int]:
    """Seeds: 1,2,5 or ranges 42000-42011."""
    seeds: list[int] = []
    for item in parse_list(text, "seeds"):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if not found or (found[2] and int(found[2]) < int(found[1])):
            raise UsageError(f"seeds must be numbers or ranges such as 42000-42011, got {item!r}")
        seeds += range(int(found[1]), int(found[2] or found[1]) + 1)
    return seeds


def human_bytes(count: float) -> str:
    """A size with three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
