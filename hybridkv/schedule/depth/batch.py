"""What the planner says: a stage batch to run, and the trace entry that it leaves behind (D43).

Owns the shapes and their JSON form. Does not know how they come about.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hybridkv.schedule.depth.config import RequestId

NO_PLANE = -1
"""The launch touches no KV plane of the core, or all of them."""


class Stage(StrEnum):
    """Launches, then events. A stall asks nothing of the engine and appears in the trace only."""

    PREFILL = "prefill"
    PRELUDE = "prelude"
    RECURRENT = "recurrent"
    CODA = "coda"
    DECODE = "decode"
    STALL = "stall"
    RESTORE = "restore"
    PREEMPT = "preempt"


class Row(NamedTuple):
    """One row of a launch. `serial` tells two lives of one request id apart.

    `position` is the first token position that the row computes, and so the number of tokens before it. `loop` is
    the loop that runs, all of them for prefill and decode; in a coda, the depth at which the token left.
    """

    request: RequestId
    position: int
    loop: int
    plane: int
    tokens: int
    serial: int


class Queues(NamedTuple):
    """Queue sizes Q_R, Q_C, Q_P, and free blocks (None without a pool)."""

    core: int
    coda: int
    waiting: int
    free: int | None


class StageBatch(NamedTuple):
    """One launch or event for the engine to carry out, then to be given to `apply`.

    `bucket` is the padded row count of its graph, None where no graph is used. `queues` count the launch's own rows.
    `plane` is set where the whole launch must run on one KV plane (D28).
    """

    number: int
    stage: Stage
    rows: tuple[Row, ...]
    bucket: int | None
    queues: Queues
    plane: int | None = None

    @property
    def graph(self) -> tuple[Stage, int | None, int | None]:
        """Key of the captured graph that runs this launch."""
        return self.stage, self.bucket, self.plane


class EventRow(NamedTuple):
    """A request that stalled, came back or was preempted; the last two only where it will be recomputed."""

    request: RequestId
    kv_tokens: int
    prompt: int | None = None
    depths_left: tuple[int, ...] | None = None


class Counts(NamedTuple):
    """Counts of one entry, and the queues after it."""

    rows: int
    tokens: int
    loops: int
    emitted: int
    q_r: int
    q_c: int
    q_p: int
    free: int | None


class Entry(NamedTuple):
    """One line of the trace: an event, or a launch that has completed."""

    stage: Stage
    rows: tuple[Row, ...] | tuple[EventRow, ...]
    exits: tuple[RequestId, ...]
    done: tuple[RequestId, ...]
    counts: Counts

    def as_json(self) -> dict[str, Any]:
        """The form of the golden schedules."""
        return {
            "stage": self.stage.value,
            "rows": [_row_json(self.stage, row) for row in self.rows],
            "exits": list(self.exits),
            "done": list(self.done),
            "counts": {name: count for name, count in self.counts._asdict().items() if count is not None},
        }


def _row_json(stage: Stage, row: Row | EventRow) -> dict[str, Any]:
    if isinstance(row, EventRow):
        known = {"request": row.request, "loop": None, "kv_tokens": row.kv_tokens}
        if row.prompt is None:
            return known
        return {**known, "prompt": row.prompt, "depths_left": list(row.depths_left or ())}
    loop = row.loop if stage in {Stage.RECURRENT, Stage.DECODE} else None
    known = {"request": row.request, "loop": loop}
    return {**known, "tokens": row.tokens} if stage is Stage.PREFILL else known
