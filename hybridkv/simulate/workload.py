"""Workloads: what arrives when. The memory-organization paper's generator, and readers of public traces.

A request's tokens are made when they are asked for, so that a trace of thousands of prompts stays small. Tokens are
synthetic: equal where the source says that prefixes are equal, different otherwise.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import UsageError

TRACE_BLOCK_TOKENS = 512  # one hash id of a Mooncake trace
OUTPUT_TOKEN_BASE = 1 << 30  # generated tokens never equal prompt tokens


class Arrival(NamedTuple):
    """One request: when it arrives, its prompt as runs of tokens, and how many tokens it generates.

    A run is (first token, count): the tokens `first`, `first + 1`, ... Equal runs are equal text.
    """

    request_id: int
    arrival_s: float
    runs: tuple[tuple[int, int], ...]
    output_tokens: int
    hash_ids: tuple[int, ...] = ()

    @property
    def input_tokens(self) -> int:
        """Length of the prompt."""
        return sum(count for _, count in self.runs)

    def tokens(self) -> NDArray[np.int32]:
        """The prompt, int32 `[input_tokens]`."""
        return np.concatenate([np.arange(first, first + count, dtype=np.int32) for first, count in self.runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperWorkload:
    """The generator of section 4 of the memory-organization reference.

    `contexts` shared contexts of `shared_tokens` each; a request draws one of them with probability `q`, otherwise a
    private context of the same length, and adds a private tail. Tails and outputs are log-normal with the given mean.
    Arrivals are Poisson at `rate` per second; with `burst_s` = (on, off) they come only in the on-phases, at the rate
    that keeps the mean.
    """

    requests: int = 300
    rate: float = 3.0
    q: float = 1.0
    contexts: int = 8
    shared_tokens: int = 3072
    tail_mean: float = 290.0
    tail_sigma: float = 0.6
    output_mean: float = 255.0
    output_sigma: float = 0.8
    output_cap: int = 1024
    burst_s: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("requests", "contexts", "shared_tokens", "output_cap"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("rate", "tail_mean", "output_mean"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.q <= 1:
            raise UsageError(f"q must be in [0, 1], got {self.q}")

    def arrivals(self, seed: int) -> list[Arrival]:
        """All requests of one run. Equal seeds give equal workloads."""
        rng = np.random.default_rng(seed)
        times = self._times(rng)
        shared = rng.random(self.requests) < self.q
        context = rng.integers(self.contexts, size=self.requests)
        tails = lognormal(rng, self.tail_mean, self.tail_sigma, self.requests, 1, 4 * int(self.tail_mean))
        outputs = lognormal(rng, self.output_mean, self.output_sigma, self.requests, 1, self.output_cap)
        width = self.shared_tokens + 8 * int(self.tail_mean)
        made: list[Arrival] = []
        for i in range(self.requests):
            private = (self.contexts + i) * width
            first = int(context[i]) * width if shared[i] else private
            runs = ((first, self.shared_tokens), (private + self.shared_tokens, int(tails[i])))
            made.append(Arrival(i, float(times[i]), runs, int(outputs[i])))
        return made

    def _times(self, rng: np.random.Generator) -> NDArray[np.float64]:
        times = np.cumsum(rng.exponential(1 / self.rate, self.requests))
        if self.burst_s is None:
            return times - times[0]
        on, off = self.burst_s
        active = (times - times[0]) * on / (on + off)  # time spent in on-phases
        return active + active // on * off


def lognormal(
    rng: np.random.Generator, mean: float, sigma: float, count: int, low: int, high: int
) -> NDArray[np.int64]:
    """`count` integers, log-normal with this mean before they are truncated and clipped to low..high."""
    drawn = rng.lognormal(np.log(mean) - sigma * sigma / 2, sigma, count)
    return np.clip(drawn.astype(np.int64), low, high)


def read_trace(path: str | Path, *, limit: int | None = None, max_tokens: int | None = None) -> list[Arrival]:
    """The requests of a trace file, by its form: Mooncake JSONL, Azure or ServeGen CSV.

    `limit`: the first so many requests. `max_tokens`: leave out requests whose input and output exceed it.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"trace must be a file, got {str(path)!r}")
    reader = _read_mooncake if path.suffix == ".jsonl" else _read_csv
    found: list[Arrival] = []
    for arrival in reader(path):
        if max_tokens is not None and arrival.input_tokens + arrival.output_tokens > max_tokens:
            continue
        found.append(arrival._replace(request_id=len(found)))
        if limit is not None and len(found) == limit:
            break
    if not found:
        raise UsageError(f"trace must hold at least one request, got none in {str(path)!r}")
    for earlier, later in pairwise(found):
        if later.arrival_s < earlier.arrival_s:
            raise UsageError(
                f"arrivals must be sorted, got {later.arrival_s} behind {earlier.arrival_s} in {path.name}"
            )
    return found


