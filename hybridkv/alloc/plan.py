"""What calls of `HybridCache` answer: plans to execute, and refusals. Values; none of them is updated later."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.alloc.checkpoint import Checkpoint, State
from hybridkv.alloc.organization import StateKind

Positions = NDArray[np.int64]


class Copy(NamedTuple):
    """Copy units of one kind, `source[i]` to `destination[i]`, before anything else of the step."""

    kind: StateKind
    source: NDArray[np.int32]
    destination: NDArray[np.int32]


class Write(NamedTuple):
    """The state at `position` is kept: write it to `state`."""

    position: int
    state: Checkpoint


class Plan(NamedTuple):
    """What one request's share of a step reads and writes. The step computes tokens [start, stop).

    `attention`: unit of every block that is reserved, those of [0, stop) and perhaps more, int32 `[groups, blocks]`; a
    view that later calls may extend. `source`: the recurrent state at `start`; None is absent, which means zeros.
    `line`: where the convolution state at `start` is; the same object, but for replay decode. `destination`: where the
    states at `stop` go; the same object as `source` when a step works in place. `writes`: boundaries kept on the way,
    in order; the last one is the destination when `stop` is itself kept. `window`: units of the replay window, None
    without one. `copies`: to be executed first, of a fork or a truncation at once.

    With replay decode the recurrent state at a position is that at the last end of a chunk; the window holds the inputs
    behind it. A step that ends no chunk writes no recurrent state, and the next one reads the same `source`.

    A step that counts only in part (`HybridCache.commit` below its end) leaves its running state where `home` says.
    """

    request: int
    start: int
    stop: int
    attention: NDArray[np.int32]
    source: State | None = None
    line: State | None = None
    destination: State | None = None
    writes: tuple[Write, ...] = ()
    window: State | None = None
    copies: tuple[Copy, ...] = ()

    def left(self) -> State | None:
        """Where the recurrent state at the last end of a chunk is after the step, unless that is in `destination`."""
        return self.writes[-1].state if self.writes else self.source

    def home(self, computed: int) -> State | None:
        """Where the state at `computed`, in (start, stop], belongs.

        In the first kept boundary not before it, which is then still in progress, else in the destination. A running
        state of its own dtype is always the destination.
        """
        if self.destination is not None and StateKind.LIVE in self.destination.units:
            return self.destination
        return next((w.state for w in self.writes if w.position >= computed), self.destination)


class Refused(NamedTuple):
    """Not now, and nothing was changed: `pool` would need `needed` pages, of which `obtainable` could be had.

    `needed` contains the headroom that admission must leave. With `never` no amount of waiting helps.
    """

    pool: str
    needed: int
    obtainable: int
    never: bool = False


class Admitted(NamedTuple):
    """The request runs; its first `cached` tokens need not be computed."""

    cached: int
    plan: Plan


class Extended(NamedTuple):
    """Room for the step is reserved."""

    plan: Plan


class ExtendedMany(NamedTuple):
    """Room for one step of many requests, in the order given.

    `start`, `stop`: token spans, int64 `[rows]`. `in_place`: the running state is both source and destination, bool
    `[rows]`. `plans`: by row, only where the tables changed or a state is read elsewhere; every other row computes on
    what its last plan named, its convolution state in place. Not in place, its recurrent state is read where the last
    plan left it (`Plan.left`): a row of replay decode whose first chunk has not ended. `refused`: by row; those rows were left unchanged and must not run.
    """

    start: Positions
    stop: Positions
    in_place: NDArray[np.bool_]
    plans: dict[int, Plan]
    refused: dict[int, Refused]


class Forked(NamedTuple):
    """A second request that continues from the same tokens. `plan.copies` must run before its first step."""

    request: int
    plan: Plan


class Truncated(NamedTuple):
    """The request now knows `tokens` tokens, of which `computed` are computed; the rest must be recomputed."""

    tokens: int
    computed: int
    plan: Plan


class PoolStats(NamedTuple):
    """Pages of one pool now, and the most that were held at once."""

    pages: int
    free: int
    cached: int
    held: int
    peak_held: int
    by_kind: dict[str, int]


class Stats(NamedTuple):
    """A snapshot: pools, published states, and counters since the start.

    Counters: requests admitted, tokens asked for and found at admission, states published, states reclaimed (and of
    those, checkpoints lost because another state of their slab's page was reclaimed), admissions and extensions
    refused, requests preempted.
    """

    pools: dict[str, PoolStats]
    attention_blocks: int
    checkpoints: int
    running: int
    waiting: int
    counters: dict[str, int]
