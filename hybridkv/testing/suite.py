"""Front ends: a function, and a pytest mixin of two lines.

    class TestMine(AllocatorConformance):
        make = staticmethod(my_factory)
        specs = (my_spec,)

Opting out happens through capabilities, or through `known_failures = {"HK-C2": "project#123"}`: an entry must name an
issue, and an unexpected pass fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from hybridkv.errors import UsageError
from hybridkv.testing._adapter import AllocatorAdapter
from hybridkv.testing._explore import SMALL, Report, Scope, Shape, explore
from hybridkv.testing._rules import applicable

Make = Callable[[Any], AllocatorAdapter]


def check_allocator(make: Make, specs: Sequence[Any], scope: Scope = SMALL) -> Report:
    """Explore an allocator in every shape of `specs`; raises `ConformanceError` with the shortest trace."""
    if not specs:
        raise UsageError("specs must hold at least one thing that make takes, got none")
    report = explore(make, [Shape(spec, scope) for spec in specs])
    if report.error is not None:
        raise report.error
    return report


def verdicts(report: Report) -> dict[str, str]:
    """Every rule: fail, pass (not broken within the scope), not applicable, or not checked.

    Whether hash seeds matter (HK-H2) cannot be seen in one process.
    """
    assert report.capabilities is not None
    broken = report.error.rule if report.error else ""
    found = {
        rule: "pass" if yes else "not applicable" for rule, yes in applicable(report.capabilities).items()
    }
    found["HK-H2"] = "not checked"
    return {rule: "fail" if rule == broken else verdict for rule, verdict in found.items()}


class AllocatorConformance:
    """A pytest mixin: subclass it, name it `Test...`, and say what is to be built."""

    make: ClassVar[Make]
    specs: ClassVar[Sequence[Any]]
    scope: ClassVar[Scope] = SMALL
    known_failures: ClassVar[Mapping[str, str]] = {}

    def test_exploration(self) -> None:
        """No rule is broken at small scope, less what is known."""
        for rule, issue in self.known_failures.items():
            if not issue:
                raise UsageError(f"known_failures[{rule!r}] must name an issue, got {issue!r}")
        report = explore(type(self).make, [Shape(spec, self.scope) for spec in self.specs])
        if report.error is not None and report.error.rule not in self.known_failures:
            raise report.error
        if self.known_failures and report.error is None:
            raise AssertionError(f"known failures {sorted(self.known_failures)} passed: remove them")
        print(report)
