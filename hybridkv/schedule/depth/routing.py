"""What a completed launch does to the lists (D25-D32): one function a stage.

Owns where each row goes next. Does not know which launch follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hybridkv.schedule.depth.batch import Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridkv.schedule.depth.batch import StageBatch
    from hybridkv.schedule.depth.config import RequestId
    from hybridkv.schedule.depth.state import Live, State


class Flight(NamedTuple):
    """A batch that the engine runs, and the requests of its rows."""

    batch: StageBatch
    lives: list[Live]


class Outcome(NamedTuple):
    """What a launch did: prompt tokens, loops, output tokens, rows that left the core, requests that are over."""

    tokens: int = 0
    loops: int = 0
    emitted: int = 0
    exits: tuple[RequestId, ...] = ()
    done: tuple[RequestId, ...] = ()


Exits = set[str] | None
Finishes = set[str]


def route_prefill(state: State, flight: Flight, _: Exits, finishes: Finishes) -> Outcome:
    """Complete prompts emit their first token (D25)."""
    state.prefill_run += 1
    lives = [live for live in flight.lives if live.filled == live.prompt]
    emitted, done = _emit(state, lives, finishes)
    return Outcome(tokens=sum(row.tokens for row in flight.batch.rows), emitted=emitted, done=done)


def route_prelude(state: State, flight: Flight, _: Exits, _finishes: Finishes) -> Outcome:
    """Successors go to the head of the core, first decode tokens to its tail (D26)."""
    full = state.config.max_loops
    head: list[Live] = []
    tail: list[Live] = []
    for live in flight.lives:
        live.loop = live.passed = 0
        live.depth = full if live.depths is None else live.depths[live.cursor]
        (head if live.cursor else tail).append(live)
    state.core = head + state.core + tail
    return Outcome()


def route_recurrent(state: State, flight: Flight, exits: Exits, _: Finishes) -> Outcome:
    """Each row goes to the coda, or back to the head of the core (D27); what was passed over ages (D28)."""
    full = state.config.max_loops
    state.prefill_run = 0
    for live in state.core:
        live.passed += 1
    stay: list[Live] = []
    gone: list[Live] = []
    for live in flight.lives:
        live.loop = loop = live.loop + 1
        live.passed = 0
        if loop == (live.depth if exits is None else full) or (exits and live.id in exits):
            gone.append(live)
        else:
            stay.append(live)
    state.core = stay + state.core
    state.coda += gone
    return Outcome(loops=1, exits=tuple([live.id for live in gone]))


def route_coda(state: State, flight: Flight, _: Exits, finishes: Finishes) -> Outcome:
    """One token a row (D30)."""
    full = state.config.max_loops
    for live in flight.lives:
        live.kv += 1
        live.cursor += 1
        if live.loop < full:
            live.shallow = True
    emitted, done = _emit(state, flight.lives, finishes)
    return Outcome(emitted=emitted, done=done)


def route_decode(state: State, flight: Flight, _: Exits, finishes: Finishes) -> Outcome:
    """One token a row, at full depth (D31)."""
    state.prefill_run = 0
    for live in flight.lives:
        live.kv += 1
        live.cursor += 1
    emitted, done = _emit(state, flight.lives, finishes)
    return Outcome(loops=state.config.max_loops, emitted=emitted, done=done)


def _emit(state: State, lives: list[Live], finishes: Finishes) -> tuple[int, tuple[RequestId, ...]]:
    """A request ends with its token, or its successor waits for a block. One that had ended before emits nothing (D41)."""
    done: list[RequestId] = []
    emitted = 0
    for live in lives:
        if live.ended:
            state.ended.discard(live)
            state.finish(live)
            continue
        emitted += 1
        if live.cursor == live.limit or (finishes and live.id in finishes):
            done.append(live.id)
            state.finish(live)
        else:
            state.pre.append(live)
    return emitted, tuple(done)


ROUTES: dict[Stage, Callable[[State, Flight, Exits, Finishes], Outcome]] = {
    Stage.PREFILL: route_prefill,
    Stage.PRELUDE: route_prelude,
    Stage.RECURRENT: route_recurrent,
    Stage.CODA: route_coda,
    Stage.DECODE: route_decode,
}
