"""Copies of cached states in host memory: out while they are cached, back before they are asked for.

Owns host copies by key, and which copies are running. A device unit that a running copy reads is leased in the cache, so
nothing overwrites it (scenario G3); one that a running copy writes belongs to a request of the tier's own; a host copy
that is being read back is not evicted (C6). A state is found only when all its parts have arrived (G1, I7).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from hybridkv.alloc.checkpoint import AttentionBlock, State
from hybridkv.alloc.organization import StateKind
from hybridkv.alloc.plan import Plan, Refused
from hybridkv.arena.payload import read_blocks, read_state, write_blocks, write_state
from hybridkv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from hybridkv.alloc.cache import HybridCache
    from hybridkv.alloc.requests import Request
    from hybridkv.arena.arena import Arena


class Event(Protocol):
    """Something that will have happened."""

    def done(self) -> bool:
        """Whether it has. Never waits."""
        ...


class Copier(Protocol):
    """Runs copies in order, beside the engine's work."""

    def submit(self, work: Callable[[], None]) -> Event:
        """Run `work` after what the engine has enqueued so far; done when every byte of it has moved."""
        ...


class Now:
    """Copies at once: on a CPU. Its own event."""

    def submit(self, work: Callable[[], None]) -> Now:
        """Run it."""
        work()
        return self

    def done(self) -> bool:
        """Yes."""
        return True


class SideStream:
    """Copies on a CUDA stream of its own, behind what the current stream has been given."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], None]) -> Event:
        """Enqueue it."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            work()
            event = torch.cuda.Event()
            event.record()
        return _Recorded(event)


class _Recorded(NamedTuple):
    event: torch.cuda.Event

    def done(self) -> bool:
        """Whether the stream has passed it."""
        return self.event.query()


class HostCopy:
    """One state on the host. `ready` when all its bytes are; `users` counts copies back that read it."""

    __slots__ = ("payload", "ready", "size", "users")

    def __init__(self, payload: dict[str, Tensor], size: int) -> None:
        self.payload, self.size, self.ready, self.users = payload, size, False, 0


class Fetch:
    """States on their way back to the device. `done` when they are cached there, or given up."""

    __slots__ = ("cancelled", "copies", "done", "request", "tokens")

    def __init__(self, request: Request, tokens: int, copies: list[HostCopy]) -> None:
        self.request, self.tokens, self.copies = request, tokens, copies
        self.done = self.cancelled = False


