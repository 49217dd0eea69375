"""The same world and rules under Hypothesis: larger pools, longer traces. Needs hypothesis.

Which operations run is drawn first, as weights, some of them zero (swarm testing): a workload that never decodes finds
other things than one that does everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
from hypothesis import event
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridkv.testing._world import World
from hybridkv.testing.strategies import prompts, small, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridkv.testing._adapter import AllocatorAdapter
    from hybridkv.testing._bench import Live
    from hybridkv.testing._rules import Operation

KINDS = (
    "admit",
    "extend",
    "commit",
    "short",
    "abandon",
    "preempt",
    "fork",
    "truncate",
    "release",
    "round",
    "lease",
    "fail",
)
MAX_LIVE, MAX_TOKENS, MAX_FLIGHTS = 4, 24, 3


def machine(
    make: Callable[[Any], AllocatorAdapter], specs: st.SearchStrategy[Any]
) -> type[RuleBasedStateMachine]:
    """A state machine class for allocators that `make` builds from what `specs` draws."""

    class AllocatorMachine(RuleBasedStateMachine):
        world: World

        @initialize(spec=specs, weights=st.lists(st.integers(0, 3), min_size=len(KINDS), max_size=len(KINDS)))
        def boot(self, spec: Any, weights: list[int]) -> None:
            self.world = World(make, spec)
            self.seen: list[tuple[int, ...]] = []
            self.deck = [
                kind for kind, weight in zip(KINDS, weights, strict=True) for _ in range(weight)
            ] or ["admit"]
            self.deck += ["admit", "commit", "extend"]

        @precondition(lambda self: len(self.world.live) < MAX_LIVE)
        @rule(new=prompts(), base=small, keep=st.integers(0, 12), salt=small, n=st.integers(0, 9))
        def admit(self, new: tuple[int, ...], base: int, keep: int, salt: int, n: int) -> None:
            old = self.seen[base % len(self.seen)][:keep] if self.seen else ()
            chosen = (*old, *new)[: MAX_TOKENS - 4]
            self.seen.append(chosen)
            self.do(("admit", chosen, 7 if salt == 0 else None, n or None))

        @rule(card=st.integers(0, 63), i=small, n=st.integers(0, 9), token=tokens)
        def act(self, card: int, i: int, n: int, token: int) -> None:
            kind = self.deck[card % len(self.deck)]
            operation = choose(self.world, kind, i, n, token)
            if operation is not None:
                self.do(operation)

        @precondition(lambda self: any(r.running for r in self.world.live))
        @rule(i=small, n=st.integers(1, 5))
        def probe(self, i: int, n: int) -> None:
            live = self.world.live
            at = [k for k, r in enumerate(live) if r.running and _may_extend(r, n)]
            if at:
                self.world.probe(("extend", at[i % len(at)], n))

        @invariant()
        def every_rule_holds(self) -> None:
            if hasattr(self, "world"):
                self.world.check()

        def teardown(self) -> None:
            if hasattr(self, "world"):
                for name in set(self.world.events):
                    event(name)
                if self.world.capabilities.clear and self.world.broken is None:
                    self.world.drain()

        def do(self, operation: Operation) -> None:
            self.world.do(operation)

    return AllocatorMachine


def choose(world: World, kind: str, i: int, n: int, token: int) -> Operation | None:
    """The operation of this kind that the integers pick from what is alive, or None where there is none."""
    live, c = world.live, world.capabilities

    def pick(good: Callable[[Live], bool]) -> int | None:
        at = [k for k, r in enumerate(live) if good(r)]
        return at[i % len(at)] if at else None

    if kind == "round" and c.batch:
        ready = [r for r in live if r.running and not r.steps and r.computed < len(r.tokens)]
        return ("round", token) if ready and all(len(r.tokens) < MAX_TOKENS for r in live) else None
    if kind == "lease" and c.lease:
        return ("end_lease", i % len(world.leases)) if len(world.leases) > n % 3 else ("lease", i)
    if kind == "fail" and c.callback:
        k = pick(lambda r: bool(r.steps))
        return None if k is None else ("fail", ("commit", k, None, token), n % 2)
    if kind == "extend":
        k = pick(lambda r: r.running and _may_extend(r, 1))
        return None if k is None else ("extend", k, min(1 + n % 5, MAX_TOKENS - live[k].planned))
    if kind in ("commit", "abandon"):
        k = pick(lambda r: bool(r.steps))
        return None if k is None else (("commit", k, None, token) if kind == "commit" else ("abandon", k))
    if kind == "short" and c.short_commit:
        k = pick(lambda r: len(r.steps) == 1 and r.steps[0].stop - r.steps[0].start > 1)
        return (
            None
            if k is None
            else (
                "commit",
                k,
                live[k].steps[0].start + 1 + n % (live[k].steps[0].stop - live[k].steps[0].start - 1),
                token,
            )
        )
    if kind == "preempt" and c.preempt:
        waiting = pick(lambda r: not r.running)
        if waiting is not None and n % 3:
            return ("resume", waiting, n or None)
        k = pick(lambda r: r.running)
        return None if k is None else ("preempt", k)
    if kind == "fork" and c.fork and len(live) < MAX_LIVE:
        k = pick(lambda r: r.running and not r.steps and r.computed > 0)
        return None if k is None else ("fork", k)
    if kind == "truncate" and c.truncate:
        k = pick(lambda r: r.running and not r.steps and r.computed > 0)
        return None if k is None else ("truncate", k, max(1, len(live[k].tokens) - 1 - n))
    if kind == "release":
        k = pick(lambda _: True)
        return None if k is None else ("release", k)
    return None


def _may_extend(r: Live, n: int) -> bool:
    return len(r.steps) < MAX_FLIGHTS and r.planned + n <= MAX_TOKENS
