"""One checker for each kind of fact: ownership, room, reclaim order, usefulness. Pure functions of ids and contents.

Each yields (rule, message) for what is broken. None knows an allocator, an index or an operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hybridkv.testing._adapter import Capabilities, Line, Owned, Part, Place, Tokens, View
from hybridkv.testing._ghost import GhostMemory, Meaning

Broken = Iterator[tuple[str, str]]
Demand = Sequence[tuple[tuple[Line, ...], int]]


def partition(
    owned: Owned, pools: Iterable[tuple[str, int]], users: set[Place], *, cancelled: bool
) -> Broken:
    """A1, A2, A3, G1: every page is exactly one of free, cached and held, whole or slot by slot.

    `users` are the places that some view or lease names; what is held by nobody is lost.
    """
    free = set(owned.free)
    if len(free) != len(owned.free):
        yield "HK-A2", f"freed twice: {[p for p, n in Counter(owned.free).items() if n > 1]}"
    if clash := free & (owned.held | owned.cached | users):
        yield "HK-A3", f"free and in use: {sorted(clash)}"
    known = free | owned.held | owned.cached
    cut: dict[tuple[str, int], set[int]] = {}
    whole: set[tuple[str, int]] = set()
    for place in known:
        if place.slots > 1:
            cut.setdefault(place[:2], set()).add(place.slots)
        else:
            whole.add(place[:2])
    for name, size in pools:
        for page in range(size):
            widths = cut.get((name, page), set())
            if ((name, page) in whole and widths) or len(widths) > 1:
                yield "HK-A3", f"page {page} of {name} is whole and cut, or cut twice"
            slots = next(iter(widths), 1)
            if lost := [s for s in range(slots) if Place(name, page, s, slots) not in known]:
                yield "HK-A1", f"page {page} of {name} is lost, slots {lost} of {slots}"
    if leaked := owned.held - users:
        yield "HK-G1" if cancelled else "HK-A1", f"held by nobody: {sorted(leaked)}"


def views(found: Sequence[View], owned: Owned, ghost: GhostMemory) -> Broken:
    """A6, A7, A8: what a request holds exists, is held in every part, and its running states are its own."""
    running: Counter[Place] = Counter()
    for i, view in enumerate(found):
        if outside := [p for p in view.places() if not ghost.inside(p)]:
            yield "HK-A6", f"request {i} names places that do not exist: {outside}"
        for row in view.tables:
            if len(set(row)) < len(row):
                yield "HK-A6", f"request {i} names a block twice: {row}"
            if loose := [p for p in row if p not in owned.held]:
                yield "HK-A6", f"request {i} names blocks without reference: {loose}"
        for state in (*view.running, *view.sources):
            if loose := [(part, p) for part, p in state if p not in owned.held]:
                yield "HK-A8", f"request {i} has parts without reference: {loose}"
        running.update({p for state in view.running for _, p in state})
    if shared := [p for p, n in running.items() if n > 1]:
        yield "HK-A7", f"a state has two owners: {sorted(shared)}"


def cost(capabilities: Capabilities, start: int, stop: int, kept: int, *, fresh: bool) -> Demand:
    """An upper bound of what a step over [start, stop) takes with `kept` boundaries; `fresh`: nothing is held yet."""
    width = capabilities.block_tokens
    blocks = -(-stop // width) - (start // width if fresh else -(-start // width))
    live = 1 if capabilities.live else 0
    return (
        (capabilities.attention, max(0, blocks)),
        (capabilities.checkpoint, kept + (0 if live else 1)),
        (capabilities.live, live),
        (capabilities.window, int(capabilities.replay)),
    )


def fits(
    pools: Iterable[tuple[str, int]], owned: Owned | None, wanted: Demand, pinned: Iterable[Place] = ()
) -> bool:
    """Whether `wanted` can be had from what is free or reclaimable. `owned` None: in empty pools."""
    pages: Counter[str] = Counter()
    slots: Counter[tuple[str, int]] = Counter()
    for lines, count in wanted:
        for line in lines:
            units = line.groups * line.members * count
            if line.slots == 1:
                pages[line.pool] += units
            else:
                slots[line.pool, line.slots] += units
    obtainable, spare = Counter(dict(pools)), Counter[tuple[str, int]]()
    if owned is not None:
        obtainable, spare = _room(owned, set(pinned))
    for (pool, width), units in slots.items():
        pages[pool] += -(-max(0, units - spare[pool, width]) // width)
    return all(count <= obtainable[pool] for pool, count in pages.items())


def _room(owned: Owned, pinned: set[Place]) -> tuple[Counter[str], Counter[tuple[str, int]]]:
    """Obtainable pages by pool, and slots to be had in slabs that stay because something in them is held."""
    busy = owned.held | pinned
    pages: Counter[str] = Counter()
    slabs: dict[tuple[str, int], list[Place]] = {}
    for place in set(owned.free) | owned.cached | owned.held:
        if place.slots > 1:
            slabs.setdefault(place[:2], []).append(place)
        elif place not in busy:
            pages[place.pool] += 1
    spare: Counter[tuple[str, int]] = Counter()
    for (pool, _), places in slabs.items():
        idle = [p for p in places if p not in busy]
        if len(idle) == len(places):
            pages[pool] += 1
        else:
            spare[pool, places[0].slots] += len(idle)
    return pages, spare


def free_suffices(before: Owned, taken: Iterable[Place], pool: str) -> bool:
    """Whether what was free in `pool` covers what a call took there, slots in existing slabs included."""
    free: Counter[int] = Counter(p.slots for p in before.free if p.pool == pool)
    need: Counter[int] = Counter(p.slots for p in taken if p.pool == pool)
    pages = need.pop(1, 0)
    for width, units in need.items():
        pages += -(-max(0, units - free[width]) // width)
    return pages <= free[1]


def order(lost: set[Place], survivors: set[Place], idle_since: Mapping[Place, int]) -> Broken:
    """E4: in each pool the longest idle unit goes first. `survivors` could have been reclaimed and were not.

    Ids tell when a unit became idle only to the operation, and lifetimes are coupled by slabs and composites: what is
    asked is that one of the lost is as old as the oldest.
    """
    for pool in {p.pool for p in lost}:
        ages = [idle_since.get(p, 0) for p in lost if p.pool == pool]
        older = [p for p in survivors if p.pool == pool and idle_since.get(p, 0) < min(ages)]
        if older:
            yield "HK-E4", f"lost {sorted(lost)} although {sorted(older)} are idle for longer"


class Contents:
    """What cached places hold, looked up by meaning."""

    def __init__(self, capabilities: Capabilities, ghost: GhostMemory, cached: Iterable[Place]) -> None:
        self._capabilities = capabilities
        self._places: dict[Meaning, Place] = {}
        last = capabilities.block_tokens - 1
        for place in cached:
            for offset in {0, last}:
                meaning = ghost.read(place, offset)
                if meaning is not None and (meaning.part.kind != "attention" or offset == last):
                    self._places[meaning] = place

    def whole(self, namespace: object, tokens: Tokens, depth: int) -> list[Place] | None:
        """The places of a hit of `depth` tokens if all of it is cached: blocks of every group, and the state."""
        c = self._capabilities
        wanted = [
            Meaning(Part(line.kind, g), namespace, tokens[: k + c.block_tokens])
            for line in c.attention
            for g in range(line.groups)
            for k in range(0, depth, c.block_tokens)
        ]
        wanted += [
            Meaning(Part(line.kind, g, m), namespace, tokens[:depth])
            for line in c.checkpoint
            for g in range(line.groups)
            for m in range(line.members)
        ]
        found = [self._places.get(meaning) for meaning in wanted]
        return None if None in found else [p for p in found if p is not None]


def wrong_hit(got: Meaning | None, want: Meaning, default: str, *, weak_hash: bool, width: int) -> str:
    """Which rule a hit breaks whose content is `got` where `want` was promised."""
    if got is None or got.part != want.part:
        return default
    if got.tokens == want.tokens:
        return "HK-F1" if got.namespace != want.namespace else default
    if weak_hash:
        return "HK-F2"
    common = min(len(got.tokens), len(want.tokens))
    same = got.tokens[:common] == want.tokens[:common]  # another boundary of this prefix, not another prefix
    return "HK-F3" if not same and got.tokens[-width:] == want.tokens[-width:] else default
