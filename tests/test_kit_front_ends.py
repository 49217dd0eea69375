"""The kit's own parts: ghost memory, the pure checkers with a planted fault each, and the front ends."""

import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from hybridkv.errors import UsageError
from hybridkv.testing import AllocatorConformance, ConformanceError, Scope, World, check_allocator
from hybridkv.testing import _checks as checks
from hybridkv.testing.__main__ import main
from hybridkv.testing._adapter import Line, Owned, Part, Place, View
from hybridkv.testing._explore import PLAIN
from hybridkv.testing._ghost import GhostMemory, Meaning
from hybridkv.testing.cache_adapter import CacheSpec, make_cache
from hybridkv.testing.mutants import MUTANTS
from hybridkv.testing.suite import verdicts

A, B, C = (Place("p", i) for i in range(3))
SLOTS = tuple(Place("p", 2, s, 2) for s in range(2))
POOLS = (("p", 3),)
KV = Part("attention")
WRONG = CacheSpec(organization="s0", pages=(5,), change=MUTANTS["page freed twice"].change)
GOOD = CacheSpec(organization="s0", pages=(5,))
QUICK = Scope(states=40, operations=PLAIN - {"abandon"})


class TestGhost:
    def test_other_layout_forgets(self) -> None:
        ghost = GhostMemory(POOLS)
        ghost.write(C, Meaning(KV, None, (1,)))
        ghost.write(SLOTS[1], Meaning(KV, None, (2,)))
        assert ghost.read(C) is None
        assert ghost.read(SLOTS[1]) == Meaning(KV, None, (2,))
        ghost.poison(SLOTS[1])
        assert ghost.read(SLOTS[1]) is None

    def test_copy_is_whole_and_leaves_the_source(self) -> None:
        ghost = GhostMemory(POOLS)
        for offset in range(2):
            ghost.write(A, Meaning(KV, None, (offset,)), offset)
        ghost.write(B, Meaning(KV, None, (9,)), 7)
        ghost.copy(A, B)
        assert [ghost.read(B, o) for o in (0, 1, 7)] == [
            Meaning(KV, None, (0,)),
            Meaning(KV, None, (1,)),
            None,
        ]
        assert ghost.read(A) == Meaning(KV, None, (0,))

    def test_bounds(self) -> None:
        ghost = GhostMemory(POOLS)
        outside = (Place("p", 3), Place("p", -1), Place("q", 0), Place("p", 0, 2, 2))
        assert [ghost.inside(p) for p in (A, *outside)] == [True, False, False, False, False]


def spoken(found: checks.Broken) -> set[str]:
    return {rule for rule, _ in found}


def owned(
    free: tuple[Place, ...] = (), cached: tuple[Place, ...] = (), held: tuple[Place, ...] = ()
) -> Owned:
    return Owned(free, frozenset(cached), frozenset(held))


