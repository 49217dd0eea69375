"""What a run amounts to: throughput, latencies, depth, work. One row per organization and seed.

Throughput is completed output tokens over the request span, first arrival to last response (section 5.1 of the
memory-organization reference). Percentiles are of one run; a mean of them over seeds is a mean of tails, not a pooled
tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hybridkv.simulate.engine import Run

Row = dict[str, float | int | str]

COLUMNS = (
    "organization", "seed", "requests", "output_tokens", "span_s", "throughput", "ttft_p50", "ttft_p99", "e2e_p50",
    "e2e_p99", "joint_mean", "prefill_tokens", "avoided_tokens", "preemptions", "reclaims", "peak_pages",
)  # fmt: skip


def summarize(run: Run, organization: str, seed: int) -> Row:
    """The row of one run."""
    trips = run.trips
    assert run.final is not None
    arrival = np.array([t.arrival_s for t in trips])
    finished = np.array([t.finished_s for t in trips])
    ttft = np.array([t.first_token_s for t in trips]) - arrival
    outputs = sum(t.output_tokens for t in trips)
    span = float(finished.max() - arrival.min())
    return {
        "organization": organization,
        "seed": seed,
        "requests": len(trips),
        "output_tokens": outputs,
        "span_s": span,
        "throughput": outputs / span,
        "ttft_p50": percentile(ttft, 50),
        "ttft_p99": percentile(ttft, 99),
        "e2e_p50": percentile(finished - arrival, 50),
        "e2e_p99": percentile(finished - arrival, 99),
        "joint_mean": float(np.mean([t.cached_tokens for t in trips])),
        "prefill_tokens": run.prefill_tokens,
        "avoided_tokens": run.final.counters["cached_tokens"],
        "preemptions": sum(t.preemptions for t in trips),
        "reclaims": run.final.counters["reclaimed"],
        "peak_pages": sum(pool.peak_held for pool in run.final.pools.values()),
    }


def percentile(values: np.ndarray, q: float) -> float:
    """The smallest value that at least q % of the values do not exceed."""
    return float(np.percentile(values, q, method="inverted_cdf"))


def mean_rows(rows: Iterable[Row]) -> list[Row]:
    """One row per organization: the mean of every number over its seeds; `seed` becomes the number of seeds."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row["organization"]), []).append(row)
    return [_mean(name, group) for name, group in groups.items()]


def _mean(name: str, group: Sequence[Mapping[str, float | int | str]]) -> Row:
    made: Row = {"organization": name, "seed": len(group)}
    for column in COLUMNS[2:]:
        made[column] = float(np.mean([float(row[column]) for row in group]))
    return made


def paired_change(
    rows: Iterable[Row], numerator: str, denominator: str, column: str = "throughput"
) -> list[float]:
    """Relative change within each seed that both organizations ran, in percent (section 6 of the reference)."""
    by_key = {(row["organization"], row["seed"]): float(row[column]) for row in rows}
    seeds = sorted(
        {seed for name, seed in by_key if name == numerator} & {s for n, s in by_key if n == denominator}
    )
    return [100 * (by_key[numerator, s] / by_key[denominator, s] - 1) for s in seeds]
