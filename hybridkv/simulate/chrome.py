"""A timeline in the Chrome trace event format, as Perfetto and chrome://tracing open it.

Owns track numbers and the JSON form. Does not know what a launch, a request or a planner is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike


class ChromeTrace:
    """Collects events and writes them. A track is "process/thread", or a thread of the first process.

    Times are seconds; the file holds microseconds, rounded to the nanosecond, so that equal runs give equal bytes.
    """

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}
        self._threads: dict[str, tuple[int, int]] = {}

    def span(
        self, name: str, track: str, start_s: float, duration_s: float, args: Mapping[str, Any] | None = None
    ) -> None:
        """Add something that lasts. `args` appear in the viewer's detail pane."""
        self._add(name, "X", track, start_s, dur=_micros(duration_s), args=dict(args or {}))

    def counter(self, name: str, time_s: float, values: Mapping[str, float], track: str = "") -> None:
        """Add one sample of every series in `values`; the viewer stacks them."""
        self._add(name, "C", track, time_s, args=dict(values))

    def flow(self, name: str, identity: int, source: tuple[str, float], target: tuple[str, float]) -> None:
        """Draw an arrow from the span at `source` to the one at `target`, each a track and a time inside it."""
        self._add(name, "s", *source, id=identity, cat="flow")
        self._add(name, "f", *target, id=identity, cat="flow", bp="e")

    def write(self, path: str | PathLike[str]) -> None:
        """Write everything collected so far."""
        document = {"displayTimeUnit": "ms", "traceEvents": self._events}
        Path(path).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")

    def _add(self, name: str, phase: str, track: str, time_s: float, **more: Any) -> None:
        process, thread = self._track(track)
        self._events.append(
            {"name": name, "ph": phase, "pid": process, "tid": thread, "ts": _micros(time_s), **more}
        )

    def _track(self, track: str) -> tuple[int, int]:
        if track not in self._threads:
            process, _, thread = track.rpartition("/")
            if process not in self._processes:
                self._processes[process] = len(self._processes) + 1
                self._name("process_name", self._processes[process], 0, process or "hybridkv")
            self._threads[track] = (self._processes[process], len(self._threads) + 1)
            self._name("thread_name", *self._threads[track], thread or "events")
        return self._threads[track]

    def _name(self, kind: str, process: int, thread: int, name: str) -> None:
        self._events.append({"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}})


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
