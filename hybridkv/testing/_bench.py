"""What a `World` is made of: one allocator, ghost memory, the requests as an engine sees them; and how a rule speaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from hybridkv.testing._adapter import (
    AllocatorAdapter,
    Namespace,
    Part,
    Place,
    Published,
    State,
    Step,
    Tokens,
)
from hybridkv.testing._ghost import GhostMemory, Meaning
from hybridkv.testing._rules import ConformanceError, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from hybridkv.testing import _checks as checks

ZERO = Meaning(Part("zero"), None, ())
DECODED = 1 << 20  # tokens whose states an `update` decode made have a meaning of their own (I9)


@dataclass(slots=True, eq=False)
class Live:
    """A request as the engine sees it. `marks` are its tokens, or what their states mean where that differs."""

    handle: Any
    namespace: Namespace
    tokens: Tokens
    marks: Tokens
    prompt: int
    computed: int = 0
    running: bool = True
    steps: list[Step] = field(default_factory=list)
    fresh: list[set[Place]] = field(default_factory=list)
    home: State | None = None  # where the state at `computed` is
    target: State | None = None  # where the last step left the running state
    window: State | None = None
    tables: tuple[tuple[Place, ...], ...] = ()
    origin: str = ""  # the rule that a wrong content speaks for after a fork, a resume, a truncation

    @property
    def planned(self) -> int:
        """Tokens computed once everything in flight is done."""
        return self.steps[-1].stop if self.steps else self.computed


class Bench:
    """One allocator, its requests, its memory, and what was done so far."""

    def __init__(self, make: Callable[[Any], AllocatorAdapter], spec: Any) -> None:
        self.spec, self.sut = spec, make(spec)
        self.capabilities = self.sut.capabilities
        self.ghost = GhostMemory(self.capabilities.pools)
        self.live: list[Live] = []
        self.leases: list[tuple[Any, Published]] = []
        self.trace: list[Operation] = []
        self.quiet = False  # replaying what was checked before
        self.known: Hashable = None  # the fingerprint, where the search has just computed it
        self.broken: ConformanceError | None = None
        self.events: list[str] = []
        self._due: set[tuple[str, Namespace, Tokens]] = set()
        self._idle_since: dict[Place, int] = {}
        self._was_idle: dict[Place, int] = {}
        self._cancelled = False

    @property
    def flights(self) -> int:
        """Steps in flight."""
        return sum(len(live.steps) for live in self.live)

    def _print(self) -> Hashable:
        """The fingerprint, for comparison; nothing while replaying."""
        if self.known is not None:
            found, self.known = self.known, None
            return found
        return None if self.quiet else self.sut.fingerprint()

    def _raises(self, rule: str, what: str, before: Hashable, call: Callable[[], object]) -> None:
        try:
            call()
        except self.capabilities.usage_errors:
            self._expect(self._print() == before, rule, f"{what} raised, and left traces")
        else:
            self._broken(rule, f"{what} was accepted")

    def _all(self, found: checks.Broken) -> None:
        for rule, message in found:
            self._broken(rule, message)

    def _expect(self, true: object, rule: str, message: str) -> None:
        if not true:
            self._broken(rule, message)

    def _broken(self, rule: str, message: str) -> NoReturn:
        self.broken = ConformanceError(rule, message, self.spec, tuple(self.trace))
        raise self.broken
