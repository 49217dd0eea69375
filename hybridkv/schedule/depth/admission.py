"""Who is prefilled next (D19-D24, D38): chunks of at most M tokens, bounded bypass, headroom.

Owns the build of one prefill launch. Does not know what else could run instead, except through D36.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.schedule.depth.config import ADMISSION_SCAN, OVERTAKEN_AT_MOST, Mode

if TYPE_CHECKING:
    from hybridkv.schedule.depth.state import Live, State


Chunk = tuple["Live", int, int]
"""A resident, the first prompt token that runs, and how many do. Bare, because a launch makes 64 of them."""


def build_prefill(state: State) -> list[Chunk]:
    """Seat and fill what fits one prefill launch, if one is allowed now; empty if not. Looks at 65 prompts at most."""
    if not _allowed(state):
        return []
    chunks: list[Chunk] = []
    left = state.config.prefill_tokens
    if state.partial is not None:
        chunk = _place(state, state.partial, left)
        if chunk is None:
            return []
        chunks.append(chunk)
        left -= chunk[2]
    if not state.drain and not state.offloaded:
        _place_new(state, chunks, left)
    return chunks


def _allowed(state: State) -> bool:
    config = state.config
    if config.max_prefill_run is not None and state.prefill_run >= config.max_prefill_run:
        others = state.core if config.mode is Mode.REFILL else state.ready
        if others:
            return False
    if state.pool is not None and not state.reserves and state.decoding and state.free <= state.headroom:
        return False
    if state.partial is not None:
        return True
    if state.drain or state.offloaded or not state.waiting:
        return False
    assert config.open_slots is not None
    return config.width - len(state.residents) >= config.open_slots


def _place_new(state: State, chunks: list[Chunk], left: int) -> None:
    """Admit from the head of `waiting`. A prompt that does not fit is passed over, OVERTAKEN_AT_MOST times in its life."""
    waiting, width, headroom = state.waiting, state.config.width, state.headroom
    thrifty = state.pool is not None and not state.reserves
    blocked: list[Live] = []
    patient = True
    for _ in range(min(ADMISSION_SCAN, len(waiting))):
        if not patient or left == 0 or len(state.residents) == width:
            break
        if thrifty and chunks and state.free < headroom:
            break
        live = waiting[0]
        chunk = _place(state, live, left) if not state.reserves or _reservable(state, live) else None
        if chunk is None:
            if state.reserves or live.overtaken == OVERTAKEN_AT_MOST:
                break
            blocked.append(waiting.popleft())
            continue
        waiting.popleft()
        chunks.append(chunk)
        left -= chunk[2]
        for passed in blocked:
            passed.overtaken += 1
            patient = patient and passed.overtaken < OVERTAKEN_AT_MOST
    waiting.extendleft(reversed(blocked))


def _reservable(state: State, live: Live) -> bool:
    """Whether a reservation for `live` fits beside those of the residents (D38)."""
    return state.pool is not None and state.reserved + live.reservation <= state.pool.blocks


def _place(state: State, live: Live, left: int) -> Chunk | None:
    """Fill as much of a prompt as one launch takes, or None if its blocks cannot be had."""
    start = live.filled
    tokens = min(left, live.prompt - start)
    if not state.take(live, start + tokens):
        return None
    state.fill(live, tokens)
    return live, start, tokens
