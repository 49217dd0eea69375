"""A search over drawn cases that counts what they varied, and how many bits differed."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

ENOUGH = 200  # cases that must have varied each property, in the nightly search
CASES = 230  # the few that do not vary one of them are drawn on top


class Found(NamedTuple):
    """What one case varied, and how many bits of it differ from the plain computation."""

    varied: set[str]
    bits: int


class Census(NamedTuple):
    """What many cases varied, how many there were, in how many bits they differed."""

    varied: Counter[str]
    cases: int
    bits: int

    def report(self, title: str) -> None:
        lines = [f"{title}: {self.cases} cases, {self.bits} differing bits"]
        lines += [f"    {count:4d}  {name}" for name, count in sorted(self.varied.items())]
        print("", *lines, sep="\n", file=sys.stderr)  # workers of pytest-xdist have no standard output


def unsorted(rows: Sequence[int]) -> st.SearchStrategy[list[int]]:
    """Orders of rows but the rising one."""
    return st.permutations(rows).map(lambda order: list(order) if order != sorted(order) else order[::-1])


def differing_bits(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """In how many bits tensors differ, a NaN's included."""
    total = 0
    for a, b in pairs:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        mine, theirs = (t.contiguous().view(torch.uint8).numpy() for t in (a, b))
        total += int(np.unpackbits(mine ^ theirs).sum())
    return total


def search(cases: Any, check: Callable[[Any], Found], count: int) -> Census:
    """Draw `count` cases. One that differs is an error, and shrunk."""
    found: list[Found] = []

    @settings(max_examples=count)
    @given(cases)
    def one(case: Any) -> None:
        found.append(check(case))
        assert not found[-1].bits

    one()
    return Census(Counter(name for f in found for name in f.varied), len(found), sum(f.bits for f in found))


def survey(title: str, properties: Iterable[str], each: Sequence[Any], check: Callable[[Any], Found]) -> None:
    """The nightly search, evenly over some strategies: every property varied in enough cases, and no bit differs."""
    parts = [search(cases, check, -(-CASES // len(each))) for cases in each]
    census = Census(sum((p.varied for p in parts), Counter()), *(sum(p[n] for p in parts) for n in (1, 2)))
    census.report(title)
    few = {name: n for name in properties if (n := census.varied[name]) < ENOUGH}
    assert not few, f"varied in too few cases: {few}"


def finds(cases: Any, check: Callable[[Any], Found], count: int = 8) -> bool:
    """Whether one of `count` drawn cases differs: what a planted fault must bring about."""
    differs: list[bool] = []

    @settings(max_examples=count, phases=[Phase.generate])
    @given(cases)
    def one(case: Any) -> None:
        if not any(differs):
            differs.append(check(case).bits > 0)

    one()
    return any(differs)
