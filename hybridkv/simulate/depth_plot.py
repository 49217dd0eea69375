"""Pictures of depth-batching reports. Needs matplotlib, which is imported when something is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridkv.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hybridkv.simulate.depth import DepthRow


def label(row: DepthRow) -> str:
    """How a row is called in legends."""
    return row.mode if row.k is None else f"{row.mode} K={row.k}"


def plot_rows(rows: Sequence[DepthRow], folder: Path, title: str) -> list[Path]:
    """Draw speedup and batch sizes by mode; and normalized latency against rate if rows have rates."""
    folder.mkdir(parents=True, exist_ok=True)
    offline = [row for row in rows if row.rate is None]
    online = [row for row in rows if row.rate is not None]
    paths: list[Path] = []
    if offline:
        paths += [_speedups(offline, folder, title), _batches(offline, folder, title)]
    if online:
        paths.append(_latencies(online, folder, title))
    return paths


def _means(rows: Sequence[DepthRow], column: str) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(label(row), []).append(getattr(row, column))
    return {name: sum(values) / len(values) for name, values in found.items()}


def _speedups(rows: Sequence[DepthRow], folder: Path, title: str) -> Path:
    figure, axes = _axes(title, "", "speedup over continuous batching")
    means = _means(rows, "speedup")
    axes.bar(list(means), list(means.values()), color="#4477aa", width=0.6)
    bound = sum(row.bound for row in rows) / len(rows)
    axes.axhline(bound, color="#cc3311", linestyle="--", label=f"bound {bound:.3f}")
    axes.legend()
    return _save(figure, folder / "speedup.png")


def _batches(rows: Sequence[DepthRow], folder: Path, title: str) -> Path:
    figure, axes = _axes(title, "", "mean rows of a launch")
    core, coda = _means(rows, "recurrent_batch"), _means(rows, "coda_batch")
    places = range(len(core))
    axes.bar([x - 0.2 for x in places], list(core.values()), width=0.4, color="#4477aa", label="recurrent")
    axes.bar([x + 0.2 for x in places], list(coda.values()), width=0.4, color="#ddaa33", label="coda")
    axes.set_xticks(list(places), list(core))
    axes.legend()
    return _save(figure, folder / "batches.png")


def _latencies(rows: Sequence[DepthRow], folder: Path, title: str) -> Path:
    figure, axes = _axes(title, "requests per second", "normalized latency, s per output token")
    for name in dict.fromkeys(map(label, rows)):
        rates = sorted({row.rate for row in rows if row.rate is not None and label(row) == name})
        means = [_means([r for r in rows if r.rate == rate], "normalized_latency_s")[name] for rate in rates]
        axes.plot(rates, means, marker="o", label=name)
    axes.set_ylim(bottom=0)
    axes.legend()
    return _save(figure, folder / "latency.png")


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError("plots need matplotlib: pip install 'hybridkv[plot]'") from None
    figure: Any = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(axis="y", alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path