class HostTier:
    """Host memory of at most `budget_bytes` behind one cache and its arena; least recently used copies go first.

    Call `poll` once a step: it sees which copies have completed. Nothing here waits for the device.
    """

    def __init__(
        self, arena: Arena, cache: HybridCache, *, budget_bytes: int, copier: Copier | None = None
    ) -> None:
        if budget_bytes < 1:
            raise UsageError(f"budget_bytes must be at least 1, got {budget_bytes}")
        self.arena, self.cache, self.budget_bytes = arena, cache, budget_bytes
        self.copier: Copier = copier or (SideStream(arena.device) if arena.device.type == "cuda" else Now())
        self.bytes = 0
        self._copies: dict[tuple[bool, Hashable], HostCopy] = {}  # oldest use first
        self._stores: list[tuple[Event, State, HostCopy]] = []
        self._fetches: list[tuple[Event, Fetch]] = []
        self._names = count()

    def store(self, state: State) -> bool:
        """Start copying a published state out; False where it is there already, or room cannot be had."""
        if state.key is None:
            raise UsageError(f"state must be published, got {state!r}")
        name = (isinstance(state, AttentionBlock), state.key)
        if name in self._copies:
            self._touch(name)
            return False
        shapes = self._shapes(state)
        size = sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
        if not self._make_room(size):
            return False
        pin = self.arena.device.type == "cuda"
        payload = {n: torch.empty(shape, dtype=kind, pin_memory=pin) for n, (shape, kind) in shapes.items()}
        copy = HostCopy(payload, size)
        self.cache.lease(state)
        try:
            event = self.copier.submit(lambda: self._out(state, copy))
        except BaseException:
            self.cache.end_lease(state)
            raise
        self._copies[name] = copy
        self.bytes += size
        self._stores.append((event, state, copy))
        return True

    def store_prefix(self, r: Request) -> int:
        """`store` everything that is cached of a request's prefix, blocks first; how many copies were started."""
        found = self.cache.cached(r)
        return sum(self.store(state) for state in (*found.blocks, *found.checkpoints))

    def match(self, r: Request) -> int:
        """Tokens at the deepest boundary that what the device has cached, and the host behind it, reach together.

        A boundary without its state, or behind a missing block, does not count (B4, I1).
        """
        return self._reach(r)[0]

    def fetch(self, r: Request) -> Fetch | Refused | None:
        """Start copying back what `match` found; None where the device has as much. Refused where there is no room.

        The states are cached on the device when the fetch is done: admit the request then.
        """
        depth, start = self._reach(r)
        if depth <= start:
            return None
        shadow = self.cache.request(("fetch", next(self._names), r.id), r.tokens[:depth], r.salt)
        answer = self.cache.admit(shadow, depth, arriving=True)
        if isinstance(answer, Refused):
            self.cache.release(shadow)
            return answer
        names = self._needed(r, answer.plan.start, depth)
        if not all(map(self._ready, names)):  # the device's own hit was too dear, the host lacks its blocks
            self.cache.release(shadow)
            return None
        fetch = Fetch(shadow, depth, [self._copies[name] for name in names])
        try:
            event = self.copier.submit(lambda: self._back(answer.plan, fetch))
        except BaseException:
            self.cache.release(shadow)
            raise
        for name in names:
            self._copies[name].users += 1
            self._touch(name)
        self._fetches.append((event, fetch))
        return fetch

    def cancel(self, fetch: Fetch) -> None:
        """The states are not wanted any more. Their storage is given back when the copy has ended, not before."""
        fetch.cancelled = True

    def poll(self) -> int:
        """Take note of completed copies, in order; how many are still running."""
        while self._stores and self._stores[0][0].done():
            _, state, copy = self._stores.pop(0)
            copy.ready = True
            self.cache.end_lease(state)
        while self._fetches and self._fetches[0][0].done():
            _, fetch = self._fetches.pop(0)
            for copy in fetch.copies:
                copy.users -= 1
            if not fetch.cancelled:
                self.cache.commit(fetch.request, fetch.tokens)
            self.cache.release(fetch.request)
            fetch.done = True
        return len(self._stores) + len(self._fetches)

    # -------------------------------------------------------------------------------------------------- parts
    def _reach(self, r: Request) -> tuple[int, int]:
        """The boundary that `match` gives, and the one that the device reaches alone."""
        cache, o = self.cache, self.cache.organization
        start = cache.match(r).joint
        unit = o.grid_tokens if cache.growth.recurrent else o.block_tokens
        depth = start
        for position in range(start + unit, (r.length - 1) // unit * unit + 1, unit):
            names = self._needed(r, position - unit, position)
            if cache.growth.attention and not all(self._ready(n) for n in names if n[0]):
                break
            if all(self._ready(n) for n in names):
                depth = position
        return depth, start

    def _ready(self, name: tuple[bool, Hashable]) -> bool:
        return (copy := self._copies.get(name)) is not None and copy.ready

    def _needed(self, r: Request, start: int, stop: int) -> list[tuple[bool, Hashable]]:
        """Blocks of [start, stop), then the state at `stop`."""
        width, growth = self.cache.organization.block_tokens, self.cache.growth
        blocks = r.chain[start // width : stop // width] if growth.attention else []
        state = [(False, r.chain[stop // width - 1])] if growth.recurrent else []
        return [*((True, key) for key in blocks), *state]

    def _touch(self, name: tuple[bool, Hashable]) -> None:
        self._copies[name] = self._copies.pop(name)

    def _make_room(self, size: int) -> bool:
        idle = [(name, c) for name, c in self._copies.items() if c.ready and not c.users]
        if self.bytes - sum(c.size for _, c in idle) + size > self.budget_bytes:
            return False
        for name, copy in idle:
            if self.bytes + size <= self.budget_bytes:
                break
            del self._copies[name]
            self.bytes -= copy.size
        return True

    def _shapes(self, state: State) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each of a state's tensors on the host."""
        g, arena = self.arena.organization.geometry, self.arena
        if isinstance(state, AttentionBlock):
            assert g.attention is not None
            front = (g.attention_layers, arena.organization.block_tokens, g.attention.kv_heads)
            dtype = arena.dtype(StateKind.ATTENTION)
            return {
                "key": ((*front, g.attention.key_dim), dtype),
                "value": ((*front, g.attention.value_dim), dtype),
            }
        assert g.recurrent is not None
        columns = self.arena.cut(StateKind.CONV).size // g.recurrent.conv_dim if g.conv_bytes else 0
        inner = {StateKind.SSM: g.recurrent.state_shape, StateKind.CONV: (columns, g.recurrent.conv_dim)}
        return {
            kind.value: ((g.recurrent_layers, *shape), arena.dtype(kind))
            for kind, shape in inner.items()
            if shape is not None and kind in arena.organization.placements
        }

    def _out(self, state: State, copy: HostCopy) -> None:
        read = (
            read_blocks(self.arena, state.units[StateKind.ATTENTION])
            if isinstance(state, AttentionBlock)
            else read_state(self.arena, state)
        )
        for name, values in read.items():
            copy.payload[name].copy_(values, non_blocking=True)

    def _back(self, plan: Plan, fetch: Fetch) -> None:
        first = plan.start // self.cache.organization.block_tokens
        blocks = [c.payload for c in fetch.copies if "key" in c.payload]
        for k, payload in enumerate(blocks, first):
            write_blocks(self.arena, np.ascontiguousarray(plan.attention[:, k : k + 1]), payload)
        if plan.writes:
            write_state(self.arena, plan.writes[-1].state, fetch.copies[-1].payload)
