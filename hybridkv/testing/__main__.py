"""`python -m hybridkv.testing module:factory --scope small --report out.json`: the kit on an allocator by name.

`factory(spec)` returns an `AllocatorAdapter`; `module:specs`, where there is one, lists what it is given.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridkv.errors import UsageError
from hybridkv.testing._explore import SMALL, Shape, explore
from hybridkv.testing._rules import RULES
from hybridkv.testing.suite import verdicts

SCOPES = {
    "tiny": replace(SMALL, seconds=5.0),
    "small": SMALL,
    "deep": replace(SMALL, seconds=600.0, max_depth=24),
}


def main(arguments: list[str] | None = None) -> int:
    """Explore, print a table, write a report; 1 where a rule is broken, 2 where the call is wrong."""
    parser = argparse.ArgumentParser(prog="python -m hybridkv.testing", description=main.__doc__)
    parser.add_argument("factory", help="module:function, which builds an adapter from a spec")
    parser.add_argument(
        "--specs", default="specs", help="name in the module that lists specs (default: specs)"
    )
    parser.add_argument("--scope", choices=SCOPES, default="small")
    parser.add_argument("--seconds", type=float, help="budget, instead of the scope's")
    parser.add_argument("--report", type=Path, help="where to write JSON")
    options = parser.parse_args(arguments)
    try:
        make, specs = _load(options.factory, options.specs)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    scope = SCOPES[options.scope]
    if options.seconds is not None:
        scope = replace(scope, seconds=options.seconds)
    report = explore(make, [Shape(spec, scope) for spec in specs])
    table = verdicts(report)
    for rule, verdict in table.items():
        print(f"{rule}  {verdict:14s}  {RULES[rule].sentence}")
    print(report)
    if report.error is not None:
        print(report.error)
    if options.report:
        options.report.write_text(json.dumps(_as_json(options, report, table), indent=1) + "\n")
    return int(report.error is not None)


def _load(name: str, specs_name: str) -> tuple[Any, tuple[Any, ...]]:
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
        return getattr(module, function), tuple(getattr(module, specs_name, (None,)))
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"factory must be module:function, got {name!r}: {error}") from None


def _as_json(options: argparse.Namespace, report: Any, table: dict[str, str]) -> dict[str, Any]:
    return {
        "kit": "0.1",
        "factory": options.factory,
        "scope": options.scope,
        "rules": table,
        "states": report.states,
        "depth": report.depth,
        "seconds": round(report.seconds, 3),
        "exhausted": report.exhausted,
        "trace": [list(map(repr, op)) for op in report.error.trace] if report.error else [],
    }


if __name__ == "__main__":
    raise SystemExit(main())
