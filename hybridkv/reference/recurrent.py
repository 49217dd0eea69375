"""What the recurrent families share: states in member pages, and rows of tokens cut at absolute chunk ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Piece(NamedTuple):
    """Part of a row that lies in one chunk: positions `lo` to `hi` of the chunk, whose position 0 is token `origin`."""

    number: int
    origin: int
    lo: int
    hi: int


def pieces(start: int, stop: int, position: int, chunk: int) -> Iterator[Piece]:
    """Cut tokens `start` to `stop`, the first of which has absolute `position`, at multiples of `chunk` (rule R1)."""
    phase = position % chunk
    for number in range(-(-(phase + stop - start) // chunk) if stop > start else 0):
        origin = start + number * chunk - phase
        yield Piece(number, origin, 0 if number else phase, min(chunk, stop - origin))


def read_state(
    pool: Tensor, granule: int, members: Sequence[int], heads_per_member: int, shape: tuple[int, int, int]
) -> Tensor:
    """Gather a state `[heads, rows, columns]` as fp32 from its member pages; an absent member is zeros."""
    state = torch.zeros(shape, device=pool.device)
    for m, entry in enumerate(members):
        part = state[m * heads_per_member : (m + 1) * heads_per_member]
        if entry >= 0:
            part.copy_(pool[entry * granule : entry * granule + part.numel()].view(part.shape))
    return state


def write_state(
    pool: Tensor, granule: int, members: Sequence[int], heads_per_member: int, state: Tensor
) -> None:
    """Scatter a state to its member pages, rounding to the pool's dtype; nothing goes to an absent member."""
    for m, entry in enumerate(members):
        part = state[m * heads_per_member : (m + 1) * heads_per_member]
        if entry >= 0:
            pool[entry * granule : entry * granule + part.numel()] = part.reshape(-1).to(pool.dtype)
