"""A pretend engine around one allocator: drives it, executes its plans on ghost memory, checks each rule.

Steps run when they are committed, so that everything that happens between plan and completion happens to a plan that
has not run yet. Knows nothing of how an allocator works inside, or of how operations are chosen.

    ("admit", tokens, namespace, budget)  ("resume", i, budget)   ("extend", i, tokens)  ("commit", i, computed, token)
    ("abandon", i)  ("preempt", i)  ("fork", i)  ("truncate", i, tokens)  ("release", i)  ("round", token)
    ("lease", n)  ("end_lease", i)  ("clear",)  ("fail", operation, n): a callback raises inside it
    ("serve", tokens, namespace): admitted, run and released    ("probe", operation): a plan, made and abandoned
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.testing import _checks as checks
from hybridkv.testing._adapter import (
    Admitted,
    CallbackError,
    Namespace,
    Owned,
    Place,
    Refused,
    Step,
    Tokens,
)
from hybridkv.testing._bench import Live
from hybridkv.testing._judging import Judging
from hybridkv.testing._rules import ConformanceError, Operation

if TYPE_CHECKING:
    from collections.abc import Hashable


class World(Judging):
    """One allocator, its requests, its memory, and what was done so far."""

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
            same = Step(live.planned, stop, live.tables, live.home, live.target, (), live.window)
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

    def key(self) -> Hashable:
        """Two worlds with one key behave alike from here on. None where the allocator has no fingerprint."""
        inside = self.sut.fingerprint()
        if inside is None:
            return None
        lives = tuple(
            (r.namespace, r.tokens, r.marks, r.prompt, r.computed, tuple(r.steps), r.home, r.target, r.origin)
            for r in self.live
        )
        return self.ghost.key(), lives, tuple(p for _, p in self.leases), inside

    def drain(self) -> None:
        """A5: end everything, clear, and see that all capacity is free. The world is of no use afterwards."""
        self.do(("drain",))

    def _drain(self) -> None:
        for token, _ in self.leases:
            self.sut.end_lease(token)
        for live in self.live:
            self.sut.release(live.handle)
        self.leases.clear()
        self.live.clear()
        self.check()
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

    def _probe(self, operation: Operation) -> None:
        self.trace.pop()
        self.probe(operation)

    def take_back(self, operation: Operation, before: Hashable) -> None:
        """G5: abandoning the plan that `operation` has just made leaves everything as it was."""
        self.do(("abandon", len(self.live) - 1 if operation[0] == "admit" else operation[1]))
        if operation[0] == "admit":
            self.sut.release(self.live.pop().handle)
        self.trace[-2:] = [("probe", operation)]
        self._expect(self.sut.fingerprint() == before, "HK-G5", f"{operation} abandoned left traces")
