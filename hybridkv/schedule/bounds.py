"""How much early exits can gain at most: the FLOP bound, and what prefill leaves of it (depth-batching section 7).

Owns the formulas and the parameter counts that stand in for FLOPs. Does not know schedules.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopedCosts:
    """Matrix shapes of a looped model, layers outside the core included. Embedding lookups cost nothing.

    `adapter` says whether the core begins with a projection of (state, embedding), 2 hidden -> hidden.
    """

    hidden: int
    ffn: int
    vocabulary: int
    prelude: int
    core: int
    coda: int
    max_loops: int
    adapter: bool = False

    @property
    def layer(self) -> int:
        """Parameters of a layer: four attention matrices, a gated FFN, four norm vectors."""
        return 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 4 * self.hidden

    @property
    def per_loop(self) -> int:
        """Fr: what one loop costs."""
        return self.core * self.layer + 2 * self.hidden**2 * self.adapter

    @property
    def outside(self) -> int:
        """F0: what a token costs outside the core, the head included."""
        return (self.prelude + self.coda) * self.layer + self.vocabulary * self.hidden

    def bound(self, mean_depth: float) -> float:
        """The FLOP bound at a mean depth."""
        return flop_bound(self.outside, self.per_loop, self.max_loops, mean_depth)


def _ouro(core: int) -> LoopedCosts:
    return LoopedCosts(hidden=2048, ffn=5632, vocabulary=49152, prelude=0, core=core, coda=0, max_loops=4)


def _huginn(outside: int) -> LoopedCosts:
    return LoopedCosts(
        hidden=5280,
        ffn=17920,
        vocabulary=65536,
        prelude=outside,
        core=4,
        coda=outside,
        max_loops=16,
        adapter=True,
    )


COSTS: dict[str, LoopedCosts] = {
    "ouro-1.4b": _ouro(24),
    "ouro-2.6b": _ouro(48),
    "huginn-3.5b": _huginn(2),
    "huginn-1-4-1": _huginn(1),
    "huginn-0-4-0": _huginn(0),
}
"""The paper's models, and Huginn with its outer layers cut to one and to none on each side."""


def flop_bound(outside: float, per_loop: float, max_loops: int, mean_depth: float) -> float:
    """S = (F0 + rmax Fr) / (F0 + mean depth Fr): throughput over full depth if only FLOPs counted."""
    if not 0 < mean_depth <= max_loops:
        raise UsageError(f"mean_depth must be in (0, {max_loops}], got {mean_depth}")
    return (outside + max_loops * per_loop) / (outside + mean_depth * per_loop)


def prefill_corrected(bound: float, prefill_share: float, first_share: float = 0.0) -> float:
    """E = 1 / (alpha + (1 - alpha) w), with alpha the share of GPU time that prefill takes under CB.

    Where `bound` counts first tokens at full depth, `first_share` is their share of the output tokens: they come from
    prefill, so w = (1 / S - phi) / (1 - phi) takes them out; w = 1 / S otherwise.
    """
    for name, share in (("prefill_share", prefill_share), ("first_share", first_share)):
        if not 0 <= share <= 1:
            raise UsageError(f"{name} must be in [0, 1], got {share}")
    if first_share * bound >= 1:
        raise UsageError(f"first_share must be below 1 / bound = {1 / bound:.4g}, got {first_share}")
    decode = (1 / bound - first_share) / (1 - first_share)
    return 1 / (prefill_share + (1 - prefill_share) * decode)
