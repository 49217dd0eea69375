"""Every wrong version of the allocator dies at small scope, and every rule kills one."""

import pytest

from hybridkv.testing import RULES, Shape, explore
from hybridkv.testing._explore import Scope
from hybridkv.testing.cache_adapter import make_cache
from hybridkv.testing.mutants import MUTANTS, SPECS, UNREACHABLE, kill, main


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_dies(name: str) -> None:
    report = kill(MUTANTS[name], seconds=120)
    assert report.error is not None, f"{name} survived: {report}"
    print(
        f"\n{name}: {report.error.rule}, {len(report.error.trace)} operations, {1000 * report.seconds:.0f} ms"
    )
    assert report.error.rule in MUTANTS[name].expects, report.error


def test_every_rule_kills_a_mutant() -> None:
    assert {m.expects[0] for m in MUTANTS.values()} | UNREACHABLE.keys() == RULES.keys()
    assert len(MUTANTS) >= 30
    assert {m.family for m in MUTANTS.values()} == set("ABCDEFGH")


def test_the_first_rule_named_is_the_one_that_speaks() -> None:
    """What the test above relies on, for the rules that only one mutant stands for."""
    for name in (
        "commit reorders the table",
        "second step starts from the checkpoint again",
        "salt is forgotten",
    ):
        report = kill(MUTANTS[name], seconds=120)
        assert report.error is not None
        assert report.error.rule == MUTANTS[name].expects[0]


@pytest.mark.parametrize("name", SPECS)
def test_the_unchanged_cache_is_clean_where_mutants_are_looked_for(name: str) -> None:
    report = explore(make_cache, [Shape(SPECS[name], Scope(states=60, seconds=120))])
    assert report.error is None, report.error


def test_matrix_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["mutants", "--only", "freed twice", "--show"])
    assert main() == 0
    out = capsys.readouterr().out
    assert "page freed twice" in out
    assert "HK-A2" in out
    assert "world.do(" in out
