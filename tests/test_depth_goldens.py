"""Every golden schedule, launch for launch."""

import pytest

from hybridkv.schedule.depth import run_case
from tests.conftest import load_golden

GOLDEN = load_golden("depth_batching")
CASES = {case["name"]: case for case in GOLDEN["cases"]}


def comparable(launch, compare):
    """A launch as the golden wants it compared: row order counts, or it does not."""
    if compare == "order":
        return launch
    rows = sorted(launch["rows"], key=lambda row: row["request"])
    return {**launch, "rows": rows, "exits": sorted(launch["exits"]), "done": sorted(launch["done"])}


def totals(trace):
    launches = [entry for entry in trace if entry["stage"] not in {"stall", "restore", "preempt"}]
    count = {
        stage: sum(e["stage"] == stage for e in trace)
        for stage in ("prefill", "prelude", "coda", "decode", "preempt")
    }
    return {
        "loops": sum(e["counts"]["loops"] for e in launches),
        "rows": sum(e["counts"]["loops"] * e["counts"]["rows"] for e in launches),
        "preludes": count["prelude"] + count["decode"],
        "codas": count["coda"] + count["decode"],
        "prefills": count["prefill"],
        "prompt_tokens": sum(e["counts"]["tokens"] for e in launches),
        "tokens": sum(e["counts"]["emitted"] for e in launches),
        "preemptions": count["preempt"],
        "launches": len(launches),
    }


@pytest.mark.parametrize("name", CASES)
def test_golden_schedule(name):
    golden = CASES[name]
    trace = run_case(golden["case"])
    expected = golden["expect"]["launches"]
    for number, (got, want) in enumerate(zip(trace, expected, strict=False)):
        assert comparable(got, golden["compare"]) == comparable(want, golden["compare"]), f"launch {number}"
    assert len(trace) == len(expected)
    assert totals(trace) == golden["expect"]["totals"]


def test_there_are_twenty():
    assert len(CASES) == 20
