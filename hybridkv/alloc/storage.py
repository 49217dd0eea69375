"""The pools of an organization, and states taken from them.

Owns how a state becomes pages and slots, whether something fits, and reclaiming. Knows neither requests nor tokens.
Everything is decided before anything changes: `shortage` says whether a demand fits, `take` then cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.alloc.checkpoint import AttentionBlock, Checkpoint, State, Units
from hybridkv.alloc.organization import Organization, Part, StateKind
from hybridkv.alloc.pages import PagePool
from hybridkv.alloc.plan import Refused
from hybridkv.alloc.slots import SlotPool
from hybridkv.errors import CorruptionError, UsageError

KINDS = tuple(StateKind)


class Line(NamedTuple):
    """One state kind of a shape: `groups` times `members` units of `store`."""

    kind: StateKind
    store: PagePool | SlotPool
    groups: int
    members: int


Shape = tuple[Line, ...]
Wanted = Sequence[tuple[Shape, int]]


class Lost(NamedTuple):
    """What was reclaimed, with what it takes to tell later whether its storage is still untouched."""

    state: AttentionBlock | Checkpoint
    key: object
    stamps: dict[StateKind, list[tuple[int, ...]]]
    generations: dict[StateKind, list[object]]


class Storage:
    """Page and slot pools of one cache, and the shapes of its states."""

    def __init__(self, organization: Organization, pages: Mapping[str, int]) -> None:
        names = {p.name for p in organization.pools}
        if set(pages) != names:
            raise UsageError(f"pages must name the pools {sorted(names)}, got {sorted(pages)}")
        g = organization.geometry
        self.organization = organization
        self.pools = {name: PagePool(name, pages[name]) for name in pages}
        self.stores: dict[tuple[str, int], PagePool | SlotPool] = {}
        self.attention = self._shape(organization.attention_parts, g.attention_groups)
        self.checkpoint = self._shape(organization.checkpoint_parts, g.recurrent_groups)
        self.live = self._shape(organization.live_parts, g.recurrent_groups)
        self.window = self._shape(organization.window_parts, g.recurrent_groups)
        self.by_kind = {line.kind: line.store for s in (self.attention, self.checkpoint) for line in s}
        self.by_kind |= {line.kind: line.store for s in (self.live, self.window) for line in s}
        self.slot_pools = [s for s in self.stores.values() if isinstance(s, SlotPool)]
        self.lost: list[Lost] = []  # since the caller last emptied it
        self.reclaimed = self.coupled = 0
        self.gains = 0  # changes whenever something that was refused might fit now
        self.on_loss: Callable[[AttentionBlock | Checkpoint], None] = lambda _: None

    # ------------------------------------------------------------------------------------------------ room
    def page_demand(self, wanted: Wanted, *, spare: bool = True) -> dict[str, int]:
        """Pages of each pool that `wanted` takes; slots of held slabs that are free or cached cost none."""
        pages = dict.fromkeys(self.pools, 0)
        slots = [0] * len(self.slot_pools)
        for shape, count in wanted:
            if not count:
                continue
            for line in shape:
                units = line.groups * line.members * count
                if isinstance(line.store, PagePool):
                    pages[line.store.name] += units
                else:
                    slots[self.slot_pools.index(line.store)] += units
        for store, units in zip(self.slot_pools, slots, strict=True):
            short = units - store.spare if spare else units
            if short > 0:
                pages[store.pool.name] += -(-short // store.slots_per_page)
        return pages

    def shortage(self, wanted: Wanted, reserve: Mapping[str, int] | None = None) -> Refused | None:
        """None if `wanted` can be taken now and `reserve` pages of each pool stay obtainable, else what is short."""
        pages = self.page_demand(wanted)
        for name, count in pages.items():
            needed = count + (reserve[name] if reserve else 0)
            if count and needed > self.pools[name].obtainable:
                return Refused(name, needed, self.pools[name].obtainable)
        if reserve:
            for name, pool in self.pools.items():
                if pool.obtainable - pages[name] < reserve[name]:
                    return Refused(name, pages[name] + reserve[name], pool.obtainable)
        return None

    def never(self, wanted: Wanted) -> Refused | None:
        """What `wanted` lacks even in empty pools, or None."""
        for name, count in self.page_demand(wanted, spare=False).items():
            if count > self.pools[name].size:
                return Refused(name, count, self.pools[name].size, never=True)
        return None

    def take(self, wanted: Wanted) -> list[dict[StateKind, NDArray[np.int32]]]:
        """Units for each of `wanted`, int32 `[count, groups, units]` per kind, reclaiming where nothing is free.

        Whole pages come first, so that slots never use up a page that was counted for them.
        """
        made: list[dict[StateKind, NDArray[np.int32]]] = [{} for _ in wanted]
        some = [(shape, count, units) for (shape, count), units in zip(wanted, made, strict=True) if count]
        for whole in (True, False):
            for shape, count, units in some:
                for line in shape:
                    if isinstance(line.store, PagePool) == whole:
                        ids = self._take(line, count)
                        units[line.kind] = ids.reshape(count, line.groups, line.members)
        return made

    def _take(self, line: Line, count: int) -> NDArray[np.int32]:
        need, kind = count * line.groups * line.members, KINDS.index(line.kind)
        if isinstance(line.store, PagePool):
            while line.store.free < need:
                self._reclaim_page(line.store)
            return line.store.take(need, kind)
        lines = np.empty(need, np.int32)
        for i in range(need):
            while line.store.pool.free == 0 and line.store.open_slab() is None:
                if line.store.pool.cached:
                    self._reclaim_page(line.store.pool)
                else:
                    self.lose(line.store.owner(line.store.coldest()))
            lines[i] = line.store.take(kind)
        return lines

    # ------------------------------------------------------------------------------------------ references
    def reference(self, states: Iterable[State]) -> None:
        """One more execution reference on every unit of every state (I2)."""
        for kind, ids in _gather(states):
            self.by_kind[kind].reference(ids)

    def release(self, states: Iterable[State], *, touch: bool = True) -> None:
        """One reference less on every unit; units become reclaimable in the order of `states`."""
        self.gains += 1
        for kind, ids in _gather(states):
            self.by_kind[kind].release(ids, touch=touch)

    def untake(self, taken: list[dict[StateKind, NDArray[np.int32]]]) -> None:
        """Undo a `take` that nobody wrote, in reverse order, so that the free lists are as before."""
        for whole in (False, True):
            for units in reversed(taken):
                for kind, ids in reversed(units.items()):
                    if isinstance(self.by_kind[kind], PagePool) == whole:
                        self.by_kind[kind].untake(ids.ravel())

    def idle(self, state: State) -> bool:
        """Whether nobody holds a reference on any unit of the state."""
        return not any(self.by_kind[kind].references_of(ids.ravel()).any() for kind, ids in state)

    def sole(self, state: State) -> bool:
        """Whether there is exactly one reference on every unit of the state."""
        return all((self.by_kind[kind].references_of(ids.ravel()) == 1).all() for kind, ids in state)

    def publish(self, state: AttentionBlock | Checkpoint) -> None:
        """The state's units tell it from now on before they go elsewhere."""
        self.gains += isinstance(state, Checkpoint)
        for kind, units in state.units.items():
            self.by_kind[kind].publish(units.ravel(), state)

    # --------------------------------------------------------------------------------------------- reclaim
    def lose(self, state: object, *, coupled: bool = False) -> None:
        """Take a published state out of the index, then give up its units (I3)."""
        assert isinstance(state, AttentionBlock | Checkpoint)
        self.lost.append(self._remember(state))
        self.on_loss(state)
        for kind, ids in state:
            self.by_kind[kind].unpublish(ids.ravel())
        self.reclaimed += 1
        self.coupled += coupled

    def _reclaim_page(self, pool: PagePool) -> None:
        page = pool.coldest()
        owner = pool.owners[page]
        if isinstance(owner, SlotPool):
            for state in owner.dependants(page):
                self.lose(state, coupled=True)
        else:
            self.lose(owner)
        if not pool.is_free(page):
            raise CorruptionError(
                "I3", f"page {page} of pool {pool.name!r} was reclaimed while something uses it"
            )

    def _remember(self, state: AttentionBlock | Checkpoint) -> Lost:
        stamps: dict[StateKind, list[tuple[int, ...]]] = {}
        generations: dict[StateKind, list[object]] = {}
        for kind, units in state.units.items():
            store, ids = self.by_kind[kind], units.ravel().tolist()
            stamps[kind] = [store.stamp_of(unit) for unit in ids]
            generations[kind] = [store.generation_of(unit) for unit in ids]
        return Lost(state, state.key, stamps, generations)

    def _generations(self, kind: StateKind, units: Units) -> list[object]:
        return [self.by_kind[kind].generation_of(unit) for unit in units.ravel().tolist()]

    def intact(self, lost: Lost) -> bool:
        """Whether the storage of a lost state is free and was handed to nobody since."""
        return all(
            self._generations(kind, units) == lost.generations[kind]
            and all(self.by_kind[kind].is_free(unit) for unit in units.ravel().tolist())
            for kind, units in lost.state
        )

    def revive(self, lost: Lost) -> None:
        """Make the units of an intact lost state cached again, first to be reclaimed."""
        for kind, units in lost.state:
            self.by_kind[kind].revive(
                units.ravel().tolist(), lost.state, lost.stamps[kind], KINDS.index(kind)
            )

    def _shape(self, parts: Iterable[Part], groups: int) -> Shape:
        return tuple(Line(p.kind, self._store(p), groups, p.members) for p in parts)

    def _store(self, part: Part) -> PagePool | SlotPool:
        found = self.stores.get((part.pool, part.slot_bytes))
        if found is None:
            pool = self.pools[part.pool]
            found = SlotPool(pool, self.organization.slots_per_page(part)) if part.slot_bytes else pool
            self.stores[part.pool, part.slot_bytes] = found
        return found


def _gather(states: Iterable[State]) -> list[tuple[StateKind, Units]]:
    """All units of several states per kind, in the order of the states."""
    found: dict[StateKind, list[Units]] = {}
    for state in states:
        for kind, units in state:
            found.setdefault(kind, []).append(units.ravel())
    return [(kind, parts[0] if len(parts) == 1 else np.concatenate(parts)) for kind, parts in found.items()]
