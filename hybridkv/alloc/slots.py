"""Fixed slots cut out of pages: any state kind, any size class.

Owns which slot is free, cached or held, which page is a slab, and when an empty slab goes back to its pool. Does
not know what a slot stores, who asked for it, or what a byte is. A slot's id is its line, `slots_per_page * page +
slot` (X2 of the paper), with the actual page id.

Sharing a slab couples lifetimes: a slab with a held slot cannot be reclaimed as a page, and reclaiming an idle slab
takes every cached slot in it along. So the slab's owner in the page pool is this pool, which knows all dependants.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from hybridkv.alloc.pages import Ids, PagePool, ReclaimQueue
from hybridkv.errors import CorruptionError, UsageError


class Slab:
    """One page cut in slots. `free` is a bit mask; `held` counts slots with a reference, `used` slots not free, `takes` hand-outs."""

    __slots__ = ("free", "held", "owners", "page", "references", "takes", "used")

    def __init__(self, page: int, slots: int) -> None:
        self.page = page
        self.free = (1 << slots) - 1
        self.held = self.used = self.takes = 0
        self.references = [0] * slots
        self.owners: list[object | None] = [None] * slots


class SlotPool:
    """Slots of one size class over a `PagePool`. Allocation and release of a slot are O(log slabs)."""

    def __init__(self, pool: PagePool, slots_per_page: int) -> None:
        if slots_per_page < 1:
            raise UsageError(f"slots_per_page must be at least 1, got {slots_per_page}")
        self.pool, self.slots_per_page = pool, slots_per_page
        self.slabs: dict[int, Slab] = {}
        self.queue = ReclaimQueue(pool.size * slots_per_page)
        self.generation = [0] * (pool.size * slots_per_page)  # one at a time: a list is faster than an array
        self.cached = 0
        self.held = 0
        self.spare = 0  # slots of held slabs that are free or cached: to be had without a page
        # Slabs with a free slot, lowest page first; entries are checked when they are met. Held slabs fill first,
        # so that idle ones stay reclaimable as pages.
        self._open_held: list[int] = []
        self._open_idle: list[int] = []

    @property
    def free(self) -> int:
        """Slots that are free in existing slabs."""
        return len(self.slabs) * self.slots_per_page - self.cached - self.held

    def open_slab(self) -> Slab | None:
        """The slab that the next slot comes from without a new page: first fit among held slabs, then idle ones."""
        for heap, held in ((self._open_held, True), (self._open_idle, False)):
            while heap:
                slab = self.slabs.get(heap[0])
                if slab is not None and slab.free and (slab.held > 0) == held:
                    return slab
                heapq.heappop(heap)
        return None

    def take(self, kind: int) -> int:
        """One slot with one reference. The caller has made room: an open slab, or a free page."""
        heap = self._open_held
        slab = self.slabs.get(heap[0]) if heap else None
        if slab is None or not slab.held or not slab.free:
            slab = self.open_slab()
        if slab is None:
            page = int(self.pool.take(1, kind)[0])
            slab = self.slabs[page] = Slab(page, self.slots_per_page)
            self.pool.make_slab(page, self)
            slab.held = 1
            self.spare += self.slots_per_page - 1
            self._push(self._open_held, page)
        elif slab.held:
            slab.held += 1
            self.spare -= 1
        else:
            self._hold(slab)
        bit = slab.free & -slab.free
        slot = bit.bit_length() - 1
        slab.free ^= bit
        slab.used += 1
        slab.takes += 1
        slab.references[slot] = 1
        self.held += 1
        line = slab.page * self.slots_per_page + slot
        self.generation[line] += 1
        return line

    def take_many(self, count: int, kind: int) -> Ids:
        """`count` slots."""
        return np.fromiter((self.take(kind) for _ in range(count)), np.int32, count)

    def untake(self, lines: Ids) -> None:
        """Undo `take_many` of slots that nobody wrote, in reverse order."""
        for line in reversed(lines.tolist()):
            slab, _ = self._at(line)
            self.generation[line] -= 1
            slab.takes -= 1
            if slab.takes == 0:  # nobody else ever used the slab: its page was taken for this slot
                self.pool.generation[slab.page] -= 1
            self.release_one(line, touch=False)

    def reference(self, lines: Ids) -> None:
        """One more execution reference on each slot, which must be held or cached."""
        for line in lines.tolist():
            slab, slot = self._at(line)
            if slab.references[slot] == 0:
                if slab.owners[slot] is None:
                    raise CorruptionError("I2", f"a free slot was referenced: line {line}")
                self.cached -= 1
                self.held += 1
                self._hold(slab)
            slab.references[slot] += 1

    def release(self, lines: Ids, *, touch: bool = True) -> None:
        """One reference less on each slot; at none it is cached if published, else free."""
        for line in lines.tolist():
            self.release_one(line, touch=touch)

    def publish(self, lines: Ids, owner: object) -> None:
        """From now on `owner` must be told before one of these slots goes elsewhere."""
        for line in lines.tolist():
            slab, slot = self._at(line)
            slab.owners[slot] = owner

    def unpublish(self, lines: Ids) -> None:
        """The owner is gone from the index; slots without reference become free."""
        for line in lines.tolist():
            slab, slot = self._at(line)
            slab.owners[slot] = None
            self.queue.forget(line)
            if slab.references[slot] == 0:
                self.cached -= 1
                self._free_slot(slab, slot)

    def dependants(self, page: int) -> list[object]:
        """Everything that must leave the index before this slab's page goes elsewhere (I3).

        Each once: a state of several layer groups may have several slots here.
        """
        return list(dict.fromkeys(owner for owner in self.slabs[page].owners if owner is not None))

    def coldest(self) -> int:
        """The cached slot to reclaim next; its entry leaves the queue."""
        while (line := self.queue.pop()) >= 0:
            slab, slot = self._at(line)
            if slab.references[slot] == 0:
                return line
            self.queue.park(line)
        raise CorruptionError("I5", f"{self.cached} cached slots are counted and none is found")

    def owner(self, line: int) -> object | None:
        """Who must be told before this slot goes elsewhere."""
        slab, slot = self._at(line)
        return slab.owners[slot]

    def references_of(self, lines: Ids) -> NDArray[np.int32]:
        """Execution references of each slot."""
        found = (self._at(line) for line in lines.tolist())
        return np.array([slab.references[slot] for slab, slot in found], np.int32)

    def generation_of(self, line: int) -> object:
        """Changes whenever the slot or its page is handed out anew."""
        return int(self.pool.generation[line // self.slots_per_page]), self.generation[line]

    def stamp_of(self, line: int) -> tuple[int, ...]:
        """Places in the reclaim order, of the slot and of its page."""
        return self.queue.age(line), self.pool.queue.age(line // self.slots_per_page)

    # reviving what an abandoned step had reclaimed
    def is_free(self, line: int) -> bool:
        """Whether the slot is free, in a slab or in a free page."""
        page, slot = divmod(line, self.slots_per_page)
        slab = self.slabs.get(page)
        return self.pool.is_free(page) if slab is None else bool(slab.free >> slot & 1)

    def revive(self, lines: list[int], owner: object, stamps: list[tuple[int, ...]], kind: int) -> None:
        """Free slots whose content is still intact become cached again, first to be reclaimed."""
        for line, (stamp, page_stamp) in zip(lines, stamps, strict=True):
            page, slot = divmod(line, self.slots_per_page)
            slab = self.slabs.get(page)
            if slab is None:
                self.pool.revive([page], self, [(page_stamp,)], kind)
                slab = self.slabs[page] = Slab(page, self.slots_per_page)
                self._push(self._open_idle, page)
            slab.free &= ~(1 << slot)
            slab.used += 1
            slab.takes += 1
            slab.owners[slot] = owner
            self.cached += 1
            self.queue.restore(line, stamp)

    def _at(self, line: int) -> tuple[Slab, int]:
        page, slot = divmod(line, self.slots_per_page)
        return self.slabs[page], slot

    def _hold(self, slab: Slab) -> None:
        """One more held slot in an existing slab."""
        slab.held += 1
        if slab.held > 1:
            self.spare -= 1
            return
        self.pool.hold_slab(slab.page)
        self.spare += self.slots_per_page - 1
        if slab.free:
            self._push(self._open_held, slab.page)

    def release_one(self, line: int, *, touch: bool = True) -> None:
        """`release` of a single slot."""
        page, slot = divmod(line, self.slots_per_page)
        slab = self.slabs[page]
        left = slab.references[slot] - 1
        if left < 0:
            raise CorruptionError("I5", f"a slot without reference was released: line {line}")
        slab.references[slot] = left
        if left:
            return
        self.held -= 1
        slab.held -= 1
        published = slab.owners[slot] is not None
        if published:
            self.cached += 1
            if touch:
                self.queue.push_one(line)
            else:
                self.queue.unpark(np.array([line]))
        if slab.held:
            self.spare += 1
        else:
            self.spare -= self.slots_per_page - 1
            self.pool.idle_slab(slab.page, touch=touch)
            if slab.free:
                self._push(self._open_idle, slab.page)
        if not published:
            self._free_slot(slab, slot)

    def _free_slot(self, slab: Slab, slot: int) -> None:
        full = not slab.free
        slab.free |= 1 << slot
        slab.used -= 1
        if slab.used == 0:
            del self.slabs[slab.page]
            self.pool.retire_slab(slab.page)
        elif full:  # one with free slots is remembered already
            self._push(self._open_held if slab.held else self._open_idle, slab.page)

    def _push(self, heap: list[int], page: int) -> None:
        """Remember an open slab; entries that no longer hold are dropped before they outnumber the slabs."""
        if len(heap) > 2 * len(self.slabs) + 16:
            heap[:] = sorted(set(heap) & self.slabs.keys())
        heapq.heappush(heap, page)
