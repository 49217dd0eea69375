"""When a token leaves the core: gates (D3), effective depths (D2), routing with lookahead (D39).

Owns each row's gate state, keyed by the life of its request, so that rows may move in a batch, ids may be used again,
and late readings hit nobody else. Does not know a model: it gets readings, one a row and loop. Nothing here looks at
a batch as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from hybridkv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hybridkv.schedule.depth.batch import Row, StageBatch


def effective_depth(signal: int | None, max_loops: int, *, floor: int = 1, delay: int = 0) -> int:
    """Loops that a token runs whose gate fired after loop `signal`, None for never (D2).

    `floor` is the first loop at which the gate is heeded, `delay` is 1 under lookahead.
    """
    if signal is None:
        return max_loops
    if signal < 1:
        raise UsageError(f"signal must be a loop of at least 1 or None, got {signal}")
    return min(max_loops, max(signal, floor) + delay)


class Gate(Protocol):
    """Turns one reading a loop into exits. Gates are values: what accumulates is passed in and out."""

    @property
    def start(self) -> float:
        """State of a token that has run no loop."""
        ...

    def step(self, state: float, reading: float) -> tuple[float, bool]:
        """State after one more loop, and whether the gate says exit there. Changes nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Hazard:
    """Ouro: exit once the cumulative exit probability reaches `q`. Readings are logits; q >= 1 never exits."""

    q: float
    start: ClassVar[float] = 1.0

    def step(self, state: float, reading: float) -> tuple[float, bool]:
        """`state` is the probability of not having left yet."""
        survival = state * _one_minus_sigmoid(reading)
        return survival, self.q < 1 and 1 - survival >= self.q


@dataclass(frozen=True, slots=True)
class Threshold:
    """Huginn: exit once a reading, say the change between two loops, falls strictly below `q`."""

    q: float
    start: ClassVar[float] = 0.0

    def step(self, state: float, reading: float) -> tuple[float, bool]:
        """A reading of NaN (no loop before to compare with) never exits."""
        return state, reading < self.q


@dataclass(frozen=True, slots=True)
class PreLoop:
    """The exit is known before loop 1, from a distribution over loops. q >= 1 never exits."""

    q: float

    def signal(self, probabilities: Sequence[float]) -> int | None:
        """First loop at which the summed probability reaches `q`."""
        total = 0.0
        for loop, probability in enumerate(probabilities, 1):
            total += probability
            if self.q < 1 and total >= self.q:
                return loop
        return None


@dataclass(frozen=True, slots=True)
class Recorded:
    """Replays recorded signals: a reading is the recorded loop, NaN for never, the same at every loop."""

    start: ClassVar[float] = 0.0

    def step(self, state: float, reading: float) -> tuple[float, bool]:
        """`state` counts loops."""
        return state + 1, state + 1 >= reading


def first_signal(gate: Gate, readings: Iterable[float]) -> int | None:
    """First loop, counted from 1, after which the gate says exit."""
    state = gate.start
    for loop, reading in enumerate(readings, 1):
        state, fired = gate.step(state, reading)
        if fired:
            return loop
    return None


class _Reading:
    __slots__ = ("depth", "position", "serial", "state")

    def __init__(self, row: Row, start: float) -> None:
        self.serial, self.position, self.state = row.serial, row.position, start
        self.depth: int | None = None


class ExitRouter:
    """Row-wise exits for `DepthPlanner.apply`.

    `begin` with each prelude, then for every recurrent launch `observe` its readings and `exits` to route it. Without
    lookahead observe first; with lookahead `exits` may come first, since it needs the loop before only (D39).
    """

    def __init__(self, gate: Gate, *, max_loops: int, min_signal: int = 1, lookahead: bool = False) -> None:
        self._gate = gate
        self._max_loops = max_loops
        self._min_signal = min_signal
        self._delay = int(lookahead)
        self._rows: dict[str, _Reading] = {}

    def begin(self, batch: StageBatch) -> None:
        """Tokens enter the core."""
        for row in batch.rows:
            self._rows[row.request] = _Reading(row, self._gate.start)

    def observe(self, batch: StageBatch, readings: Sequence[float]) -> None:
        """Take the readings of one recurrent launch, in row order. Those of tokens that are gone are ignored (D41)."""
        if len(readings) != len(batch.rows):
            raise UsageError(f"readings must have one value a row, {len(batch.rows)}, got {len(readings)}")
        for row, reading in zip(batch.rows, readings, strict=True):
            known = self._rows.get(row.request)
            if known is None or (known.serial, known.position) != (row.serial, row.position):
                continue
            known.state, fired = self._gate.step(known.state, reading)
            if fired and known.depth is None:
                known.depth = effective_depth(
                    row.loop, self._max_loops, floor=self._min_signal, delay=self._delay
                )

    def exits(self, batch: StageBatch) -> list[str]:
        """Rows of a recurrent launch that leave after it. Rows at full depth leave without a signal."""
        return [row.request for row in batch.rows if row.loop >= self._depth(row)]

    def forget(self, requests: Iterable[str]) -> None:
        """Drop what is kept for requests that are over."""
        for request in requests:
            self._rows.pop(request, None)

    def _depth(self, row: Row) -> int:
        known = self._rows.get(row.request)
        return self._max_loops if known is None or known.depth is None else known.depth


def _one_minus_sigmoid(logit: float) -> float:
    if logit >= 0:
        tail = math.exp(-logit)
        return tail / (1 + tail)
    return 1 / (1 + math.exp(logit))
