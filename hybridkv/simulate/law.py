"""How long a step takes: t = base + decode * rows + prefill * tokens, and its fit to measured steps.

The default constants are least squares on the six event-time rows of Table E-6 of arXiv 2610.15755 (Falcon-H1-7B, BF16, one
A100-PCIE-40GB, context about 3,300 tokens): R2 0.9987, and within 2.3 % on its 14 other usable rows. Refit for any other
GPU, model, context or engine; do not scale by peak bandwidth or FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hybridkv.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLaw:
    """Milliseconds: `base_ms` a step, `decode_ms` a decoding row, `prefill_ms` a prefill token."""

    base_ms: float = 15.39357179
    decode_ms: float = 0.42844743
    prefill_ms: float = 0.08517653

    def seconds(self, decode_rows: float, prefill_tokens: float) -> float:
        """Duration of one step."""
        return (self.base_ms + self.decode_ms * decode_rows + self.prefill_ms * prefill_tokens) / 1000


class LawFit(NamedTuple):
    """A fitted law, the share of variance it explains, and measured minus fitted milliseconds per row."""

    law: StepLaw
    r2: float
    residuals_ms: tuple[float, ...]


def fit_step_law(
    decode_rows: Sequence[float], prefill_tokens: Sequence[float], step_ms: Sequence[float]
) -> LawFit:
    """Least squares over measured steps; at least three that are not all alike."""
    design = np.column_stack([np.ones(len(step_ms)), decode_rows, prefill_tokens])
    if len(step_ms) < 3 or np.linalg.matrix_rank(design) < 3:
        raise UsageError(f"steps must differ in rows and tokens, at least three of them, got {len(step_ms)}")
    measured = np.asarray(step_ms, float)
    coefficients = np.linalg.lstsq(design, measured, rcond=None)[0]
    residuals = measured - design @ coefficients
    spread = measured - measured.mean()
    base, decode, prefill = coefficients.tolist()
    law = StepLaw(base_ms=base, decode_ms=decode, prefill_ms=prefill)
    return LawFit(law, 1 - float(residuals @ residuals / (spread @ spread)), tuple(residuals.tolist()))
