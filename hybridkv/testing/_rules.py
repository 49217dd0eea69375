"""The rules: an id for ever, a sentence, the invariant it comes from, what an allocator must declare for it to apply.

Owns words, and the error that cites them. How each rule is checked from outside stands in `_checks` and `_world`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hybridkv.testing._adapter import Capabilities

Operation = tuple[Any, ...]


class Rule(NamedTuple):
    """`sentence` is what must hold; `invariants` are ids of the design; `needs` names fields of `Capabilities`."""

    sentence: str
    invariants: tuple[str, ...]
    needs: tuple[str, ...] = ()
    since: str = "0.1"


STATE, CACHE = ("grid_tokens",), ("prefix_cache",)

RULES: dict[str, Rule] = {
    "HK-A0": Rule("no call raises: running short is a typed refusal", ("I6",)),
    "HK-A1": Rule("nothing is lost: every id is free, cached or held", ("I5",)),
    "HK-A2": Rule("nothing is freed twice; a second release raises and changes nothing", ("I5",)),
    "HK-A3": Rule("what is free is in no view and in no index", ("I2", "I3")),
    "HK-A4": Rule("a refused call changes nothing that can be observed", ("I6",)),
    "HK-A5": Rule("after everything is released and cleared, all capacity is free", ("I5",), ("clear",)),
    "HK-A6": Rule("a view names existing units that somebody owns, each position once", ("I2", "I4")),
    "HK-A7": Rule("a running state has one owner", ("I8",), STATE),
    "HK-A8": Rule("a reference protects every part of a composite", ("I2",), STATE),
    "HK-B1": Rule("every computed position holds its own prefix", ("I10",)),
    "HK-B2": Rule("every position of a hit holds its own prefix", ("I1",), CACHE),
    "HK-B3": Rule("the running state has absorbed exactly the computed tokens", ("I10",), STATE),
    "HK-B4": Rule("a hit leaves at least one token to compute", ("I1",), CACHE),
    "HK-B5": Rule("nothing reads memory that nobody wrote", ("I7",)),
    "HK-B6": Rule("what is published was written and holds what its key says", ("I7", "I9"), CACHE),
    "HK-C1": Rule(
        "a checkpoint is found only while all its parts are valid for one boundary", ("I1",), STATE
    ),
    "HK-C2": Rule("a hit restores the state of the same boundary as the pages", ("I1",), STATE),
    "HK-C3": Rule("before a part is handed out, what depends on it leaves the index", ("I3",), CACHE),
    "HK-C4": Rule(
        "truncation brings every part to one position, or changes nothing", ("I1", "I6"), ("truncate",)
    ),
    "HK-C5": Rule("a hit is valid in every layer group", ("I1", "I11"), CACHE),
    "HK-D1": Rule("no copy reads what an earlier one overwrote, and none copies onto itself", ("I12",)),
    "HK-D2": Rule("nobody writes what somebody else relies on", ("I8",)),
    "HK-D3": Rule("a miss starts from a cleared state", ("I10",), STATE),
    "HK-D4": Rule("what a plan reads and writes stays held until the plan has run", ("I2",)),
    "HK-D5": Rule("every id of a plan lies inside its pool, and the plan covers its tokens", ("I4",)),
    "HK-E1": Rule("what is cached, whole and affordable is hit", ("I11",), CACHE),
    "HK-E2": Rule("nothing is refused while enough is free or reclaimable", ("I11",), ("promises_room",)),
    "HK-E3": Rule("nothing is reclaimed while enough is free", ("I11",), CACHE),
    "HK-E4": Rule("reclaim follows the declared order", ("I12",), ("reclaim_order",)),
    "HK-E5": Rule(
        "an identical prompt, resent before a reclaim, hits its last usable boundary", ("I11",), CACHE
    ),
    "HK-F1": Rule("namespaces never share", ("I9",), ("namespaces",)),
    "HK-F2": Rule("with a weak hash contents still hold", ("I9",), ("weak_hash",)),
    "HK-F3": Rule("identity covers the whole prefix, not its last block", ("I9",), CACHE),
    "HK-F4": Rule("a stale handle raises and changes nothing", ("I8",)),
    "HK-G1": Rule("cancelling at any point leaves what a completed release leaves", ("I6",)),
    "HK-G2": Rule("preempt and resume gives the contents of an uninterrupted run", ("I10",), ("preempt",)),
    "HK-G3": Rule("what is leased keeps its content; a second completion is refused", ("I2",), ("lease",)),
    "HK-G4": Rule("after a fork both branches diverge without touching each other", ("I8",), ("fork",)),
    "HK-G5": Rule("an abandoned step leaves everything as before its plan", ("I6", "I7"), ("abandon",)),
    "HK-G6": Rule("an exception in a callback leaves everything as before the call", ("I6",), ("callback",)),
    "HK-H1": Rule("the same operations give the same ids and plans", ("I12",)),
    "HK-H2": Rule("no dependence on dict, set or object-id order", ("I12",)),
    "HK-H3": Rule("a batch call equals single calls in order", ("I6",), ("batch",)),
}


def applicable(capabilities: Capabilities) -> dict[str, bool]:
    """Every rule, and whether what it needs is declared."""
    return {name: all(getattr(capabilities, need) for need in rule.needs) for name, rule in RULES.items()}


class ConformanceError(AssertionError):
    """A rule is broken: its id, and the operations that lead there, printed as Python to paste."""

    def __init__(self, rule: str, message: str, spec: object, trace: tuple[Operation, ...]) -> None:
        self.rule, self.message, self.spec, self.trace = rule, message, spec, trace
        lines = [f"{rule} ({RULES[rule].sentence}): {message}", f"    world = World(make, {spec})"]
        super().__init__("\n".join([*lines, *(f"    world.do({op!r})" for op in trace)]))
