"""Rows of a launch: which plane goes next (D28), and how requests become rows.

Owns no state. Making rows is most of what a launch costs, so it is done here once and cheaply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hybridkv.schedule.depth.batch import NO_PLANE, Row
from hybridkv.schedule.depth.config import Planes

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridkv.schedule.depth.config import DepthConfig, RequestId
    from hybridkv.schedule.depth.state import Live

new_row = cast(
    "Callable[[type[Row], tuple[RequestId, int, int, int, int, int]], Row]",
    tuple.__new__,  # pyright: ignore[reportUnknownMemberType]  (typeshed leaves its element type open)
)
"""Half the price of calling Row."""


def rows_at(lives: list[Live], loop: int) -> list[Row]:
    """A row for each request at its next position, outside the core or at full depth."""
    return [new_row(Row, (live.id, live.kv, loop, NO_PLANE, 1, live.serial)) for live in lives]


def loops_of_next(core: list[Live], config: DepthConfig) -> int:
    """Loops already run by the rows of the one plane that goes next (D28)."""
    if config.planes is Planes.FIFO:
        return core[0].loop
    oldest = max(core, key=lambda live: live.passed)
    if oldest.passed >= config.age_bound:
        return oldest.loop
    counts: dict[int, int] = {}
    for live in core:
        counts[live.loop] = counts.get(live.loop, 0) + 1
    return max(counts, key=counts.__getitem__)
