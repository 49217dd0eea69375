"""Requests for looped models: lengths, depths and arrivals, drawn from a seed or read from a trace file.

Owns the generators of depth-batching section 9 and the readers of public traces. Does not know a planner's state.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from hybridkv.errors import UsageError
from hybridkv.schedule.depth import DepthRequest

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal with the given mean, cut to an integer and clipped to `low`..`high`."""

    mean: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
        mu = np.log(self.mean) - self.sigma**2 / 2
        return int(np.clip(int(rng.lognormal(mu, self.sigma)), self.low, self.high))


class Depths(Protocol):
    """How deep tokens go."""

    def draw(self, rng: np.random.Generator, tokens: int) -> bytes:
        """Effective depths of `tokens` tokens, one byte each."""
        ...


@dataclass(frozen=True, slots=True)
class DepthMix:
    """Depth `low`, `low + 1`, ... with the given probabilities."""

    low: int
    weights: tuple[float, ...]

    def draw(self, rng: np.random.Generator, tokens: int) -> bytes:
        """Independent draws."""
        edges = np.cumsum(self.weights[:-1])
        return (
            (self.low + np.searchsorted(edges, rng.random(tokens), side="right")).astype(np.uint8).tobytes()
        )


@dataclass(frozen=True, slots=True)
class NormalDepths:
    """A normal variable rounded and clipped to `low`..`high`."""

    mean: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator, tokens: int) -> bytes:
        """Independent draws."""
        drawn = np.rint(rng.normal(self.mean, self.sigma, tokens))
        return np.clip(drawn, self.low, self.high).astype(np.uint8).tobytes()


OURO_DEPTHS = DepthMix(2, (0.7, 0.2, 0.1))
HUGINN_DEPTHS = NormalDepths(9.5, 1.6, 3, 16)
_DEPTHS: dict[int, Depths] = {4: OURO_DEPTHS, 16: HUGINN_DEPTHS}


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of prompts and outputs, how many requests, and the width that suits them."""

    prompt: Lengths
    output: Lengths
    requests: int
    width: int


WORKLOADS: dict[str, Workload] = {
    "alpaca": Workload(Lengths(18, 0.6, 4, 400), Lengths(64, 1.0, 4, 2000), 3000, 64),
    "sharegpt": Workload(Lengths(267, 1.4, 4, 14000), Lengths(340, 0.9, 4, 2000), 900, 64),
    "arxiv": Workload(Lengths(6989, 0.5, 4, 14000), Lengths(290, 0.4, 4, 2000), 120, 8),
}
"""Prompt means are the paper's, output means are assumed."""


class Arrivals(NamedTuple):
    """Requests, and when each arrives in seconds. Offline runs have them all at 0."""

    requests: tuple[DepthRequest, ...]
    times: tuple[float, ...]

    @property
    def tokens(self) -> int:
        """Output tokens, first ones included."""
        return sum(request.decode_tokens + 1 for request in self.requests)

    def mean_depth(self, max_loops: int) -> float:
        """Loops per output token; first tokens come from prefill, at full depth."""
        deep = sum(sum(request.depths or ()) + max_loops for request in self.requests)
        return deep / self.tokens

    def poisson(self, rate: float, seed: int) -> Arrivals:
        """The same requests, arriving `rate` a second."""
        if rate <= 0:
            raise UsageError(f"rate must be positive, got {rate}")
        gaps = np.random.default_rng(seed).exponential(1 / rate, len(self.requests))
        return Arrivals(self.requests, tuple(np.cumsum(gaps).tolist()))


def default_depths(max_loops: int) -> Depths:
    """The exit mix that goes with a model's loops: Ouro's for 4, Huginn's for 16."""
    if max_loops not in _DEPTHS:
        raise UsageError(f"max_loops must be 4 or 16 for a default exit mix, got {max_loops}; pass depths")
    return _DEPTHS[max_loops]


def draw_workload(workload: Workload, depths: Depths, seed: int, *, requests: int | None = None) -> Arrivals:
    """Draw prompt, output, then depths, request by request, from one generator."""
    rng = np.random.default_rng(seed)
    drawn = [_draw(rng, f"r{index}", workload, depths) for index in range(requests or workload.requests)]
    return Arrivals(tuple(drawn), (0.0,) * len(drawn))


def _draw(rng: np.random.Generator, name: str, workload: Workload, depths: Depths) -> DepthRequest:
    prompt, output = workload.prompt.draw(rng), workload.output.draw(rng)
    return DepthRequest.recorded(name, prompt, depths.draw(rng, output - 1))


# Columns of the public traces: arrival and its unit in seconds, prompt tokens, output tokens.
_COLUMNS: tuple[tuple[str | None, float, str, str | None], ...] = (
    ("timestamp", 1e-3, "input_length", "output_length"),
    ("TIMESTAMP", 1.0, "ContextTokens", "GeneratedTokens"),
    ("arrival_s", 1.0, "input_tokens", "output_tokens"),
    (None, 1.0, "num_prefill_tokens", "num_decode_tokens"),
    (None, 1.0, "prompt_tokens_wordproxy", None),
)


def read_trace(path: str | Path, depths: Depths, seed: int, *, requests: int | None = None) -> Arrivals:
    """Requests of a CSV or JSONL trace, depths drawn from `seed`.

    Known columns are those of the Mooncake, Azure, ServeGen, vAttention and ShareGPT traces. A trace without outputs
    gets ShareGPT's assumed ones. Arrivals start at 0; a trace without times has all its requests there.
    """
    records = _records(Path(path))
    head = next(records, None)
    columns = next(
        (c for c in _COLUMNS if head is not None and c[2] in head and (c[0] is None or c[0] in head)), None
    )
    if head is None or columns is None:
        known = ", ".join(c[2] for c in _COLUMNS)
        raise UsageError(f"{path} must have one of the columns {known}, got {sorted(head or ())}")
    when, unit, prompt, output = columns
    rng = np.random.default_rng(seed)
    drawn: list[DepthRequest] = []
    times: list[float] = []
    for index, record in enumerate(_chain(head, records)):
        if requests is not None and index >= requests:
            break
        tokens = WORKLOADS["sharegpt"].output.draw(rng) if output is None else int(float(record[output]))
        name, length = f"r{index}", max(1, int(float(record[prompt])))
        drawn.append(DepthRequest.recorded(name, length, depths.draw(rng, max(1, tokens) - 1)))
        times.append(0.0 if when is None else _seconds(record[when]) * unit)
    start = min(times)
    return Arrivals(tuple(drawn), tuple(time - start for time in times))


def _records(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"workload must be {', '.join(WORKLOADS)} or a trace file, got {str(path)!r}")
    with path.open(newline="", encoding="utf-8") as file:
        if path.suffix in {".jsonl", ".json"}:
            yield from (json.loads(line) for line in file if line.strip())
        else:
            yield from csv.DictReader(file)


def _chain(head: Any, rest: Iterable[Any]) -> Any:
    yield head
    yield from rest


def _seconds(value: Any) -> float:
    """A number, or a wall time with up to 7 decimals of a second (Azure)."""
    try:
        return float(value)
    except ValueError:
        whole, _, fraction = str(value).partition(".")
        return np.datetime64(whole.replace(" ", "T"), "s").astype(float) + float(f"0.{fraction or 0}")


__all__ = [
    "HUGINN_DEPTHS", "OURO_DEPTHS", "WORKLOADS", "Arrivals", "DepthMix", "Depths", "Lengths", "NormalDepths",
    "Workload", "default_depths", "draw_workload", "read_trace",
]  # fmt: skip
