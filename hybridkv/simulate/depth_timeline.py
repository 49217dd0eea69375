"""Schedules to look at: the paper's table of launches, and a timeline for Perfetto.

Owns the two views of a simulation's launches. Does not know who made them.
"""

from __future__ import annotations

import csv
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from hybridkv.schedule.depth import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hybridkv.simulate.chrome import ChromeTrace
    from hybridkv.simulate.depth import LaunchSeen

LAUNCHES = 2000
"""Launches of a run that a view keeps: a whole run of ShareGPT has 40,000, more than one looks at."""


class ScheduleLine(NamedTuple):
    """One launch, in the columns of the paper's schedule tables."""

    launch: int
    stage: str
    b: int
    detail: str
    q_r: int
    q_c: int
    q_p: int


class ScheduleTable:
    """Observer that keeps the first launches of a run as lines."""

    def __init__(self, limit: int = LAUNCHES) -> None:
        self.lines: list[ScheduleLine] = []
        self._limit = limit

    def __call__(self, seen: LaunchSeen) -> None:
        """Add a launch."""
        if len(self.lines) < self._limit:
            counts = seen.entry.counts
            number = len(self.lines) + 1
            queues = counts.q_r, counts.q_c, counts.q_p
            self.lines.append(
                ScheduleLine(number, seen.batch.stage.value, counts.rows, detail(seen), *queues)
            )

    def write(self, path: Path) -> None:
        """Write the lines as CSV."""
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(("launch", "stage", "B", "detail", "Q_R", "Q_C", "Q_P"))
            table.writerows(self.lines)


class Timeline:
    """Observer that draws the first launches of a run: a track a stage, and the queues as counters."""

    def __init__(self, chrome: ChromeTrace, name: str, limit: int = LAUNCHES) -> None:
        self._chrome = chrome
        self._name = name
        self._left = limit

    def __call__(self, seen: LaunchSeen) -> None:
        """Draw a launch."""
        if self._left == 0:
            return
        self._left -= 1
        stage, counts = seen.batch.stage.value, seen.entry.counts
        args = {
            "B": counts.rows,
            "bucket": seen.batch.bucket,
            "detail": detail(seen),
            "context": seen.context,
        }
        self._chrome.span(
            f"{stage} {counts.rows}", f"{self._name}/{stage}", seen.start_s, seen.duration_s, args
        )
        queues = {"Q_R": counts.q_r, "Q_C": counts.q_c, "Q_P": counts.q_p}
        self._chrome.counter("queues", seen.start_s + seen.duration_s, queues, track=f"{self._name}/queues")


def detail(seen: LaunchSeen) -> str:
    """What a launch did: loops with rows and exits ("2:14-9 3:5" is 14 rows at loop 2, 9 of which leave), or tokens."""
    batch, entry = seen.batch, seen.entry
    if batch.stage is Stage.RECURRENT:
        leaving = set(entry.exits)
        rows = Counter(row.loop for row in batch.rows)
        gone = Counter(row.loop for row in batch.rows if row.request in leaving)
        return " ".join(
            f"{loop}:{n}" + (f"-{gone[loop]}" if gone[loop] else "") for loop, n in sorted(rows.items())
        )
    if batch.stage is Stage.PREFILL:
        return f"{entry.counts.tokens} tokens"
    return f"{len(entry.done)} done" if entry.done else ""


def write_schedules(tables: Iterable[tuple[str, ScheduleTable]], path: Path) -> list[Path]:
    """Write one CSV a run: `path` for a single run, `stem-name.csv` for several."""
    tables = list(tables)
    paths = [
        path if len(tables) == 1 else path.with_name(f"{path.stem}-{name}{path.suffix}") for name, _ in tables
    ]
    for where, (_, table) in zip(paths, tables, strict=True):
        table.write(where)
    return paths
