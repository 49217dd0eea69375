"""Ghost memory: places hold meaning instead of numbers.

A KV position holds the group, namespace and token prefix that it was computed from; a part of a state holds which
part it is and the prefix that it has absorbed. Memory is addressed physically: a page that is written with another
layout (cut in slots, or not) forgets what it held, as real bytes would. Knows no allocator and no rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from hybridkv.testing._adapter import Namespace, Part, Place, Tokens


class Meaning(NamedTuple):
    """What one cell holds: `part` of what was computed from `tokens` in `namespace`."""

    part: Part
    namespace: Namespace
    tokens: Tokens


Cell = Meaning | None  # None is poison: memory that nobody wrote since it was handed out


class GhostMemory:
    """Every page of every pool, as cells by (slots, slot, offset)."""

    def __init__(self, pools: Iterable[tuple[str, int]]) -> None:
        self.sizes = dict(pools)
        self._pages: dict[tuple[str, int], dict[tuple[int, int], Cell]] = {}
        self._slots: dict[tuple[str, int], int] = {}

    def inside(self, place: Place) -> bool:
        """Whether the place exists."""
        return 0 <= place.page < self.sizes.get(place.pool, 0) and 0 <= place.slot < place.slots

    def read(self, place: Place, offset: int = 0) -> Cell:
        """What the cell holds."""
        key = place[:2]
        if self._slots.get(key) != place.slots:
            return None
        return self._pages[key].get((place.slot, offset))

    def write(self, place: Place, meaning: Cell, offset: int = 0) -> None:
        """Write one cell; another layout of the page is gone."""
        self._page(place)[place.slot, offset] = meaning

    def poison(self, place: Place) -> None:
        """Everything in the place is memory that nobody wrote."""
        page = self._page(place)
        for key in [key for key in page if key[0] == place.slot]:
            del page[key]

    def copy(self, source: Place, destination: Place) -> None:
        """Copy every cell of a place."""
        cells = self._pages.get(source[:2], {}) if self._slots.get(source[:2]) == source.slots else {}
        taken = {offset: cell for (slot, offset), cell in cells.items() if slot == source.slot}
        self.poison(destination)
        page = self._page(destination)
        for offset, cell in taken.items():
            page[destination.slot, offset] = cell

    def snapshot(self) -> object:
        """What `restore` takes."""
        return {key: dict(page) for key, page in self._pages.items()}, dict(self._slots)

    def restore(self, snapshot: object) -> None:
        """Be as `snapshot` was."""
        self._pages, self._slots = snapshot  # type: ignore[misc]  # opaque to callers

    def key(self) -> Hashable:
        """Equal for memories that hold the same."""
        return frozenset(
            (key, self._slots[key], cell, meaning)
            for key, page in self._pages.items()
            for cell, meaning in page.items()
        )

    def _page(self, place: Place) -> dict[tuple[int, int], Cell]:
        key = place[:2]
        if self._slots.get(key) != place.slots:
            self._slots[key], self._pages[key] = place.slots, {}
        return self._pages[key]
