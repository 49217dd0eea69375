"""Exhaustive exploration of the tiny shapes: no rule is broken, and how much was looked at is printed (`-s`).

The default run stops at a number of states, the nightly one at a number of seconds.
"""

from dataclasses import replace

import pytest

from hybridkv.testing import Scope, Shape, explore
from hybridkv.testing._explore import PLAIN
from hybridkv.testing.cache_adapter import OTHER_SHAPES, SHAPES, CacheSpec, make_cache

ALL = {**SHAPES, **OTHER_SHAPES}
DEEP = Scope(
    operations=PLAIN, prompts=((0, 0), (0, 0, 1), (0, 0, 0, 0, 1), (1, 1, 0, 0, 1)), seconds=600, max_depth=20
)
WIDE = Scope(seconds=600)


def run(name: str, specs: tuple[CacheSpec, ...], scope: Scope, least: int) -> None:
    report = explore(make_cache, [Shape(spec, scope) for spec in specs])
    print(f"\n{name}: {report}")
    if report.error is not None:
        raise report.error
    assert report.states >= least or report.exhausted


@pytest.mark.parametrize("name", SHAPES)
def test_plans_and_cancellations(name: str) -> None:
    run(name, SHAPES[name], replace(DEEP, states=400), 400)


@pytest.mark.parametrize("name", SHAPES)
def test_every_operation(name: str) -> None:
    run(name, SHAPES[name], replace(WIDE, states=250), 250)


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_every_operation_in_other_shapes(name: str) -> None:
    run(name, OTHER_SHAPES[name], replace(WIDE, states=200), 200)


@pytest.mark.parametrize(
    "name", ["s0", "d0", "nested"]
)  # with more pages every order of the free list is a state
def test_one_request_exhausted(name: str) -> None:
    """All there is with one request at a time, one prompt, one step in flight, and chunks below a block."""
    scope = Scope(
        operations=PLAIN - {"serve"},
        prompts=((0, 0, 1),),
        max_live=1,
        max_tokens=3,
        max_flights=1,
        max_depth=60,
        seconds=600,
    )
    report = explore(make_cache, [Shape(SHAPES[name][0], scope)])
    print(f"\n{name}, one request: {report}")
    if report.error is not None:
        raise report.error
    assert report.exhausted


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALL)
def test_deep(name: str) -> None:
    run(name, ALL[name], replace(WIDE, seconds=300), 3000)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHAPES)
def test_deep_plans_and_cancellations(name: str) -> None:
    run(name, SHAPES[name], replace(DEEP, seconds=300), 3000)
