"""`HybridCache` as the kit sees it: the adapter.

Reads ownership from ids in the pools, never from their counters. The fingerprint holds what influences later answers
and what a caller can observe, and leaves out what only counts (clocks, generations, statistics).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.alloc import plan as answers
from hybridkv.alloc.checkpoint import AttentionBlock, Checkpoint
from hybridkv.alloc.checkpoint import State as CacheState
from hybridkv.alloc.organization import StateKind
from hybridkv.alloc.pages import NO_STAMP, PARKED, PagePool, ReclaimQueue
from hybridkv.alloc.requests import Request, Status, Undo
from hybridkv.alloc.slots import SlotPool
from hybridkv.errors import CorruptionError, UsageError
from hybridkv.testing._adapter import (
    Admitted,
    CallbackError,
    Capabilities,
    Copy,
    Forked,
    Line,
    Namespace,
    Owned,
    Part,
    Place,
    Published,
    Refused,
    State,
    Step,
    Tokens,
    Truncated,
    View,
)
from hybridkv.testing.shapes import OTHER_SHAPES, SHAPES, CacheSpec, specs

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from hybridkv.alloc.storage import Shape

ATTENTION = StateKind.ATTENTION
__all__ = ["OTHER_SHAPES", "SHAPES", "CacheAdapter", "CacheSpec", "KitHash", "make_cache", "specs"]


class KitHash:
    """A token hash that can be made weak, and made to raise once."""

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.fuse: int | None = None  # calls until it raises
        self.collision_resistant = not buckets

    def __call__(self, parent: bytes, tokens: bytes) -> bytes:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise CallbackError("the token hash failed, as it was told to")
        digest = hashlib.blake2b(parent, digest_size=16)
        digest.update(tokens)
        return bytes([digest.digest()[0] % self.buckets]) if self.buckets else digest.digest()


def make_cache(spec: CacheSpec) -> CacheAdapter:
    """A fresh adapter; what `explore` and `check_allocator` take."""
    return CacheAdapter(spec)


class CacheAdapter:
    """See `AllocatorAdapter`."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec, self.hash = spec, KitHash(spec.buckets)
        self.cache = spec.build(self.hash)
        self._where = {
            kind: (store.pool.name, store.slots_per_page) if isinstance(store, SlotPool) else (store.name, 1)
            for kind, store in self.cache.storage.by_kind.items()
        }
        self._names: dict[Hashable, tuple[Namespace, Tokens]] = {}
        self._count = 0
        self.capabilities = self._capabilities()
        self.immutable = (spec, self.cache.organization, self.cache.policy, self.capabilities)

    # ------------------------------------------------------------------------------------------------ calls
    def admit(
        self, tokens: Tokens, *, namespace: Namespace = None, budget: int | None = None
    ) -> Admitted | Refused:
        r = self.cache.request(self._count, tokens, salt=namespace)  # type: ignore[arg-type]
        self._count += 1
        answer = self.resume(r, budget)
        if isinstance(answer, Refused):
            self.cache.release(r)
        return answer

    def resume(self, handle: Request, budget: int | None = None) -> Admitted | Refused:
        answer = self.cache.admit(handle, budget=budget)
        self._note(handle)
        if isinstance(answer, answers.Refused):
            return Refused(*answer)
        return Admitted(handle, answer.cached, self._step(answer.plan))

    def extend(self, handle: Request, upto: int) -> Step | Refused:
        answer = self.cache.extend(handle, upto)
        return Refused(*answer) if isinstance(answer, answers.Refused) else self._step(answer.plan)

    def commit(self, handle: Request, computed: int, new_tokens: Tokens = ()) -> tuple[()]:
        self.cache.commit(handle, computed, new_tokens)
        self._note(handle)
        return ()

    def abandon(self, handle: Request) -> None:
        self.cache.abandon(handle)

    def preempt(self, handle: Request) -> None:
        self.cache.preempt(handle)

    def truncate(self, handle: Request, tokens: int) -> Truncated | Refused:
        answer = self.cache.truncate(handle, tokens)
        if isinstance(answer, answers.Refused):
            return Refused(*answer)
        return Truncated(answer.computed, self._step(answer.plan))

    def fork(self, handle: Request) -> Forked | Refused:
        answer = self.cache.fork(handle, self._count)
        if isinstance(answer, answers.Refused):
            return Refused(*answer)
        child = self.cache.requests[self._count]
        self._count += 1
        return Forked(child, self._step(answer.plan))

    def release(self, handle: Request) -> None:
        self.cache.release(handle)

    def extend_many(self, steps: tuple[tuple[Request, int], ...]) -> list[Step | Refused | None]:
        rs = [r for r, _ in steps]
        answer = self.cache.extend_many(rs, np.array([upto for _, upto in steps], np.int64))
        found: list[Step | Refused | None] = []
        for i in range(len(rs)):
            if i in answer.refused:
                found.append(Refused(*answer.refused[i]))
            elif i in answer.plans:
                found.append(self._step(answer.plans[i]))
            else:
                growth = self.cache.growth  # replay decode reads where the last plan left the state
                assert answer.in_place[i] or growth.replay or not growth.recurrent, (
                    "no plan, and not in place"
                )
                found.append(None)
        return found

    def commit_many(self, steps: tuple[tuple[Request, int, Tokens], ...]) -> None:
        added = np.array([t[0] if t else -1 for _, _, t in steps], np.int64)
        self.cache.commit_many([r for r, _, _ in steps], np.array([c for _, c, _ in steps]), added)
        for r, _, _ in steps:
            self._note(r)

    def lease(self, index: int) -> tuple[CacheState, Published] | None:
        states = [*self.cache.index.checkpoints.values(), *self.cache.index.blocks.values()]
        if not states:
            return None
        state = states[index % len(states)]
        self.cache.lease(state)
        return state, self._published(state)

    def end_lease(self, token: CacheState) -> None:
        self.cache.end_lease(token)

    def arm(self, after: int) -> None:
        self.hash.fuse = after

    def disarm(self) -> None:
        self.hash.fuse = None

    def clear(self) -> None:
        self.cache.clear()

    # ----------------------------------------------------------------------------------------------- looking
    def view(self, handle: Request) -> View:
        table = handle.table[:, : handle.blocks]
        rows = tuple(tuple(self._place(ATTENTION, u) for u in row) for row in table.tolist())
        running = tuple(self._state(s) for s in handle.states() if s is not handle.source)
        return View(rows, running, (self._state(handle.source),) if handle.source is not None else ())

    def owned(self) -> Owned:
        free: list[Place] = []
        cached: set[Place] = set()
        held: set[Place] = set()
        slabs: set[tuple[str, int]] = set()
        for store in self.cache.storage.slot_pools:
            name, width = store.pool.name, store.slots_per_page
            for page, slab in store.slabs.items():
                slabs.add((name, page))
                for slot in range(width):
                    place = Place(name, page, slot, width)
                    if slab.free >> slot & 1:
                        free.append(place)
                    if slab.owners[slot] is not None:
                        cached.add(place)
                    if slab.references[slot]:
                        held.add(place)
        for name, pool in self.cache.storage.pools.items():
            free += [Place(name, page) for page in pool.free_ids()]
            for page, (known, count) in enumerate(
                zip(pool.published.tolist(), pool.references.tolist(), strict=True)
            ):
                if (name, page) not in slabs:
                    if known:
                        cached.add(Place(name, page))
                    if count:
                        held.add(Place(name, page))
        return Owned(tuple(free), frozenset(cached), frozenset(held))

    def published(self) -> list[Published]:
        index = self.cache.index
        return [self._published(s) for s in (*index.blocks.values(), *index.checkpoints.values())]

    def fingerprint(self) -> Hashable:
        storage = self.cache.storage
        return (
            tuple(self._pool_key(pool) for pool in storage.pools.values()),
            tuple(self._slots_key(store) for store in storage.slot_pools),
            frozenset(map(self._state_key, self.published_states())),
            tuple(self._request_key(r) for r in self.cache.requests.values()),
            tuple(self._state_key(s) for s in self.cache.leases),
            self.cache.running,
            len(self.cache.rows._free) + len(self.cache.requests),  # noqa: SLF001  # a lost row
        )

    def published_states(self) -> Iterator[AttentionBlock | Checkpoint]:
        """Everything in the index."""
        yield from self.cache.index.blocks.values()
        yield from self.cache.index.checkpoints.values()

    # ------------------------------------------------------------------------------------------- translation
    def _place(self, kind: StateKind, unit: int) -> Place:
        pool, width = self._where[kind]
        return Place(pool, *divmod(unit, width), width)

    def _state(self, state: CacheState) -> State:
        return tuple(
            (Part(kind.value, g, m), self._place(kind, unit))
            for kind, units in state
            for g, row in enumerate(units.tolist())
            for m, unit in enumerate(row)
        )

    def _step(self, plan: answers.Plan) -> Step:
        before: list[Copy] = []
        for copy in plan.copies:
            pairs = zip(copy.source.ravel().tolist(), copy.destination.ravel().tolist(), strict=True)
            before += [Copy(self._place(copy.kind, a), self._place(copy.kind, b)) for a, b in pairs]
        return Step(
            plan.start,
            plan.stop,
            tuple(tuple(self._place(ATTENTION, u) for u in row) for row in plan.attention.tolist()),
            self._source(plan),
            None if plan.destination is None else self._state(plan.destination),
            tuple((w.position, self._state(w.state)) for w in plan.writes),
            None if plan.window is None else self._state(plan.window),
            tuple(before),
        )

    def _source(self, plan: answers.Plan) -> State | None:
        """The recurrent state, and the convolution state, which with replay decode may lie in another one."""
        recurrent, line = (self._state(s) if s is not None else () for s in (plan.source, plan.line))
        conv = StateKind.CONV.value
        merged = (*(x for x in recurrent if x[0].kind != conv), *(x for x in line if x[0].kind == conv))
        return merged or None

    def _published(self, state: AttentionBlock | Checkpoint | CacheState) -> Published:
        namespace, tokens = self._names[state.key]
        return Published(namespace, tokens, isinstance(state, AttentionBlock), self._state(state))

    def _note(self, r: Request) -> None:
        namespace = r.salt
        tokens = tuple(r.tokens.tolist())
        width = self.cache.organization.block_tokens
        for k, key in enumerate(r.chain):
            self._names.setdefault(key, (namespace, tokens[: (k + 1) * width]))

    # ------------------------------------------------------------------------------------------- fingerprint
    def _state_key(self, state: object) -> Hashable:
        if not isinstance(state, CacheState):
            return state is not None and type(state).__name__
        units = tuple((kind.value, tuple(ids.ravel().tolist())) for kind, ids in state)
        return type(state).__name__, state.stage.value, self._names.get(state.key), units

    def _queue_key(self, queue: ReclaimQueue) -> Hashable:
        """Ids by age, and whether each has its entry. Held ids keep their place in case the reference goes unused."""
        stamps = queue.stamps.tolist()
        ages = sorted((PARKED - s if s <= PARKED else s, i) for i, s in enumerate(stamps) if s != NO_STAMP)
        return tuple(i for _, i in ages), queue.order() == [i for _, i in ages if stamps[i] >= 0]

    def _pool_key(self, pool: PagePool) -> Hashable:
        owners = tuple(map(self._state_key, pool.owners))
        arrays = (pool.references.tobytes(), pool.published.tobytes(), pool.kinds.tobytes())
        return pool.name, tuple(pool.free_ids()), *arrays, pool.cached, owners, self._queue_key(pool.queue)

    def _slots_key(self, store: SlotPool) -> Hashable:
        slabs = tuple(
            (p, s.free, s.held, s.used, tuple(s.references), tuple(map(self._state_key, s.owners)))
            for p, s in sorted(store.slabs.items())
        )
        open_slabs = tuple(
            tuple(sorted({p for p in heap if (s := store.slabs.get(p)) and s.free and (s.held > 0) == held}))
            for heap, held in ((store._open_held, True), (store._open_idle, False))  # noqa: SLF001  # the lazy heaps have no view
        )
        counts = (store.cached, store.held, store.spare)
        return slabs, open_slabs, counts, self._queue_key(store.queue)

    def _request_key(self, r: Request) -> Hashable:
        rows, row = self.cache.rows, r.row
        # not `limit`: it follows from the rest, or is lower, so that the next step names everything again
        numbers = tuple(int(c[row]) for c in (rows.computed, rows.planned, rows.opened_at))
        states = (r.source, r.open, r.live, r.window, *r.boundaries)
        return (
            r.status is Status.RUNNING,
            tuple(r.tokens.tolist()),
            r.salt,
            numbers,
            tuple(rows.ends(row)),
            int(rows.next_publish[row]) if r.status is Status.RUNNING else 0,
            (r.prompt_tokens, r.kept, r.kept_until) if r.status is Status.RUNNING else (),
            (r.blocks, r.published, r.table[:, : r.blocks].tobytes()),
            tuple(map(self._state_key, states)),
            tuple(b.position for b in r.boundaries),
            tuple(self._undo_key(u, int(rows.head[row])) for u in r.journal if u.step >= rows.head[row]),
        )

    def _undo_key(self, undo: Undo, head: int) -> Hashable:
        lost = tuple((self._state_key(x.state), self.cache.storage.intact(x)) for x in undo.lost)
        return undo.step - head, undo.admitted, undo.blocks, undo.opened_at, len(undo.boundaries), lost

    def _capabilities(self) -> Capabilities:
        cache, storage = self.cache, self.cache.storage
        recurrent = cache.growth.recurrent
        return Capabilities(
            pools=tuple((name, pool.size) for name, pool in storage.pools.items()),
            block_tokens=cache.organization.block_tokens,
            grid_tokens=cache.organization.grid_tokens if recurrent else None,
            attention=_lines(storage.attention),
            checkpoint=_lines(storage.checkpoint),
            live=_lines(storage.live),
            window=_lines(storage.window),
            chunk_tokens=cache.organization.geometry.chunk_tokens,
            replay=cache.growth.replay,
            every_boundary=self.spec.placement == "every_block",
            decode_published=self.spec.decode != "update",
            abandon=True,
            preempt=True,
            truncate=True,
            fork=True,
            namespaces=True,
            batch=True,
            lease=True,
            callback=True,
            clear=True,
            short_commit=True,
            reclaim_order="lru",
            weak_hash=bool(self.spec.buckets),
            usage_errors=(UsageError, CorruptionError),
        )


def _lines(shape: Shape) -> tuple[Line, ...]:
    made: list[Line] = []
    for line in shape:
        pool, width = (
            (line.store.pool.name, line.store.slots_per_page)
            if isinstance(line.store, SlotPool)
            else (line.store.name, 1)
        )
        made.append(Line(line.kind.value, pool, width, line.groups, line.members))
    return tuple(made)