class TestCheckers:
    @pytest.mark.parametrize(
        ("state", "users", "rules"),
        [
            (owned(free=(A, B), held=(C,)), {C}, set()),
            (owned(free=(A, *SLOTS[:1]), cached=(B,), held=SLOTS[1:]), set(SLOTS[1:]), set()),
            (owned(free=(A, A, B), held=(C,)), {C}, {"HK-A2"}),
            (owned(free=(A, B, C), held=(C,)), {C}, {"HK-A3"}),
            (owned(free=(A, B), held=(C, SLOTS[0])), {C, SLOTS[0]}, {"HK-A3", "HK-A1"}),
            (owned(free=(A, B)), set(), {"HK-A1"}),
            (owned(free=(A, B), held=SLOTS[:1]), set(SLOTS[:1]), {"HK-A1"}),
            (owned(free=(A, B), held=(C,)), set(), {"HK-A1"}),
        ],
    )
    def test_partition(self, state: Owned, users: set[Place], rules: set[str]) -> None:
        assert spoken(checks.partition(state, POOLS, users, cancelled=False)) == rules

    def test_a_leak_after_a_cancellation_has_its_own_rule(self) -> None:
        assert spoken(checks.partition(owned((A, B), held=(C,)), POOLS, set(), cancelled=True)) == {"HK-G1"}

    @pytest.mark.parametrize(
        ("views", "rules"),
        [
            ([View(((A,),), (((KV, B),),))], set()),
            ([View(((Place("p", 9),),), ())], {"HK-A6"}),
            ([View(((A, A),), ())], {"HK-A6"}),
            ([View(((C,),), ())], {"HK-A6"}),
            ([View((), (((KV, A), (KV, C)),))], {"HK-A8"}),
            ([View((), (((KV, A),),)), View((), (((KV, A),),))], {"HK-A7"}),
        ],
    )
    def test_views(self, views: list[View], rules: set[str]) -> None:
        assert spoken(checks.views(views, owned(free=(C,), held=(A, B)), GhostMemory(POOLS))) == rules

    def test_room(self) -> None:
        pages, slots = ((Line("kv", "p", 1, 1, 1),), 1), ((Line("conv", "p", 2, 1, 1),), 1)
        assert checks.fits(POOLS, owned(free=(A,), held=(B, C)), (pages,))
        assert not checks.fits(POOLS, owned(free=(A,), held=(B, C)), (pages, pages))
        assert checks.fits(POOLS, owned(free=(A,), cached=(B,), held=(C,)), (pages, pages))
        assert not checks.fits(POOLS, owned(free=(A,), cached=(B,), held=(C,)), (pages, pages), pinned=(B,))
        assert checks.fits(POOLS, owned(free=(A, SLOTS[0]), held=(B, SLOTS[1])), (pages, slots))
        assert not checks.fits(POOLS, owned(free=(A, SLOTS[0]), held=(B, SLOTS[1])), (pages, slots, slots))
        assert checks.free_suffices(owned(free=(A,)), [B], "p")
        assert not checks.free_suffices(owned(free=(A,)), [B, C], "p")

    def test_order(self) -> None:
        assert spoken(checks.order({B}, {A}, {A: 1, B: 2})) == {"HK-E4"}
        assert spoken(checks.order({A}, {B}, {A: 1, B: 2})) == set()

    @pytest.mark.parametrize(
        ("got", "weak", "rule"),
        [
            (None, False, "HK-B2"),
            (Meaning(KV, "a", (1, 2, 3, 4)), False, "HK-F1"),
            (Meaning(KV, None, (9, 9, 3, 4)), False, "HK-F3"),
            (Meaning(KV, None, (9, 9, 3, 4)), True, "HK-F2"),
            (Meaning(KV, None, (1, 2)), False, "HK-B2"),
            (Meaning(Part("conv"), None, (1, 2, 3, 4)), False, "HK-B2"),
        ],
    )
    def test_wrong_hit(self, got: Meaning | None, weak: bool, rule: str) -> None:
        want = Meaning(KV, None, (1, 2, 3, 4))
        assert checks.wrong_hit(got, want, "HK-B2", weak_hash=weak, width=2) == rule


class TestConformsByMixin(AllocatorConformance):
    make = staticmethod(make_cache)
    specs = (GOOD,)
    scope = QUICK


def test_mixin_ledger() -> None:
    class Known(AllocatorConformance):
        make = staticmethod(make_cache)
        specs = (WRONG,)
        scope = QUICK
        known_failures: ClassVar = {"HK-A2": "hybridkv#1"}

    Known().test_exploration()
    Known.specs = (GOOD,)
    with pytest.raises(AssertionError, match=r"known failures .* passed"):
        Known().test_exploration()
    Known.known_failures = {"HK-A2": ""}
    with pytest.raises(UsageError, match="must name an issue"):
        Known().test_exploration()


def test_function_and_the_trace_to_paste() -> None:
    report = check_allocator(make_cache, [GOOD], QUICK)
    assert report.error is None
    table = verdicts(report)
    assert table["HK-B2"] == "pass"
    assert table["HK-F2"] == "not applicable"
    assert table["HK-H2"] == "not checked"
    with pytest.raises(UsageError, match="specs must hold"):
        check_allocator(make_cache, [])
    with pytest.raises(ConformanceError, match=r"HK-A2 \(nothing is freed twice") as caught:
        check_allocator(make_cache, [WRONG], QUICK)
    assert "world = World(make, CacheSpec(" in str(caught.value)
    world = World(make_cache, WRONG)
    *before, last = caught.value.trace
    for operation in before:
        world.do(operation)
        world.check()
    world.do(last)
    with pytest.raises(ConformanceError):
        world.check()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    name = "hybridkv.testing.cache_adapter:make_cache"
    assert main([name, "--scope", "tiny", "--seconds", "1", "--report", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["rules"]["HK-A1"] == "pass"
    assert report["states"] > 0
    assert "HK-C2  pass" in capsys.readouterr().out
    assert main(["no_such_module:make"]) == 2
    assert "factory must be module:function, got 'no_such_module:make'" in capsys.readouterr().err


def test_needs_neither_torch_nor_hypothesis_nor_pytest() -> None:
    program = "import sys, hybridkv.testing, hybridkv.testing.mutants; print(sorted({'torch', 'triton', 'hypothesis', 'pytest'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
