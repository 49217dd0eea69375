"""Pictures of a run: occupancy by state kind, depth, running and waiting over time; a timeline for Perfetto.

Owns drawing only; every number comes from a `Run`. matplotlib is imported where it draws (extra `plot`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridkv.errors import UsageError
from hybridkv.simulate.chrome import ChromeTrace
from hybridkv.simulate.engine import Run

KIND_COLOURS = {
    "attention": "#4477aa",
    "ssm": "#ee6677",
    "conv": "#ccbb44",
    "live": "#aa3377",
    "window": "#66ccee",
}


def _pyplot() -> Any:
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        raise UsageError(
            "plots need matplotlib, which is not installed; pip install 'hybridkv[plot]'"
        ) from None
    return plt


def plot_run(run: Run, title: str, path: Path) -> None:
    """One picture of one run: pages by state kind per pool, running and waiting, mean depth of admissions."""
    pyplot = _pyplot()
    times = [s.time_s for s in run.samples]
    pools = list(run.samples[0].stats.pools)
    figure, axes = pyplot.subplots(
        len(pools) + 2, 1, figsize=(9, 2.2 * (len(pools) + 2)), sharex=True, layout="constrained"
    )
    for axis, pool in zip(axes, pools, strict=False):
        series: dict[str, list[float]] = {}
        for kind in KIND_COLOURS:
            counts = [s.stats.pools[pool].by_kind.get(kind, 0) for s in run.samples]
            if any(counts):
                series[kind] = [float(c) for c in counts]
        axis.stackplot(times, *series.values(), labels=series, colors=[KIND_COLOURS[k] for k in series])
        held = [s.stats.pools[pool].held for s in run.samples]
        axis.plot(times, held, color="black", linewidth=0.8, label="held by running requests")
        axis.set(ylabel=f"pages, {pool}", ylim=(0, run.samples[0].stats.pools[pool].pages))
        axis.legend(loc="lower right", fontsize="x-small", ncols=5)
    axes[-2].plot(times, [s.running for s in run.samples], label="running", color="#228833")
    axes[-2].plot(times, [s.waiting for s in run.samples], label="waiting", color="#bbbbbb")
    axes[-2].set(ylabel="requests")
    axes[-2].legend(loc="upper right", fontsize="x-small")
    axes[-1].plot(times, [s.joint_mean for s in run.samples], color="#4477aa")
    axes[-1].set(ylabel="mean hit depth\n(tokens)", xlabel="seconds")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_comparison(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Throughput, p99 time to first token and mean depth per organization, a bar each; points are seeds."""
    pyplot = _pyplot()
    names = list(dict.fromkeys(str(row["organization"]) for row in rows))
    panels = (
        ("throughput", "output tokens/s"),
        ("ttft_p99", "TTFT p99, s"),
        ("joint_mean", "hit depth, tokens"),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(10, 3.2), layout="constrained")
    for axis, (column, label) in zip(axes, panels, strict=True):
        for i, name in enumerate(names):
            values = [float(row[column]) for row in rows if row["organization"] == name]
            axis.bar(i, sum(values) / len(values), color="#4477aa", width=0.7)
            axis.plot([i] * len(values), values, "k.", markersize=3)
        axis.set_xticks(range(len(names)), names, fontsize="small")
        axis.set(ylabel=label)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write_timeline(run: Run, name: str, path: Path) -> None:
    """A Chrome trace: every request's waiting, prefill and decode on the lane it ran in, steps, and counters."""
    trace = ChromeTrace()
    lanes: list[float] = []
    trips = sorted(enumerate(run.trips), key=lambda pair: pair[1].admitted_s)
    for i, trip in trips:
        lane = next((k for k, free in enumerate(lanes) if free <= trip.admitted_s), len(lanes))
        if lane == len(lanes):
            lanes.append(0.0)
        lanes[lane] = trip.finished_s
        about = {
            "request": i,
            "input": trip.input_tokens,
            "output": trip.output_tokens,
            "cached": trip.cached_tokens,
        }
        track = f"{name}/lane {lane:03d}"
        trace.span("prefill", track, trip.admitted_s, trip.first_token_s - trip.admitted_s, about)
        decode = trip.finished_s - trip.first_token_s
        trace.span("decode", track, trip.first_token_s, decode, about | {"preemptions": trip.preemptions})
    for step in run.steps:
        about = {"decode rows": step.decode_rows, "prefill tokens": step.prefill_tokens}
        kind = (
            "mixed"
            if step.decode_rows and step.prefill_tokens
            else "decode"
            if step.decode_rows
            else "prefill"
        )
        trace.span(kind, f"{name}/steps", step.start_s, step.duration_s, about)
    for sample in run.samples:
        trace.counter("requests", sample.time_s, {"running": sample.running, "waiting": sample.waiting})
        for pool, stats in sample.stats.pools.items():
            counts = {"free": stats.free, "cached": stats.cached, "held": stats.held}
            trace.counter(f"pages {pool}", sample.time_s, counts)
    trace.write(path)
