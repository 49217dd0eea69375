"""Breadth first over everything that is small, so that the first failure is a shortest one.

Replays operations; copies nothing. Several pool shapes are interleaved by depth: all to depth 3, then all to depth 4.
At every state that is visited each plan is also abandoned (G5), and at last the whole world is drained (A5).
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hybridkv.testing._adapter import AllocatorAdapter, Capabilities, Namespace, Tokens
from hybridkv.testing._rules import ConformanceError, Operation
from hybridkv.testing._world import World

Make = Callable[[Any], AllocatorAdapter]

# On, above and below a block boundary; one a prefix of another; equal last blocks behind different first ones.
PROMPTS: tuple[Tokens, ...] = ((0, 0), (0, 0, 1), (0, 0, 0, 0, 1), (1, 1, 0, 0, 1))
PLAIN = frozenset({"admit", "extend", "commit", "abandon", "release", "serve"})
PLANS = frozenset({"admit", "resume", "extend"})
EVERYTHING = PLAIN | {
    "preempt", "resume", "fork", "truncate", "short", "draft", "round", "lease", "clear", "fail", "namespace",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How small is small: two symbols, a handful of pages and chunks below a page find almost everything."""

    prompts: tuple[Tokens, ...] = PROMPTS
    chunks: tuple[int, ...] = (1,)  # besides all that is left
    operations: frozenset[str] = EVERYTHING
    max_live: int = 2
    max_tokens: int = 6
    max_flights: int = 2
    max_depth: int = 12
    seconds: float = 20.0
    states: int = 1 << 30


SMALL = Scope()


class Shape(NamedTuple):
    """One allocator to explore: what its factory is given, and the scope."""

    spec: Any
    scope: Scope


class Report(NamedTuple):
    """What a search saw. `depth`: operations that were tried in full; `error` is None when no rule was broken."""

    states: int
    depth: int
    seconds: float
    exhausted: bool
    error: ConformanceError | None
    capabilities: Capabilities | None = None

    def __str__(self) -> str:
        end = "exhausted" if self.exhausted else f"depth {self.depth} complete"
        verdict = "clean" if self.error is None else self.error.rule
        return f"{verdict}: {self.states} states, {end}, {self.seconds:.1f} s"


def choices(world: World, scope: Scope) -> Iterator[Operation]:
    """Every operation worth trying in this world; plans first."""
    c, ops = world.capabilities, scope.operations
    yield from plans(world, scope)
    for i, live in enumerate(world.live):
        if live.steps:
            yield ("commit", i, None, 1)
            if "abandon" in ops and c.abandon:
                yield ("abandon", i)
            if "short" in ops and c.short_commit and len(live.steps) == 1:
                yield from (("commit", i, p, 1) for p in _short(live.steps[0].start, live.steps[0].stop))
            if "fail" in ops and c.callback and i == 0:
                yield ("fail", ("commit", i, None, 1), 0)
        elif live.running and live.computed:
            if "fork" in ops and c.fork and len(world.live) < scope.max_live:
                yield ("fork", i)
            if "truncate" in ops and c.truncate:
                yield from (
                    ("truncate", i, n) for n in sorted({1, live.computed - 1, len(live.tokens) - 1} - {0})
                )
        if "preempt" in ops and c.preempt and live.running:
            yield ("preempt", i)
        yield ("release", i)
    if (
        "round" in ops
        and c.batch
        and any(r.running and not r.steps and r.computed < len(r.tokens) for r in world.live)
    ) and all(len(r.tokens) < scope.max_tokens for r in world.live):
        yield ("round", 1)
    if "serve" in ops and len(world.live) < scope.max_live:
        yield from (("serve", tokens, None) for tokens in scope.prompts)
    if "lease" in ops and c.lease:
        yield ("lease", 0) if not world.leases else ("end_lease", 0)
    if "clear" in ops and c.clear and world.sut.owned().cached:
        yield ("clear",)
    if "fail" in ops and c.callback and len(world.live) < scope.max_live:
        yield ("fail", ("admit", scope.prompts[-1], None, None), 1)


def plans(world: World, scope: Scope) -> Iterator[Operation]:
    """Operations that reserve for a step, and can be abandoned."""
    ops = scope.operations
    if len(world.live) < scope.max_live:
        for tokens in scope.prompts:
            yield from (("admit", tokens, None, n) for n in (*scope.chunks, None))
        if "namespace" in ops and world.capabilities.namespaces:
            yield ("admit", scope.prompts[-1], 7, None)
    for i, live in enumerate(world.live):
        if not live.running:
            if "resume" in ops:
                yield from (("resume", i, n) for n in (*scope.chunks, None))
        elif "extend" in ops and len(live.steps) < scope.max_flights:
            rest = len(live.tokens) - live.planned
            counts = {n for n in scope.chunks if n < rest} | {rest} if rest > 0 else {1}
            if "draft" in ops and rest <= 1:
                counts |= {2}
            room = scope.max_tokens - live.planned
            yield from (("extend", i, n) for n in sorted(counts) if n <= room)


