"""What an allocator must offer so that the kit can drive it, in plain Python: one page to write for a foreign engine.

Owns the vocabulary (places, states, steps, ownership) and the protocol. Knows neither `HybridCache` nor the rules.
Capabilities are declared, closed by default and strict both ways: a rule whose capability is missing is reported as
not applicable, and a declared capability that raises `NotImplementedError` fails.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Tokens = tuple[int, ...]
Namespace = Hashable


class Place(NamedTuple):
    """One unit of memory: a page of a pool, or slot `slot` of a page cut in `slots`."""

    pool: str
    page: int
    slot: int = 0
    slots: int = 1


class Part(NamedTuple):
    """Which part of a composite state: its kind, layer group and member."""

    kind: str
    group: int = 0
    member: int = 0


State = tuple[tuple[Part, Place], ...]


class Copy(NamedTuple):
    """Copy one unit."""

    source: Place
    destination: Place


class Zero(NamedTuple):
    """Clear one unit of a state."""

    destination: Place


Operations = tuple[Copy | Zero, ...]


class Step(NamedTuple):
    """What one request's share of a step executes: tokens [start, stop).

    `before` runs first. `tables`: for every attention group the unit of each block of [0, stop). `source`: the state
    at `start`, None for zeros; `destination`: where the state at `stop` goes; `writes`: boundaries kept on the way,
    in order. `window`: inputs since the last end of a chunk, for replay decode: there parts of kind `conv` are those at
    `start` and `stop`, all others those at the last end of a chunk, and a step that ends none writes none.
    """

    start: int
    stop: int
    tables: tuple[tuple[Place, ...], ...]
    source: State | None = None
    destination: State | None = None
    writes: tuple[tuple[int, State], ...] = ()
    window: State | None = None
    before: Operations = ()


class Admitted(NamedTuple):
    """The request runs; `hit` tokens need not be computed. `step`: the first step where admission planned one."""

    handle: Any
    hit: int
    step: Step | None = None


class Refused(NamedTuple):
    """A refusal is a value. `never`: no amount of waiting helps."""

    what: str
    needed: int
    available: int
    never: bool = False


class Forked(NamedTuple):
    """A second request behind the same tokens; `step` is empty and names what it continues from."""

    handle: Any
    step: Step


class Truncated(NamedTuple):
    """Back at `computed` computed tokens; `step` is empty and names what it continues from."""

    computed: int
    step: Step


class View(NamedTuple):
    """Everything that a request holds.

    The unit of each reserved block by group, states that its steps may write, and states that they only read.
    """

    tables: tuple[tuple[Place, ...], ...]
    running: tuple[State, ...]
    sources: tuple[State, ...] = ()

    def places(self) -> set[Place]:
        """All units of the view."""
        found = {place for row in self.tables for place in row}
        return found.union(place for state in (*self.running, *self.sources) for _, place in state)


class Owned(NamedTuple):
    """Who has what, as ids, never as counts. A unit in an index is in `cached` also while somebody holds it.

    A page that is cut in slots appears as its slots, every other one as itself. `free` is in hand-out order.
    """

    free: tuple[Place, ...]
    cached: frozenset[Place]
    held: frozenset[Place]


class Published(NamedTuple):
    """One thing that an index can find: KV of the block that ends at `len(tokens)`, or the state there."""

    namespace: Namespace
    tokens: Tokens
    attention: bool
    state: State


class Line(NamedTuple):
    """One kind of a composite's storage: `groups` times `members` units of pool `pool`, `slots` to a page."""

    kind: str
    pool: str
    slots: int
    groups: int
    members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the allocator offers, and what its storage costs (rules of family E are derived from the latter).

    `grid_tokens`: distance of checkpoint boundaries, None without recurrent state. `every_boundary`: each of them in a
    prompt is kept. `decode_published`: boundaries passed behind the prompt are kept too. `usage_errors`: what a stale
    handle or a second release raises.
    """

    spec_version: str = "0.1"
    pools: tuple[tuple[str, int], ...]
    block_tokens: int
    grid_tokens: int | None = None
    attention: tuple[Line, ...] = ()
    checkpoint: tuple[Line, ...] = ()
    live: tuple[Line, ...] = ()
    window: tuple[Line, ...] = ()
    chunk_tokens: int = 1
    replay: bool = False
    every_boundary: bool = True
    decode_published: bool = False
    prefix_cache: bool = True
    abandon: bool = False
    preempt: bool = False
    truncate: bool = False
    fork: bool = False
    namespaces: bool = False
    batch: bool = False
    lease: bool = False
    callback: bool = False
    clear: bool = False
    short_commit: bool = False
    promises_room: bool = True
    reclaim_order: str | None = None
    trusts_hash: bool = False
    weak_hash: bool = False
    usage_errors: tuple[type[Exception], ...] = (ValueError,)


class AllocatorAdapter(Protocol):
    """One writer; calls are sequential. What a capability does not declare is never called."""

    capabilities: Capabilities

    def admit(
        self, tokens: Tokens, *, namespace: Namespace = None, budget: int | None = None
    ) -> Admitted | Refused:
        """Start a request; its first step, where planned here, has at most `budget` tokens. Refused: nothing changed."""
        ...

    def extend(self, handle: Any, upto: int) -> Step | Refused:
        """Make room for a step up to `upto`, which may lie behind the tokens known. Refused: nothing changed."""
        ...

    def commit(self, handle: Any, computed: int, new_tokens: Tokens = ()) -> Operations:
        """The oldest step has run up to `computed`; publish what that allows. What is returned runs now."""
        ...

    def abandon(self, handle: Any) -> None:
        """The newest step will never run. Abandoning an admission leaves a waiting request."""
        ...

    def preempt(self, handle: Any) -> None:
        """Give everything back and wait."""
        ...

    def resume(self, handle: Any, budget: int | None = None) -> Admitted | Refused:
        """Admit a waiting request again."""
        ...

    def truncate(self, handle: Any, tokens: int) -> Truncated | Refused:
        """Forget tokens from `tokens` on."""
        ...

    def fork(self, handle: Any) -> Forked | Refused:
        """A second running request with the same tokens."""
        ...

    def release(self, handle: Any) -> None:
        """End the request, at any moment of its life."""
        ...

    def extend_many(self, steps: tuple[tuple[Any, int], ...]) -> list[Step | Refused | None]:
        """`extend` for several requests in one call; None: in place, on what the last step named."""
        ...

    def commit_many(self, steps: tuple[tuple[Any, int, Tokens], ...]) -> None:
        """`commit` for several requests in one call."""
        ...

    def lease(self, index: int) -> tuple[Any, Published] | None:
        """Hold published thing number `index` for an outside reader, or None where there is none."""
        ...

    def end_lease(self, token: Any) -> None:
        """The reader is done; a second time raises a usage error."""
        ...

    def arm(self, after: int) -> None:
        """The injected callback (the token hash) raises `CallbackError`, once, after `after` more calls."""
        ...

    def disarm(self) -> None:
        """Callbacks work again."""
        ...

    def clear(self) -> None:
        """Forget what is cached and not held."""
        ...

    def view(self, handle: Any) -> View:
        """What the request holds. Does not mutate."""
        ...

    def owned(self) -> Owned:
        """Current ownership. Does not mutate."""
        ...

    def published(self) -> list[Published]:
        """What the index can find. Does not mutate; an empty list where the allocator cannot tell."""
        ...

    def fingerprint(self) -> Hashable | None:
        """Everything that can influence later answers; None: visited states cannot be recognised."""
        ...


class CallbackError(Exception):
    """Raised by an armed callback."""
