"""The Hypothesis machine: a short profile in every run, 10,000 steps an organization at night."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from hybridkv.testing import ConformanceError
from hybridkv.testing._machine import machine
from hybridkv.testing.cache_adapter import CacheSpec, make_cache
from hybridkv.testing.geometries import ORGANIZATIONS
from hybridkv.testing.mutants import MUTANTS
from hybridkv.testing.strategies import cache_specs

QUIET = list(HealthCheck)


def search(specs: Any, examples: int, steps: int, phases: Any = tuple(Phase)) -> None:
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=QUIET,
        report_multiple_bugs=False,
        print_blob=False,
        phases=phases,
    )
    run_state_machine_as_test(machine(make_cache, specs), settings=profile)


@pytest.mark.parametrize("organization", ORGANIZATIONS)
def test_machine(organization: str) -> None:
    search(cache_specs(organization), 60, 40)


@pytest.mark.nightly
@pytest.mark.parametrize("organization", ORGANIZATIONS)
def test_machine_10_000_steps(organization: str) -> None:
    search(cache_specs(organization), 250, 60)


def test_the_machine_refuses_a_mutant() -> None:
    import hypothesis.strategies as st

    change = MUTANTS["cached page is left in the free list"].change
    with pytest.raises(ConformanceError) as caught:
        search(st.just(CacheSpec(organization="s0", pages=(6,), change=change)), 60, 40, (Phase.generate,))
    assert caught.value.rule in MUTANTS["cached page is left in the free list"].expects