def explore(make: Make, shapes: Sequence[Shape]) -> Report:
    """Explore several shapes, interleaved by depth, until one breaks a rule, all are exhausted, or time is up."""
    start = time.perf_counter()
    searches = [_Search(make, shape) for shape in shapes]
    error: ConformanceError | None = None
    seconds = max(shape.scope.seconds for shape in shapes)
    while error is None and (open_ := [s for s in searches if s.open]):
        search = min(open_, key=lambda s: s.depth)
        error = search.deepen(start + seconds)
        if time.perf_counter() - start > seconds:
            break
    states = sum(len(s.seen) for s in searches)
    depth = min(s.depth for s in searches)
    if error is not None:
        depth = len(error.trace)
    return Report(
        states,
        depth,
        time.perf_counter() - start,
        all(s.exhausted for s in searches),
        error,
        searches[0].capabilities,
    )


class _Search:
    """The frontier of one shape."""

    def __init__(self, make: Make, shape: Shape) -> None:
        self.make, self.spec, self.scope = make, shape.spec, shape.scope
        world = World(make, self.spec)
        self.capabilities = world.capabilities
        self.seen: set[int] = set()
        self.frontier: list[tuple[tuple[Operation, ...], int]] = [((), self._key(world, ()))]
        self.depth = 0
        self.stopped = False
        self.probes = self.capabilities.abandon and "abandon" in self.scope.operations

    @property
    def open(self) -> bool:
        """Whether there is more to try."""
        return bool(self.frontier) and not self.stopped and self.depth < self.scope.max_depth

    @property
    def exhausted(self) -> bool:
        """Whether everything within the scope's operations was tried."""
        return not self.frontier

    def deepen(self, deadline: float) -> ConformanceError | None:
        """Try one more operation behind every path of the frontier."""
        following: list[tuple[tuple[Operation, ...], int]] = []
        for path, key in self.frontier:
            if time.perf_counter() > deadline or len(self.seen) > self.scope.states:
                self.stopped = True
                return None
            try:
                base, again = self._visit(path, key)
                before = base.sut.fingerprint()
                for operation in choices(base, self.scope):
                    world = self._after(again, operation, before)
                    found = self._key(world, (*path, operation))
                    if found not in self.seen:
                        self.seen.add(found)
                        following.append(((*path, operation), found))
                    if self.probes and operation[0] in PLANS and world.flights > base.flights:
                        world.take_back(operation, before)
                        world.check()
                if self.capabilities.clear:
                    base.drain()
            except ConformanceError as error:
                return error
        self.frontier = following
        self.depth += 1
        return None

    def _visit(self, path: tuple[Operation, ...], key: int) -> tuple[World, Callable[[], World]]:
        """The world behind `path`, and how to be there again."""
        world = self._replay(path)
        if self._key(world, path) != key:
            raise ConformanceError("HK-H1", "the same operations led to another state", self.spec, path)
        return world, snapshot(world) or (lambda: self._replay(path))

    def _after(self, again: Callable[[], World], operation: Operation, before: Hashable) -> World:
        world = again()
        world.known = before
        world.do(operation)
        world.check()
        if operation[0] == "round":
            twin = again()
            twin.singly(operation)
            if twin.sut.fingerprint() != world.sut.fingerprint():
                raise ConformanceError(
                    "HK-H3", "a batch differs from single calls", self.spec, tuple(world.trace)
                )
        return world

    def _replay(self, path: tuple[Operation, ...]) -> World:
        world = World(self.make, self.spec)
        world.quiet = True
        for operation in path:
            world.do(operation)
            world.check()
        world.quiet = False
        return world

    def _key(self, world: World, path: tuple[Operation, ...]) -> int:
        found: Hashable = world.key()
        return hash(path if found is None else found)


def snapshot(world: World) -> Callable[[], World] | None:
    """How to have this world again without a replay, or None where the system under test cannot be pickled.

    What the adapter calls `immutable` is shared, not copied. Five times faster than a replay of five operations.
    """
    shared: tuple[object, ...] = getattr(world.sut, "immutable", ())
    places = {id(x): i for i, x in enumerate(shared)}
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.persistent_id = lambda x: places.get(id(x))  # type: ignore[method-assign]
    try:
        pickler.dump(world)
    except Exception:  # noqa: BLE001  # anything may refuse, in any way
        return None
    data = buffer.getvalue()

    def again() -> World:
        unpickler = pickle.Unpickler(io.BytesIO(data))  # noqa: S301  # our own bytes
        unpickler.persistent_load = lambda i: shared[i]  # type: ignore[method-assign]
        return unpickler.load()

    return again


def with_(scope: Scope, **changes: Any) -> Scope:
    """The scope with other fields."""
    return replace(scope, **changes)


__all__ = [
    "EVERYTHING",
    "PLAIN",
    "PROMPTS",
    "SMALL",
    "Make",
    "Namespace",
    "Report",
    "Scope",
    "Shape",
    "explore",
]


def _short(start: int, stop: int) -> list[int]:
    return sorted({start + 1, stop - 1} - {start, stop})
