"""Pages of one pool: ids, references, owners, reclaim order.

Owns which page is free, cached or held, and in which order cached pages are reclaimed. Does not know what a page
stores; the owner of a page is whoever must be told before it goes elsewhere (I3).

    references  published   the page is
    0           no          free: in the free list
    0           yes         cached: found through an index, reclaimable, in the reclaim queue
    1 or more   either      held: some running request may read or write it
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import CorruptionError, UsageError

Ids = NDArray[np.int32]
NO_STAMP = -1
PARKED = -2


class ReclaimQueue:
    """Ids in the order in which they became reclaimable, with the stamp they got then.

    An entry is current while `stamps[id]` still equals its stamp; others are skipped, never removed from the
    middle. So taking a reference and giving it back unused restores the order for free. Amortized O(1) an entry.
    An id with a stamp of 0 or more has exactly one current entry. The stamp of an id that was met while it was held is
    parked as `PARKED - stamp`: without an entry, so that it is not met again, but not forgotten.
    """

    __slots__ = ("_front", "_head", "_ids", "_stamps", "_tail", "clock", "stamps")

    def __init__(self, size: int) -> None:
        self.stamps = np.full(size, NO_STAMP, np.int64)
        self.clock = 0
        self._ids = np.empty(1024, np.int64)
        self._stamps = np.empty(1024, np.int64)
        self._head = self._tail = 0
        self._front: list[tuple[int, int]] = []  # entries put back, (-stamp, id), ascending

    def push(self, ids: NDArray[np.integer[Any]]) -> None:
        """Append ids, each newer than everything before it."""
        count = len(ids)
        if self._tail + count > len(self._ids):
            self._make_room(count)
        stamps = np.arange(self.clock, self.clock + count)
        self.clock += count
        self.stamps[ids] = stamps
        self._ids[self._tail : self._tail + count] = ids
        self._stamps[self._tail : self._tail + count] = stamps
        self._tail += count

    def push_one(self, item: int) -> None:
        """`push` of a single id."""
        if self._tail == len(self._ids):
            self._make_room(1)
        self.stamps[item] = self._stamps[self._tail] = self.clock
        self._ids[self._tail] = item
        self.clock += 1
        self._tail += 1

    def restore(self, item: int, stamp: int) -> None:
        """Give an id its old stamp back, and an entry where that is gone: taken by `pop`, or dropped as stale."""
        if stamp == NO_STAMP:  # it was held all the time, and never became reclaimable before
            self.push_one(item)
            return
        self.stamps[item] = stamp
        i = self._head + int(np.searchsorted(self._stamps[self._head : self._tail], stamp))
        if i < self._tail and self._stamps[i] == stamp:
            return
        entry = (-stamp, item)
        at = bisect_left(self._front, entry)
        if self._front[at : at + 1] != [entry]:
            self._front.insert(at, entry)

    def age(self, item: int) -> int:
        """The stamp of an id, parked or not."""
        stamp = int(self.stamps[item])
        return PARKED - stamp if stamp <= PARKED else stamp

    def park(self, item: int) -> None:
        """An id that `pop` took is held: it has no entry, and keeps its place for `unpark`."""
        self.stamps[item] = PARKED - self.stamps[item]

    def unpark(self, ids: NDArray[np.integer[Any]]) -> None:
        """Ids are reclaimable again as if they had never been held; new ones are appended."""
        stamps = self.stamps[ids]
        for item, stamp in zip(
            ids[stamps <= PARKED].tolist(), stamps[stamps <= PARKED].tolist(), strict=True
        ):
            self.restore(item, PARKED - stamp)
        if len(new := ids[stamps == NO_STAMP]):
            self.push(new)

    def pop(self) -> int:
        """The oldest current id, or -1; its entry is gone. The caller skips ids that are held."""
        while self._front or self._head < self._tail:
            if self._front and (self._head == self._tail or -self._front[-1][0] < self._stamps[self._head]):
                negative, item = self._front.pop()
                stamp = -negative
            else:
                item, stamp = int(self._ids[self._head]), self._stamps[self._head]
                self._head += 1
            if self.stamps[item] == stamp:
                return item
        return -1

    def forget(self, item: int) -> None:
        """The id is no longer reclaimable."""
        self.stamps[item] = NO_STAMP

    def order(self) -> list[int]:
        """All current ids, oldest first. O(entries); for tests and snapshots."""
        rest = slice(self._head, self._tail)
        entries = [(-negative, item) for negative, item in self._front]
        entries += zip(self._stamps[rest].tolist(), self._ids[rest].tolist(), strict=True)
        return [item for stamp, item in sorted(entries) if self.stamps[item] == stamp]

    def _make_room(self, count: int) -> None:
        """Drop stale entries; grow when more than half remain, so that the next call is far away."""
        ids, stamps = self._ids[self._head : self._tail], self._stamps[self._head : self._tail]
        current = self.stamps[ids] == stamps
        kept, kept_stamps = ids[current], stamps[current]
        needed = 2 * (len(kept) + count)
        if needed > len(self._ids):
            self._ids, self._stamps = np.empty(2 * needed, np.int64), np.empty(2 * needed, np.int64)
        self._ids[: len(kept)], self._stamps[: len(kept)] = kept, kept_stamps
        self._head, self._tail = 0, len(kept)


class PagePool:
    """`size` equal pages with ids 0..size-1. One writer; every call is O(pages named), none walks the pool."""

    def __init__(self, name: str, size: int) -> None:
        if size < 1:
            raise UsageError(f"pages of pool {name!r} must be at least 1, got {size}")
        self.name, self.size = name, size
        self.references = np.zeros(size, np.int32)
        self.published = np.zeros(size, np.bool_)
        self.generation = np.zeros(size, np.int32)
        self._kind = np.full(size, -1, np.int8)
        self.owners: list[object | None] = [None] * size
        self.cached = 0
        self.peak_held = 0
        self.queue = ReclaimQueue(size)
        self._free: Ids = np.arange(size - 1, -1, -1, dtype=np.int32)
        self._top = size

    @property
    def free(self) -> int:
        """Pages that nobody holds and no index knows."""
        return self._top

    @property
    def held(self) -> int:
        """Pages with an execution reference."""
        return self.size - self._top - self.cached

    @property
    def obtainable(self) -> int:
        """Pages that could be handed out now, if need be by reclaiming cached ones."""
        return self._top + self.cached

    @property
    def kinds(self) -> NDArray[np.int8]:
        """What every page was taken for, -1 where it is free. O(pages)."""
        return np.where(self.published | (self.references > 0), self._kind, np.int8(-1))

    def take(self, count: int, kind: int) -> Ids:
        """Hand out free pages with one reference each. The caller has made room before."""
        low = self._top - count
        if low < 0:
            raise CorruptionError(
                "I5", f"pool {self.name!r} was asked for {count} pages and has {self._top} free"
            )
        ids = self._free[low : self._top][::-1].copy()
        self._top = low
        self.references[ids] = 1
        self.generation[ids] += 1
        self._kind[ids] = kind
        if (held := self.size - low - self.cached) > self.peak_held:
            self.peak_held = held
        return ids

    def untake(self, ids: Ids) -> None:
        """Undo `take` of pages that nobody wrote: they are free as if never handed out."""
        self.generation[ids] -= 1
        self.references[ids] = 0
        self._push_free(ids)

    def reference(self, ids: Ids) -> None:
        """One more execution reference on each page, which must be held or cached."""
        before = self.references[ids]
        idle = before == 0
        if idle.any():
            if not self.published[ids[idle]].all():
                raise CorruptionError(
                    "I2", f"pool {self.name!r}: a free page was referenced, one of {ids.tolist()}"
                )
            self.cached -= int(idle.sum())
            self.peak_held = max(self.peak_held, self.held)
        self.references[ids] = before + 1

    def release(self, ids: Ids, *, touch: bool = True) -> None:
        """One reference less on each page; at none it is cached if published, else free.

        Pages become reclaimable in the order given. `touch=False` gives back an unused reference and leaves the
        reclaim order as it was before.
        """
        after = self.references.take(ids)
        after -= 1
        self.references[ids] = after
        idle = ids
        if np.count_nonzero(after):  # some are held by others, or one was released too often
            if after.min() < 0:
                self.references[ids] = after + 1
                raise CorruptionError(
                    "I5", f"pool {self.name!r}: a page without reference was released, one of {ids}"
                )
            idle = ids[after == 0]
        published = self.published.take(idle)
        count = int(np.count_nonzero(published))
        if count:
            cached = idle if count == len(idle) else idle[published]
            self.cached += count
            if touch:
                self.queue.push(cached)
            else:
                self.queue.unpark(cached)
        if count < len(idle):
            self._push_free(idle[~published] if count else idle)

    def publish(self, ids: Ids, owner: object) -> None:
        """From now on `owner` must be told before one of these held pages goes elsewhere."""
        for page in ids.tolist():
            self.published[page] = True
            self.owners[page] = owner

    def unpublish(self, ids: Ids) -> None:
        """The owner is gone from the index; pages without reference become free. Few pages: no array operations."""
        stamps, free = self.queue.stamps, self._free
        for page in ids.tolist():
            self.published[page] = False
            self.owners[page] = None
            stamps[page] = NO_STAMP
            if self.references[page] == 0:
                self.cached -= 1
                free[self._top] = page
                self._top += 1

    def coldest(self) -> int:
        """The cached page to reclaim next. The caller invalidates its owner, which frees it (I3).

        Its entry leaves the queue; `cached` changes when the owner is unpublished.
        """
        while (page := self.queue.pop()) >= 0:
            if self.references[page] == 0:
                return page
            self.queue.park(
                page
            )  # held again: an unused reference gives it back its place, a used one a new stamp
        raise CorruptionError("I5", f"pool {self.name!r} counts {self.cached} cached pages and finds none")

    # Slabs: pages cut in slots. A slab has one reference while any of its slots is held.
    def hold_slab(self, page: int) -> None:
        """The first slot of an idle slab is held."""
        self.references[page] = 1
        self.cached -= 1
        self.peak_held = max(self.peak_held, self.held)

    def idle_slab(self, page: int, *, touch: bool) -> None:
        """The last held slot of a slab is held no more: the page is cached."""
        self.references[page] = 0
        self.cached += 1
        if touch:
            self.queue.push_one(page)
        else:
            self.queue.unpark(np.array([page]))

    def make_slab(self, page: int, owner: object) -> None:
        """A page just taken becomes a slab; it keeps its one reference for the first slot."""
        self.published[page] = True
        self.owners[page] = owner

    def retire_slab(self, page: int) -> None:
        """An idle slab has no used slot left: the page is free."""
        self.published[page] = False
        self.owners[page] = None
        self.queue.forget(page)
        self.cached -= 1
        self._free[self._top] = page
        self._top += 1

    # reviving what an abandoned step had reclaimed
    def is_free(self, page: int) -> bool:
        """Whether nobody holds the page and no index knows it."""
        return self.references[page] == 0 and not self.published[page]

    def references_of(self, pages: Ids) -> NDArray[np.int32]:
        """Execution references of each page."""
        return self.references[pages]

    def generation_of(self, page: int) -> object:
        """Changes whenever the page is handed out anew."""
        return int(self.generation[page])

    def stamp_of(self, page: int) -> tuple[int, ...]:
        """Place in the reclaim order."""
        return (self.queue.age(page),)

    def revive(self, pages: list[int], owner: object, stamps: list[tuple[int, ...]], kind: int) -> None:
        """Free pages whose content is still intact become cached again, first to be reclaimed."""
        stack = self._free[: self._top]
        rest = stack[~np.isin(stack, pages)]
        self._top = len(rest)
        self._free[: self._top] = rest
        self.cached += len(pages)
        for (stamp,), page in sorted(zip(stamps, pages, strict=True), reverse=True):
            self.published[page] = True
            self.owners[page] = owner
            self._kind[page] = kind
            self.queue.restore(page, stamp)

    def free_ids(self) -> list[int]:
        """The free list, next to be handed out first."""
        return self._free[: self._top][::-1].tolist()

    def cached_ids(self) -> list[int]:
        """Cached pages, next to be reclaimed first."""
        return [page for page in self.queue.order() if self.references[page] == 0]

    def _push_free(self, ids: Ids) -> None:
        count = len(ids)
        self._free[self._top : self._top + count] = ids[::-1]
        self._top += count
