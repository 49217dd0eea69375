"""At which boundaries a request keeps a checkpoint.

A rule becomes, for one request, a `Kept`: multiples of a step, and single positions. Catalogue and measured value:
section 10 and 11 of the memory-organization reference (every 512: the paper; end and junction: production engines).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.alloc.prefix import Match
from hybridkv.errors import UsageError

NEVER = 1 << 62  # a position that no request reaches


class Kept(NamedTuple):
    """The boundaries one request keeps: multiples of `step` (0: none), and `single` ones, sorted; none before `since`."""

    step: int
    single: tuple[int, ...] = ()
    since: int = 0

    def after(self, position: int) -> int:
        """The first kept boundary behind `position`, or `NEVER`."""
        position = max(position, self.since - 1)
        ahead = (position // self.step + 1) * self.step if self.step else NEVER
        return min([ahead, *(s for s in self.single if s > position)])

    def between(self, start: int, stop: int) -> list[int]:
        """Kept boundaries in (start, stop], in order."""
        found: list[int] = []
        while (start := self.after(start)) <= stop:
            found.append(start)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`interval_tokens`: multiples of it, None for the grid itself, 0 for none. `end`: the last boundary of the
    prompt that a resend can use. `junction`: the depth that attention reached where it is deeper than the joint
    hit, so that a shared prefix pays off at its third sighting (vLLM #45238).
    """

    interval_tokens: int | None = None
    end: bool = False
    junction: bool = False

    def keep(self, grid_tokens: int, prompt_tokens: int, match: Match) -> Kept:
        """The boundaries that a request with this prompt and match keeps."""
        step = grid_tokens if self.interval_tokens is None else self.interval_tokens
        if step % grid_tokens:
            raise UsageError(f"interval_tokens must be a multiple of grid_tokens ({grid_tokens}), got {step}")
        single: set[int] = set()
        if self.end:
            single.add((prompt_tokens - 1) // grid_tokens * grid_tokens)
        if self.junction and match.attention > match.joint:
            single.add(match.attention)
        return Kept(step, tuple(sorted(single - {0})))


PLACEMENTS = {
    "every_block": Placement(),
    "end_only": Placement(interval_tokens=0, end=True),
    "end_junction": Placement(interval_tokens=0, end=True, junction=True),
}


def resolve_placement(choice: str | Placement) -> Placement:
    """A placement by name: every_block, end_only, end_junction, or interval(N) for multiples of N and the end."""
    if isinstance(choice, Placement):
        return choice
    if choice in PLACEMENTS:
        return PLACEMENTS[choice]
    if (
        choice.startswith("interval(")
        and choice.endswith(")")
        and choice[9:-1].isdecimal()
        and int(choice[9:-1])
    ):
        return Placement(interval_tokens=int(choice[9:-1]), end=True)
    raise UsageError(f"placement must be one of {', '.join(PLACEMENTS)}, interval(N), got {choice!r}")
