"""A pretend engine around one allocator: drives it, executes its plans on ghost memory, checks each rule.

Steps run when they are committed, so that everything that happens between plan and completion happens to a plan that
has not run yet. Knows nothing of how an allocator works inside, or of how operations are chosen.

    ("admit", tokens, namespace, budget)  ("resume", i, budget)   ("extend", i, tokens)  ("commit", i, computed, token)
    ("abandon", i)  ("preempt", i)  ("fork", i)  ("truncate", i, tokens)  ("release", i)  ("round", token)
    ("lease", n)  ("end_lease", i)  ("clear",)  ("fail", operation, n): a callback raises inside it
    ("serve", tokens, namespace): admitted, run and released
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from hybridkv.testing import _checks as checks
from hybridkv.testing._adapter import (
    Admitted,
    AllocatorAdapter,
    CallbackError,
    Copy,
    Namespace,
    Operations,
    Owned,
    Part,
    Place,
    Published,
    Refused,
    State,
    Step,
    Tokens,
    View,
)
from hybridkv.testing._ghost import GhostMemory, Meaning
from hybridkv.testing._rules import ConformanceError, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

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
    window: State | None = None
    tables: tuple[tuple[Place, ...], ...] = ()
    origin: str = ""  # the rule that a wrong content speaks for after a fork, a resume, a truncation

    @property
    def planned(self) -> int:
        """Tokens computed once everything in flight is done."""
        return self.steps[-1].stop if self.steps else self.computed


class World:
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

    # ---------------------------------------------------------------------------------------------- operations
    def do(self, operation: Operation) -> None:
        """Perform one operation, with the rules that belong to it."""
        self.trace.append(operation)
        self._cancelled = False
        try:
            getattr(self, f"_{operation[0]}")(*operation[1:])
        except ConformanceError:
            raise
        except Exception as error:  # noqa: BLE001  # the system under test may raise anything
            self._broken("HK-A0", f"{operation[0]} raised {type(error).__name__}: {error}")
        finally:
            self.known = None

    def _admit(self, tokens: Tokens, namespace: Namespace, budget: int | None) -> None:
        before, print_before = self.sut.owned(), self._print()
        got = self.sut.admit(tokens, namespace=namespace, budget=budget)
        live = Live(None, namespace, tokens, tokens, len(tokens))
        self._begun(live, got, budget, before, print_before, new=True)

    def _serve(self, tokens: Tokens, namespace: Namespace) -> None:
        count = len(self.live)
        self._admit(tokens, namespace, None)
        if len(self.live) > count:
            self.check()
            while self.live[-1].computed < len(tokens):
                if not self.live[-1].steps:
                    self._extend(count, len(tokens) - self.live[-1].computed)
                self._commit(count, None, 1)
                self.check()
            self._release(count)

    def _resume(self, i: int, budget: int | None) -> None:
        before, print_before, live = self.sut.owned(), self._print(), self.live[i]
        got = self.sut.resume(live.handle, budget)
        live.marks, live.prompt, live.origin = live.tokens, len(live.tokens), "HK-G2"
        self._begun(live, got, budget, before, print_before, new=False)

    def _begun(
        self,
        live: Live,
        got: Admitted | Refused,
        budget: int | None,
        before: Owned,
        print_before: Hashable,
        *,
        new: bool,
    ) -> None:
        """Admission answered: usefulness and availability, then what the hit really holds."""
        tokens = live.tokens
        depth, possible = self._best(live, budget, before)
        if isinstance(got, Refused):
            self._refused(print_before, got, possible=possible)
            return
        self._expect(0 <= got.hit < len(tokens), "HK-B4", f"hit {got.hit} of {len(tokens)} tokens")
        self._expect(got.hit >= depth, "HK-E1", f"hit {got.hit} though what is cached reaches {depth}")
        due = self._last_due(live)
        if due > got.hit:
            self._expect(
                not self._affordable(live, due, budget, before), "HK-E5", f"hit {got.hit} of {due} published"
            )
        self.events.append("hit" if got.hit else "miss")
        unit = self.capabilities.grid_tokens or self.capabilities.block_tokens
        self._due |= {("blocks", live.namespace, tokens[:b]) for b in range(unit, got.hit + 1, unit)}
        live.handle, live.running, live.computed, live.home = got.handle, True, got.hit, None
        if new:
            self.live.append(live)
        if got.step is not None:
            self._check_hit(live, got.step, got.hit)
            if got.hit:
                live.home = got.step.source
            self._planned(live, got.step, before, set(), hit=got.hit)

    def _extend(self, i: int, count: int) -> None:
        live, before, print_before = self.live[i], self.sut.owned(), self._print()
        view, stop = self.sut.view(live.handle), live.planned + count
        got = self.sut.extend(live.handle, stop)
        if isinstance(got, Refused):
            self._refused(print_before, got, possible=self._room_for(live, view, stop, before))
            return
        self._planned(live, got, before, view.places())

    def _commit(self, i: int, computed: int | None, token: int) -> None:
        live = self.live[i]
        computed = live.steps[0].stop if computed is None else computed
        step, new = self._run(live, computed, token)
        later = self.sut.commit(live.handle, computed, new)
        self._operate(later)
        self._committed(live, step, computed, new)

    def _abandon(self, i: int) -> None:
        live = self.live[i]
        live.steps.pop()
        live.fresh.pop()
        self.sut.abandon(live.handle)
        owned = self.sut.owned()
        for place in owned.cached - owned.held - self._idle_since.keys():
            self._idle_since[place] = self._was_idle.get(place, len(self.trace))  # revived, or unpinned
        if not live.steps and not self.sut.view(live.handle).places():
            live.running, live.computed, live.home, live.window = False, 0, None, None

    def _preempt(self, i: int) -> None:
        live = self.live[i]
        self._cancelled = bool(live.steps)
        self.sut.preempt(live.handle)
        live.running, live.computed, live.home, live.window = False, 0, None, None
        live.steps, live.fresh = [], []

    def _release(self, i: int) -> None:
        live, self.known = self.live.pop(i), None
        self._cancelled = bool(live.steps)
        self.sut.release(live.handle)
        before = self._print()
        self._raises("HK-A2", "a second release", before, lambda: self.sut.release(live.handle))
        stop = live.planned + 1
        self._raises(
            "HK-F4", "extending a released request", before, lambda: self.sut.extend(live.handle, stop)
        )

    def _fork(self, i: int) -> None:
        live, before, print_before = self.live[i], self.sut.owned(), self._print()
        got = self.sut.fork(live.handle)
        if isinstance(got, Refused):
            c = self.capabilities
            copies = (
                (c.attention, 1),
                (c.checkpoint, 0 if c.live else 1),
                (c.live, 1),
                (c.window, int(c.replay)),
            )
            self._refused(print_before, got, possible=checks.fits(c.pools, before, copies))
            return
        self._operate(got.step.before)
        child = Live(
            got.handle, live.namespace, live.tokens, live.marks, live.prompt, live.computed, origin="HK-G4"
        )
        child.home, child.window, child.tables = got.step.source, got.step.window, got.step.tables
        live.origin = "HK-G4"
        self.live.append(child)
        self._reclaimed(before, self.sut.view(got.handle).places() - self.sut.view(live.handle).places())

    def _truncate(self, i: int, tokens: int) -> None:
        live, before, print_before = self.live[i], self.sut.owned(), self._print()
        view = self.sut.view(live.handle).places()
        got = self.sut.truncate(live.handle, tokens)
        if isinstance(got, Refused):
            self._refused(print_before, got, possible=False)
            return
        self._expect(
            got.computed <= tokens, "HK-C4", f"truncated to {tokens}, yet {got.computed} are computed"
        )
        self._operate(got.step.before)
        live.tokens, live.marks = live.tokens[:tokens], live.marks[:tokens]
        live.prompt, live.computed, live.origin = min(live.prompt, tokens), got.computed, "HK-C4"
        live.home, live.window, live.tables = got.step.source, got.step.window, got.step.tables
        self._reclaimed(before, self.sut.view(live.handle).places() - view)

    def _round(self, token: int) -> None:
        """One token for every idle running request, in one batch."""
        chosen = [r for r in self.live if r.running and not r.steps and r.computed < len(r.tokens)]
        before, views = self.sut.owned(), [self.sut.view(live.handle) for live in chosen]
        answers = self.sut.extend_many(tuple((live.handle, live.planned + 1) for live in chosen))
        done: list[tuple[Live, Step, Tokens]] = []
        for live, view, answer in zip(chosen, views, answers, strict=True):
            if isinstance(answer, Refused):
                self.events.append("refused")
                continue
            stop = live.planned + 1
            same = Step(live.planned, stop, live.tables, live.home, live.home, (), live.window)
            live.steps.append(same if answer is None else answer)
            live.fresh.append(self._fresh(live.steps[-1], view.places()))
            self.check_plan(live.steps[-1], stop)
            done.append((live, *self._run(live, stop, token)))
        taken = {p for live in chosen for p in self.sut.view(live.handle).places()}
        self._reclaimed(before, taken - {p for view in views for p in view.places()})
        if done:
            self.sut.commit_many(tuple((live.handle, step.stop, new) for live, step, new in done))
        for live, step, new in done:
            self._committed(live, step, step.stop, new)

    def singly(self, operation: Operation) -> None:
        """A round by single calls, for comparison (H3)."""
        ready = [r.running and not r.steps and r.computed < len(r.tokens) for r in self.live]
        chosen = [i for i, good in enumerate(ready) if good]
        for i in chosen:
            self.do(("extend", i, 1))
        for i in chosen:
            if self.live[i].steps:
                self.do(("commit", i, None, operation[1]))

    def _lease(self, n: int) -> None:
        got = self.sut.lease(n)
        if got is not None:
            self.leases.append(got)

    def _end_lease(self, i: int) -> None:
        (token, _), self.known = self.leases.pop(i), None
        self.sut.end_lease(token)
        if all(token is not other for other, _ in self.leases):
            self._raises("HK-G3", "a second completion", self._print(), lambda: self.sut.end_lease(token))

    def _clear(self) -> None:
        self.sut.clear()
        self._due.clear()

    def _fail(self, operation: Operation, after: int) -> None:
        """A callback raises inside `operation`, after `after` that did not; then it must not have happened."""
        before, memory = self._print(), self.ghost.snapshot()
        marks = [live.marks for live in self.live]
        self.sut.arm(after)
        try:
            getattr(self, f"_{operation[0]}")(*operation[1:])
        except CallbackError:
            self._expect(
                self._print() == before, "HK-G6", f"{operation} failed in a callback and left traces"
            )
            self.ghost.restore(memory)
            for live, old in zip(self.live, marks, strict=True):
                live.marks = old
        self.sut.disarm()

    # -------------------------------------------------------------------------------------------------- running
    def _planned(self, live: Live, step: Step, before: Owned, held: set[Place], hit: int = 0) -> None:
        """A step is in flight."""
        self.check_plan(step, step.stop)
        live.steps.append(step)
        fresh = self._fresh(step, held, hit)
        live.fresh.append(fresh)
        relied = set() if self.quiet else self._relied(live)
        first = step.start // self.capabilities.block_tokens
        clash = {p for row in step.tables for p in row[first:]} & relied
        if written := {
            id_ for id_ in fresh for p in self.sut.published() for _, id_ in p.state if id_ in fresh
        }:
            self._broken("HK-C3", f"handed out and still in the index: {sorted(written)}")
        self._expect(not clash, "HK-D2", f"a step is to write {sorted(clash)}, which others rely on")
        self._reclaimed(before, fresh)

    def _fresh(self, step: Step, held: set[Place], hit: int = 0) -> set[Place]:
        """Units that the step was newly given."""
        first = hit // self.capabilities.block_tokens
        found = {place for row in step.tables for place in row[first:]}
        states = [s for _, s in step.writes] + [s for s in (step.destination, step.window) if s]
        found.update(place for state in states for _, place in state)
        return found - held

    def _run(self, live: Live, computed: int, token: int) -> tuple[Step, Tokens]:
        """Execute the oldest step of a request up to `computed`; the tokens that become known with it."""
        step = live.steps[0]
        unknown = max(0, computed - len(live.tokens))
        sampled = computed >= len(live.tokens)
        new = (token,) * (unknown + sampled)
        for place in live.fresh[0]:
            self.ghost.poison(place)
        self._operate(step.before)
        self._read_state(live, step)
        tokens = live.tokens + new
        marks = live.marks + tuple(
            self._mark(live, p, tokens[p]) for p in range(len(live.marks), len(tokens))
        )
        self._read_blocks(live, step, marks)
        self._write_blocks(live, step, computed, marks)
        self._write_states(live, step, computed, marks)
        live.marks = marks
        return step, new

    def _committed(self, live: Live, step: Step, computed: int, new: Tokens) -> None:
        c = self.capabilities
        live.steps.pop(0)
        live.fresh.pop(0)
        live.tokens += new
        live.home, live.window, live.tables = self._home(step, computed), step.window, step.tables
        unit = c.grid_tokens or c.block_tokens
        last = computed if c.decode_published else min(computed, live.prompt)
        for b in range((live.computed // unit + 1) * unit, last + 1, unit):
            self._due |= {(what, live.namespace, live.tokens[:b]) for what in ("blocks", "state")}
        live.computed = computed
        if live.steps and computed < step.stop:
            self._broken("HK-A0", "a short commit was accepted with later steps in flight")

    def _home(self, step: Step, computed: int) -> State | None:
        """Where the state at `computed` went: into the first write not before it, else the destination.

        A running state of its own is always the destination; what is written at boundaries are copies of it.
        """
        if self.capabilities.live:
            return step.destination
        return next((state for position, state in step.writes if position >= computed), step.destination)

    def _mark(self, live: Live, position: int, token: int) -> int:
        own = not self.capabilities.decode_published and position >= live.prompt
        return token + DECODED if own else token

    def _fold(self, live: Live, position: int) -> int:
        """What a state at `position` has absorbed: replay decode advances it at chunk ends only."""
        if not self.capabilities.replay or position <= live.prompt:
            return position
        chunk = self.capabilities.chunk_tokens
        return max(position // chunk * chunk, live.prompt)

    def _read_state(self, live: Live, step: Step) -> None:
        if not self.capabilities.grid_tokens:
            return
        fold = self._fold(live, step.start)
        if step.source is None:
            self._expect(step.start == 0, "HK-B5", f"a step from {step.start} reads no state")
            return
        for part, place in step.source:
            got = self.ghost.read(place)
            want = live.marks[:fold]
            rule = "HK-B5" if got is None else "HK-D3" if step.start == 0 else "HK-B3"
            ok = got == (Meaning(part, live.namespace, want) if step.start else ZERO)
            self._expect(
                ok, rule, f"a step from {step.start} reads {part} at {place} and finds {got}, not {want}"
            )
        for p in range(fold, step.start):
            self._expect_window(live, step.window, p)

    def _expect_window(self, live: Live, window: State | None, position: int) -> None:
        offset = position % self.capabilities.chunk_tokens
        for part, place in window or ():
            got = self.ghost.read(place, offset)
            want = Meaning(part, live.namespace, live.marks[: position + 1])
            self._expect(
                got == want, live.origin or "HK-B3", f"the window holds {got} for position {position}"
            )
        self._expect(bool(window), "HK-B5", f"no window holds the inputs of position {position}")

    def _read_blocks(self, live: Live, step: Step, marks: Tokens) -> None:
        for p in range(step.start):
            for part, place, offset in self._cells(step.tables, p):
                got = self.ghost.read(place, offset)
                want = Meaning(part, live.namespace, marks[: p + 1])
                rule = "HK-B5" if got is None else "HK-B1"
                self._expect(got == want, rule, f"a step reads {place} for position {p} and finds {got}")

    def _write_blocks(self, live: Live, step: Step, computed: int, marks: Tokens) -> None:
        relied = self._relied(live)
        for p in range(step.start, step.stop):
            known = marks[: p + 1] if p < computed else (*marks[:computed], -1 - p)
            for part, place, offset in self._cells(step.tables, p):
                self._expect(place not in relied, "HK-D2", f"a step writes {place}, which others rely on")
                self.ghost.write(place, Meaning(part, live.namespace, known), offset)

    def _write_states(self, live: Live, step: Step, computed: int, marks: Tokens) -> None:
        relied = self._relied(live)
        if not self.capabilities.grid_tokens:
            return
        home = self._home(step, computed)
        self._expect(home is not None, "HK-D5", f"a step to {computed} has no destination")
        chunk = self.capabilities.chunk_tokens
        for part, place in step.window or ():
            for p in range(max(step.start, live.prompt), computed):
                self.ghost.write(place, Meaning(part, live.namespace, marks[: p + 1]), p % chunk)
        kept = [(position, state) for position, state in step.writes if position <= computed]
        end = [(self._fold(live, computed), home)] if home is not None else []
        if not end and not kept:
            return
        if self._fold(live, computed) < computed and self.capabilities.replay:
            self._expect(
                step.window is not None, "HK-B5", f"a step to {computed} has no window for its inputs"
            )
        for position, state in [*kept, *end]:
            for part, place in state or ():
                self._expect(place not in relied, "HK-D2", f"a step writes {place}, which others rely on")
                self.ghost.write(place, Meaning(part, live.namespace, marks[:position]))

    def _cells(self, tables: tuple[tuple[Place, ...], ...], p: int) -> list[tuple[Part, Place, int]]:
        k, offset = divmod(p, self.capabilities.block_tokens)
        return [(Part("attention", g), row[k], offset) for g, row in enumerate(tables)]

    def _relied(self, live: Live) -> set[Place]:
        """What others rely on: published units, other requests' units, leases."""
        relied = set(self.sut.owned().cached)
        for other in self.live:
            if other is not live:
                relied |= self.sut.view(other.handle).places()
        return relied.union(place for _, lease in self.leases for _, place in lease.state)

    def _operate(self, operations: Operations) -> None:
        """Execute copies and clears in order (D1)."""
        written: set[Place] = set()
        for op in operations:
            self._expect(self.ghost.inside(op.destination), "HK-D5", f"{op} writes outside its pool")
            cached = self.sut.owned().cached
            self._expect(op.destination not in cached, "HK-D2", f"{op} overwrites what is published")
            if isinstance(op, Copy):
                self._expect(op.source != op.destination, "HK-D1", f"{op} copies a unit onto itself")
                self._expect(op.source not in written, "HK-D1", f"{op} reads what an earlier one overwrote")
                self.ghost.copy(op.source, op.destination)
            else:
                self.ghost.write(op.destination, ZERO)
            written.add(op.destination)

    # ------------------------------------------------------------------------------------------------- checking
    def check(self) -> None:
        """The rules that hold between any two operations."""
        owned = self.sut.owned()
        self._grow_older(owned)
        if self.quiet:
            return
        found = [self.sut.view(live.handle) for live in self.live]
        users = {place for view in found for place in view.places()}
        users.update(place for _, lease in self.leases for _, place in lease.state)
        self._all(checks.views(found, owned, self.ghost))
        self._all(checks.partition(owned, self.capabilities.pools, users, cancelled=self._cancelled))
        for live, view in zip(self.live, found, strict=True):
            self._check_request(live, view, owned)
        self._check_published(owned)
        for _, lease in self.leases:
            for part, place in lease.state:
                offset = self.capabilities.block_tokens - 1 if lease.attention else 0
                got = self.ghost.read(place, offset)
                ok = place in owned.held and got == Meaning(part, lease.namespace, lease.tokens)
                self._expect(ok, "HK-G3", f"leased {place} holds {got}")

    def _grow_older(self, owned: Owned) -> None:
        """Since when each reclaimable unit is idle."""
        for place in owned.cached - owned.held:
            self._idle_since.setdefault(place, len(self.trace))
        for place in [p for p in self._idle_since if p not in owned.cached or p in owned.held]:
            self._was_idle[place] = self._idle_since.pop(place)

    def _check_request(self, live: Live, view: View, owned: Owned) -> None:
        if not live.running:
            self._expect(not view.places(), "HK-A1", f"a waiting request holds {sorted(view.places())}")
            return
        for p in range(live.computed):
            for part, place, offset in self._cells(view.tables, p):
                got = self.ghost.read(place, offset)
                want = Meaning(part, live.namespace, live.marks[: p + 1])
                self._expect(
                    got == want, live.origin or "HK-B1", f"position {p} holds {got} at {place}, not {want}"
                )
        if self.capabilities.grid_tokens and live.computed:
            self._expect(live.home is not None, live.origin or "HK-B3", f"no state at {live.computed}")
            fold = self._fold(live, live.computed)
            for part, place in live.home or ():
                got = self.ghost.read(place)
                want = Meaning(part, live.namespace, live.marks[:fold])
                same = got is not None and (got.namespace, got.tokens) == want[1:] and got.part == part
                self._expect(
                    same, live.origin or "HK-B3", f"the state at {live.computed} holds {got}, not {want}"
                )
                self._expect(place in owned.held, "HK-D4", f"the running state's {place} is not held")
            for p in range(fold, live.computed):
                self._expect_window(live, live.window, p)
        for step in live.steps:
            states = [step.source, step.destination, step.window, *(s for _, s in step.writes)]
            places = {p for s in states if s for _, p in s} | {p for row in step.tables for p in row}
            self._expect(
                places <= owned.held, "HK-D4", f"a plan relies on {sorted(places - owned.held)}, not held"
            )

    def check_plan(self, step: Step, stop: int) -> None:
        """D5: ids exist, and the plan covers its tokens."""
        states = [step.source, step.destination, step.window, *(s for _, s in step.writes)]
        places = {p for s in states if s for _, p in s} | {p for row in step.tables for p in row}
        outside = sorted(p for p in places if not self.ghost.inside(p))
        self._expect(not outside, "HK-D5", f"a plan names {outside}, which do not exist")
        need = -(-stop // self.capabilities.block_tokens)
        for line in self.capabilities.attention:
            rows = len(step.tables) == line.groups and all(len(row) >= need for row in step.tables)
            self._expect(
                rows,
                "HK-D5",
                f"a plan to {stop} has tables {step.tables}, not {line.groups} of {need} blocks",
            )

    def _check_hit(self, live: Live, step: Step, hit: int) -> None:
        """B2, C1, C2, C5, D3, F1-F3: the hit holds what was promised, in every group and part."""
        c = self.capabilities
        wrong: dict[int, tuple[str, str]] = {}
        for p in range(hit):
            for part, place, offset in self._cells(step.tables, p):
                got, want = (
                    self.ghost.read(place, offset),
                    Meaning(part, live.namespace, live.tokens[: p + 1]),
                )
                if got != want:
                    width = c.block_tokens - (c.block_tokens - 1 - offset)
                    rule = checks.wrong_hit(got, want, "HK-B2", weak_hash=c.weak_hash, width=width)
                    wrong.setdefault(
                        part.group, (rule, f"hit {hit}, but position {p} holds {got} in group {part.group}")
                    )
        if wrong:
            some = 0 < len(wrong) < len(step.tables)
            rule, message = next(iter(wrong.values()))
            self._broken("HK-C5" if some and rule == "HK-B2" else live.origin or rule, message)
        if not c.grid_tokens:
            return
        if not hit:
            cleared = {op.destination for op in step.before if not isinstance(op, Copy)}
            zero = cleared.issuperset(place for _, place in step.source or ())
            self._expect(zero, live.origin or "HK-D3", f"a miss starts from {step.source}")
            return
        self._expect(step.source is not None, "HK-C2", f"hit {hit} without a state")
        pairs = [
            (self.ghost.read(p), Meaning(part, live.namespace, live.tokens[:hit]))
            for part, p in step.source or ()
        ]
        bad = [(got, want) for got, want in pairs if got != want]
        if bad:
            rule = "HK-C2" if len(bad) == len(pairs) else "HK-C1"
            rule = checks.wrong_hit(*bad[0], rule, weak_hash=c.weak_hash, width=c.block_tokens)
            self._broken(live.origin or rule, f"hit {hit}, but a part of its state is {bad[0][0]}")

    def _check_published(self, owned: Owned) -> None:
        """B6, C1: everything that can be found holds what its key says."""
        for entry in self.sut.published():
            offset = self.capabilities.block_tokens - 1 if entry.attention else 0
            cells = [(part, place, self.ghost.read(place, offset)) for part, place in entry.state]
            bad = [
                (place, got)
                for part, place, got in cells
                if got != Meaning(part, entry.namespace, entry.tokens)
            ]
            if bad:
                rule = "HK-C1" if len(bad) < len(cells) and not entry.attention else "HK-B6"
                c, want = self.capabilities, Meaning(cells[0][0], entry.namespace, entry.tokens)
                rule = checks.wrong_hit(bad[0][1], want, rule, weak_hash=c.weak_hash, width=c.block_tokens)
                self._broken(
                    rule, f"published for {entry.tokens} in {entry.namespace}: {bad[0][0]} holds {bad[0][1]}"
                )
            missing = [place for _, place, _ in cells if place not in owned.cached]
            self._expect(not missing, "HK-C1", f"found in the index, but {missing} are not marked so")

    def _refused(self, before: Hashable, refused: Refused, *, possible: bool) -> None:
        self.events.append("refused")
        self._expect(self._print() == before, "HK-A4", "a refused call left traces")
        if self.capabilities.promises_room:
            self._expect(not possible, "HK-E2", f"{refused} though enough can be had")

    def _reclaimed(self, before: Owned, taken: set[Place]) -> None:
        """E3, E4: what the index lost in a call that took `taken`."""
        after = self.sut.owned()
        lost = set(before.cached - after.cached)
        if not lost:
            return
        self.events.append("reclaim")
        self._due.clear()
        for pool in {p.pool for p in lost}:
            enough = checks.free_suffices(before, taken, pool)
            self._expect(not enough, "HK-E3", f"reclaimed {sorted(lost)} although enough of {pool} was free")
        if self.capabilities.reclaim_order == "lru":
            survivors = set(after.cached - after.held) & set(before.cached - before.held)
            whole = {p for p in survivors if p.slots == 1}
            self._all(checks.order({p for p in lost if p.slots == 1}, whole, self._idle_since))

    # ----------------------------------------------------------------------------------------------- usefulness
    def _best(self, live: Live, budget: int | None, owned: Owned) -> tuple[int, bool]:
        """The deepest hit that is cached whole and affordable, and whether admission is possible at all."""
        c = self.capabilities
        if self.quiet:
            return 0, False
        possible = self._affordable(live, 0, budget, owned)
        if not c.prefix_cache:
            return 0, possible
        unit = c.grid_tokens or c.block_tokens
        contents = checks.Contents(c, self.ghost, owned.cached)
        for depth in range((len(live.tokens) - 1) // unit * unit, 0, -unit):
            places = contents.whole(live.namespace, live.tokens, depth)
            if places is not None:
                if checks.fits(c.pools, owned, self._cost(live, depth, budget), places):
                    return depth, True
                break
        return 0, possible

    def _affordable(self, live: Live, depth: int, budget: int | None, owned: Owned) -> bool:
        c = self.capabilities
        if not depth:
            return checks.fits(c.pools, owned, self._cost(live, 0, budget))
        places = checks.Contents(c, self.ghost, owned.cached).whole(live.namespace, live.tokens, depth)
        return places is None or checks.fits(c.pools, owned, self._cost(live, depth, budget), places)

    def _cost(self, live: Live, depth: int, budget: int | None) -> checks.Demand:
        stop = len(live.tokens) if budget is None else min(len(live.tokens), depth + budget)
        return checks.cost(self.capabilities, depth, stop, self._boundaries(depth, stop), fresh=True)

    def _boundaries(self, start: int, stop: int) -> int:
        grid = self.capabilities.grid_tokens
        return stop // grid - start // grid if grid else 0

    def _room_for(self, live: Live, view: View, stop: int, owned: Owned) -> bool:
        c = self.capabilities
        have = max((len(row) for row in view.tables), default=0) * c.block_tokens
        kept = self._boundaries(live.planned, stop)
        blocks = checks.cost(c, have, max(have, stop), kept, fresh=False)
        return checks.fits(c.pools, owned, blocks)

    def _last_due(self, live: Live) -> int:
        """The deepest boundary that everything committed so far, and nothing reclaimed since, promises to hit."""
        c = self.capabilities
        if not c.every_boundary or not c.prefix_cache:
            return 0
        unit = c.grid_tokens or c.block_tokens
        for depth in range((len(live.tokens) - 1) // unit * unit, 0, -unit):
            wanted = {("blocks", live.namespace, live.tokens[:b]) for b in range(unit, depth + 1, unit)}
            if c.grid_tokens:
                wanted.add(("state", live.namespace, live.tokens[:depth]))
            if wanted <= self._due:
                return depth
        return 0

    # ---------------------------------------------------------------------------------------------------- parts
    def key(self) -> Hashable:
        """Two worlds with one key behave alike from here on. None where the allocator has no fingerprint."""
        inside = self.sut.fingerprint()
        if inside is None:
            return None
        lives = tuple(
            (r.namespace, r.tokens, r.marks, r.prompt, r.computed, tuple(r.steps), r.home, r.origin)
            for r in self.live
        )
        return self.ghost.key(), lives, tuple(p for _, p in self.leases), inside

    def drain(self) -> None:
        """A5: end everything, clear, and see that all capacity is free. The world is of no use afterwards."""
        self.trace.append(("drain",))
        for token, _ in self.leases:
            self.sut.end_lease(token)
        for live in self.live:
            self.sut.release(live.handle)
        self.sut.clear()
        owned = self.sut.owned()
        rest = set(owned.cached | owned.held)
        whole = {Place(name, page) for name, size in self.capabilities.pools for page in range(size)}
        ok = not rest and set(owned.free) == whole and len(owned.free) == len(whole)
        self._expect(
            ok, "HK-A5", f"after a clear {sorted(rest)} are in use and {len(owned.free)} of {len(whole)} free"
        )

    def probe(self, operation: Operation) -> None:
        """A plan is made and abandoned. The world may be used afterwards."""
        before, count = self.sut.fingerprint(), self.flights
        self.do(operation)
        if self.flights > count:
            self.check()
            self.take_back(operation, before)
            self.check()

    def take_back(self, operation: Operation, before: Hashable) -> None:
        """G5: abandoning the plan that `operation` has just made leaves everything as it was."""
        self.do(("abandon", len(self.live) - 1 if operation[0] == "admit" else operation[1]))
        if operation[0] == "admit":
            self.sut.release(self.live.pop().handle)
        self._expect(self.sut.fingerprint() == before, "HK-G5", f"{operation} abandoned left traces")

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
