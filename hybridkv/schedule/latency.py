"""How long a launch takes: an affine law per stage, as data; fits from measured rows; B*.

Milliseconds everywhere. The paper writes alpha for the cost per token of context; here it is `kappa`, because alpha
is the share of time that prefill takes. Does not know a planner: it gets row counts and context lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hybridkv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class StepCost:
    """t = delta + gamma * rows + kappa * context, `context` summed over the rows (depth-batching section 7).

    delta is the reload of weights and the kernels' fixed cost, gamma what a row computes, kappa the KV of a token.
    """

    delta: float
    gamma: float = 0.0
    kappa: float = 0.0

    def time(self, rows: int, context: float) -> float:
        """Milliseconds for `rows` (padded) rows that attend to `context` tokens together."""
        return self.delta + self.gamma * rows + self.kappa * context

    def b_star(self, context: float) -> float:
        """Rows at which fixed cost equals batch cost, each row attending to `context` tokens."""
        return self.delta / (self.gamma + self.kappa * context)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """t = fixed + tokens * (per_token + per_context * mean prompt length)."""

    fixed: float
    per_token: float
    per_context: float

    def time(self, tokens: int, mean_prompt: float) -> float:
        """Milliseconds for `tokens` prompt tokens of prompts that are `mean_prompt` long on average."""
        return self.fixed + tokens * (self.per_token + self.per_context * mean_prompt)


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Costs of the four stages of a looped model. A full-depth decode is a prelude, every loop and a coda."""

    loop: StepCost
    prelude: StepCost
    coda: StepCost
    prefill: PrefillCost
    max_loops: int

    def boundary(self, rows: int, context: float) -> float:
        """Prelude and coda of one launch, the part of a token that does not grow with its depth (tau0)."""
        return self.prelude.time(rows, context) + self.coda.time(rows, context)

    def decode(self, rows: int, context: float) -> float:
        """A full-depth step of `rows` rows."""
        return self.boundary(rows, context) + self.max_loops * self.loop.time(rows, context)

    def token(self, depth: int, rows: int, context: float) -> float:
        """T(r) = tau0 + r t of a batch of `rows` rows at one depth and context length."""
        return self.boundary(rows, rows * context) + depth * self.loop.time(rows, rows * context)


class StepFit(NamedTuple):
    """A fitted step cost, what each measured row missed it by, and the coefficient of determination."""

    cost: StepCost
    residuals: npt.NDArray[np.float64]
    r_squared: float


def fit_step(measured: Iterable[tuple[int, float, float]]) -> StepFit:
    """Least squares through measured (rows, mean context, milliseconds). Needs three that differ in all terms."""
    table = np.array(list(measured), dtype=np.float64).reshape(-1, 3)
    rows, context, times = table.T
    terms = np.stack([np.ones_like(rows), rows, rows * context], axis=1)
    if np.linalg.matrix_rank(terms) < 3:
        raise UsageError(
            f"measured must vary in rows and in context, got {len(table)} rows of rank {np.linalg.matrix_rank(terms)}"
        )
    solution = np.linalg.lstsq(terms, times, rcond=None)[0]
    residuals = times - terms @ solution
    spread = float(((times - times.mean()) ** 2).sum())
    r_squared = 1.0 - float((residuals**2).sum()) / spread if spread else 1.0
    return StepFit(StepCost(*(float(value) for value in solution)), residuals, r_squared)


def solve_step(delta: float, short: tuple[float, float], long: tuple[float, float]) -> StepCost:
    """The step cost with that delta and two known B*, each given as (context, B*)."""
    (near, b_near), (far, b_far) = short, long
    if far <= near or b_far >= b_near or b_far <= 0:
        raise UsageError(f"B* must fall with context, got {b_near} at {near} and {b_far} at {far}")
    kappa = delta * (1 / b_far - 1 / b_near) / (far - near)
    gamma = delta / b_near - near * kappa
    if gamma <= 0:
        raise UsageError(
            f"gamma must be positive, got {gamma:.3g}; B* at context {far} is too small for that at {near}"
        )
    return StepCost(delta, gamma, kappa)


def _calibrated(delta: float, kappa: float, b_star_128: float) -> StepCost:
    return StepCost(delta, delta / b_star_128 - 128 * kappa, kappa)


_OURO = _calibrated(4.7, 1.1e-4, 140)
_HUGINN = _calibrated(2.39, 6.2e-5, 80)

LATENCIES: dict[str, LatencyModel] = {
    "ouro-1.4b": LatencyModel(
        loop=_OURO,
        prelude=StepCost(0.05),
        coda=StepCost(0.35, 0.0008),
        prefill=PrefillCost(19.2, 0.06, 1e-5),
        max_loops=4,
    ),
    "ouro-2.6b": LatencyModel(
        loop=StepCost(2 * _OURO.delta, 2 * _OURO.gamma, 2 * _OURO.kappa),
        prelude=StepCost(0.05),
        coda=StepCost(0.35),
        prefill=PrefillCost(38.4, 0.12, 2e-5),
        max_loops=4,
    ),
    "huginn-3.5b": LatencyModel(
        loop=_HUGINN,
        prelude=StepCost(1.19, 0.011, 3.1e-5),
        coda=StepCost(1.62, 0.013, 3.1e-5),
        prefill=PrefillCost(41.0, 0.16, 1.2e-5),
        max_loops=16,
    ),
    "huginn-1-4-1": LatencyModel(
        loop=_HUGINN,
        prelude=StepCost(0.605, 0.0055, 1.55e-5),
        coda=StepCost(1.035, 0.0075, 1.55e-5),
        prefill=PrefillCost(39.9, 0.16, 1.2e-5),
        max_loops=16,
    ),
    "huginn-0-4-0": LatencyModel(
        loop=_HUGINN,
        prelude=StepCost(0.02),
        coda=StepCost(0.45, 0.002),
        prefill=PrefillCost(38.7, 0.16, 1.2e-5),
        max_loops=16,
    ),
}
"""Calibrated on the paper's published figures (depth-batching section 8); modelled, never measured."""