def _read_mooncake(path: Path) -> Iterator[Arrival]:
    """One JSON object a line: timestamp in ms, input_length, output_length, one hash id per 512 tokens of the prompt."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path.name}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UsageError(f"{where} must be a JSON object, got {line[:60]!r} ({error.msg})") from None
            if not isinstance(row, dict):
                raise UsageError(f"{where} must be a JSON object, got {line[:60]!r}")
            time_ms, inputs, outputs = (
                _whole(row, name, where, low)
                for name, low in (("timestamp", 0), ("input_length", 1), ("output_length", 1))
            )
            ids = row.get("hash_ids")
            blocks = -(-inputs // TRACE_BLOCK_TOKENS)
            if (
                not isinstance(ids, list)
                or len(ids) != blocks
                or not all(type(i) is int and i >= 0 for i in ids)
            ):
                raise UsageError(
                    f"hash_ids of {where} must be {blocks} integers of at least 0, one per {TRACE_BLOCK_TOKENS} tokens, "
                    f"got {str(ids)[:60]}"
                )
            tail = inputs - (blocks - 1) * TRACE_BLOCK_TOKENS
            counts = [TRACE_BLOCK_TOKENS] * (blocks - 1) + [tail]
            runs = tuple((i * TRACE_BLOCK_TOKENS, count) for i, count in zip(ids, counts, strict=True))
            yield Arrival(number - 1, time_ms / 1000, runs, outputs, tuple(ids))


def _whole(row: dict[str, Any], name: str, where: str, low: int) -> int:
    value = row.get(name)
    if type(value) is not int or value < low:
        raise UsageError(f"{name} of {where} must be an integer of at least {low}, got {value!r}")
    return value


class _Columns(NamedTuple):
    """Which columns of a CSV hold what, and how its time is read."""

    time: str
    inputs: str
    outputs: str
    seconds: Callable[[str], float]


def _wall_time(text: str) -> float:
    return datetime.fromisoformat(
        text[:26]
    ).timestamp()  # 7 decimals of a second in Azure's files, 6 in Python's


FORMS: tuple[_Columns, ...] = (
    _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", _wall_time),
    _Columns("arrival_s", "input_tokens", "output_tokens", float),
)


def _read_csv(path: Path) -> Iterator[Arrival]:
    """Lengths and times only: nothing is shared."""
    with path.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines)
        columns = next((f for f in FORMS if f.time in (rows.fieldnames or ())), None)
        if columns is None:
            known = " or ".join(f"{f.time}, {f.inputs}, {f.outputs}" for f in FORMS)
            raise UsageError(
                f"columns of {path.name} must be {known}, got {', '.join(rows.fieldnames or ())[:80]}"
            )
        start: float | None = None
        first = 0
        for number, row in enumerate(rows, 2):
            where = f"{path.name}:{number}"
            try:
                time = columns.seconds(row[columns.time])
            except (ValueError, TypeError):
                raise UsageError(
                    f"{columns.time} of {where} must be a time, got {row[columns.time]!r}"
                ) from None
            inputs, outputs = (_count(row, name, where) for name in (columns.inputs, columns.outputs))
            start = time if start is None else start
            yield Arrival(number - 2, time - start, ((first, inputs),), outputs)
            first = (first + inputs) % (OUTPUT_TOKEN_BASE - (1 << 24))


def _count(row: dict[str, str | None], name: str, where: str) -> int:
    text = row.get(name)
    if text is None or not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name} of {where} must be a whole number of at least 1, got {text!r}")
    return int(text)


def span_s(arrivals: Sequence[Arrival]) -> float:
    """Seconds from the first to the last arrival."""
    return arrivals[-1].arrival_s - arrivals[0].arrival_s


def rescale(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same arrivals stretched to a mean rate per second."""
    span = span_s(arrivals)
    if span <= 0:
        raise UsageError("rate must be left out for a trace whose requests all arrive at once")
    factor = (len(arrivals) - 1) / span / rate
    return [a._replace(arrival_s=(a.arrival_s - arrivals[0].arrival_s) * factor) for a in arrivals]
