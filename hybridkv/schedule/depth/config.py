"""What a depth planner is told: parameters and knobs (D5, D6, D28, D35-D42), and one request (D1).

Owns validation and clamping. Does not know what a launch is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from hybridkv.errors import OutOfMemory, UsageError
from hybridkv.geometry import LoopLayout, LoopSpec
from hybridkv.geometry.checks import resolve, size

if TYPE_CHECKING:
    from collections.abc import Sequence

RequestId = str

ADMISSION_SCAN = 64
"""Waiting prompts that one prefill looks at (D20)."""
OVERTAKEN_AT_MOST = 8
"""How often a prompt that does not fit may be passed by others (D22, D23)."""


class Mode(StrEnum):
    """CB runs every token to full depth; NOREFILL lets a wave shrink; REFILL fills places that exits free."""

    CB = "cb"
    NOREFILL = "norefill"
    REFILL = "refill"


class Planes(StrEnum):
    """Which KV planes may share a recurrent launch (D27, D28). FIFO starves (G7): for comparison only."""

    MIXED = "mixed"
    AGED = "aged"
    FIFO = "fifo"


class Preemption(StrEnum):
    """What becomes of a stalled request when nothing else can run (D33-D35)."""

    NONE = "none"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


class Admission(StrEnum):
    """DEMAND takes blocks as tokens need them (D21); RESERVE admits only what can run to its end (D38)."""

    DEMAND = "demand"
    RESERVE = "reserve"


class IdleOrder(StrEnum):
    """What goes first when the core is empty and fewer than K tokens wait for the coda (D36)."""

    PREFILL_FIRST = "prefill_first"
    CODA_FIRST = "coda_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPool:
    """N blocks of b tokens (D6), and what happens when they run short. `max_tokens` caps reservations (D38)."""

    blocks: int
    block_tokens: int
    preemption: Preemption = Preemption.NONE
    allow_semantic_change: bool = False
    admission: Admission = Admission.DEMAND
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "preemption", resolve(Preemption, "preemption", self.preemption))
        object.__setattr__(self, "admission", resolve(Admission, "admission", self.admission))
        size("blocks", self.blocks)
        size("block_tokens", self.block_tokens)
        if self.max_tokens is not None:
            size("max_tokens", self.max_tokens)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def reservation(self, prompt: int, decode_tokens: int) -> int:
        """Blocks that RESERVE sets aside for a request (D38)."""
        tokens = prompt + decode_tokens + 1
        return self.blocks_for(tokens if self.max_tokens is None else min(tokens, self.max_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthConfig:
    """Parameters of a depth planner. The paper's letters: width W, min_coda K, prefill_tokens M, open_slots S, headroom rho.

    `early_exit` says whether the engine can leave the core between loops; without it the planner runs CB.
    """

    mode: Mode
    width: int
    max_loops: int
    min_coda: int = 1
    prefill_tokens: int = 8192
    open_slots: int | None = None
    headroom: float = 0.0
    lookahead: bool = False
    min_signal: int = 1
    early_exit: bool = True
    planes: Planes = Planes.MIXED
    layout: LoopLayout = LoopLayout.DEPTH_INDEXED
    pool: KVPool | None = None
    age_bound: int = 8
    idle_order: IdleOrder = IdleOrder.PREFILL_FIRST
    max_prefill_run: int | None = None
    retire_lag: int = 0
    codas_in_flight: int = 2

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            object.__setattr__(self, name, resolve(kind, name, getattr(self, name)))
        for name in (
            "width",
            "max_loops",
            "min_coda",
            "prefill_tokens",
            "min_signal",
            "age_bound",
            "codas_in_flight",
        ):
            size(name, getattr(self, name))
        for name in ("open_slots", "max_prefill_run"):
            if getattr(self, name) is not None:
                size(name, getattr(self, name))
        self._check_ranges()

    def _check_ranges(self) -> None:
        if self.min_coda > self.width:
            raise UsageError(f"min_coda must be at most the width {self.width}, got {self.min_coda}")
        if self.open_slots is not None and self.open_slots > self.width:
            raise UsageError(f"open_slots must be at most the width {self.width}, got {self.open_slots}")
        if not 0 <= self.headroom < 1:
            raise UsageError(f"headroom must be in [0, 1), got {self.headroom}")
        if self.retire_lag not in {0, 1}:
            raise UsageError(f"retire_lag must be 0 or 1, got {self.retire_lag}")
        if self.layout is LoopLayout.FIRST_THEN_SHARED and self.min_depth < 2:
            raise UsageError(
                f"min_depth must be at least 2 with layout first_then_shared, got {self.min_depth}; "
                "set lookahead, or min_signal to 2"
            )
        recompute = self.pool is not None and self.pool.preemption is Preemption.RECOMPUTE
        if recompute and self.layout is LoopLayout.LAST_EXITED:
            raise UsageError(
                "preemption must be none or offload with layout last_exited, got recompute; "
                "a recomputed prompt has full-depth KV where tokens had exited early"
            )

    @property
    def core(self) -> LoopSpec:
        """One layer of the shared core: which plane each loop has (D42)."""
        return LoopSpec(prelude=0, core=1, coda=0, max_loops=self.max_loops, layout=self.layout)

    @property
    def min_depth(self) -> int:
        """The fewest loops that a gate can give a token (D2)."""
        full = self.mode is Mode.CB or not self.early_exit
        return self.max_loops if full else min(self.max_loops, self.min_signal + self.lookahead)

    def clamped(self) -> DepthConfig:
        """What the planner runs: D5's clamps in their order, and CB where the engine cannot exit early."""
        width = min(self.width, self.prefill_tokens)
        return replace(
            self,
            mode=self.mode if self.early_exit else Mode.CB,
            width=width,
            min_coda=min(self.min_coda, width),
            open_slots=max(1, width // 8) if self.open_slots is None else min(self.open_slots, width),
        )


_CHOICES: dict[str, type[StrEnum]] = {
    "mode": Mode,
    "planes": Planes,
    "layout": LoopLayout,
    "idle_order": IdleOrder,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthRequest:
    """A prompt, and how many decode tokens follow its first output token (D1).

    `depths` replays recorded effective depths, one a decode token; without them exits come with `apply`.
    """

    id: RequestId
    prompt: int
    decode_tokens: int
    depths: Sequence[int] | None = None

    @classmethod
    def recorded(cls, id: RequestId, prompt: int, depths: Sequence[int]) -> DepthRequest:  # noqa: A002  (the field's name)
        """A request whose depths are known."""
        return cls(id=id, prompt=prompt, decode_tokens=len(depths), depths=depths)

    def check(self, config: DepthConfig) -> None:
        """Refuse what can never run under `config` (D1, D6, D38, D42)."""
        size(f"prompt of {self.id!r}", self.prompt)
        size(f"decode_tokens of {self.id!r}", self.decode_tokens, least=0)
        if self.depths is not None:
            self._check_depths(config, self.depths)
        if config.pool is None:
            return
        reserve = config.pool.admission is Admission.RESERVE
        needed = max(
            config.pool.blocks_for(self.prompt + self.decode_tokens),
            config.pool.reservation(self.prompt, self.decode_tokens) if reserve else 0,
        )
        if needed > config.pool.blocks:
            raise OutOfMemory(
                f"request {self.id!r} must need at most {config.pool.blocks} blocks, got {needed}",
                pool="blocks",
                needed=needed,
                obtainable=config.pool.blocks,
            )

    def _check_depths(self, config: DepthConfig, depths: Sequence[int]) -> None:
        if len(depths) != self.decode_tokens:
            raise UsageError(
                f"depths of {self.id!r} must have {self.decode_tokens} entries, got {len(depths)}"
            )
        low = 2 if config.layout is LoopLayout.FIRST_THEN_SHARED else 1
        if len(depths) and not low <= min(depths) <= max(depths) <= config.max_loops:
            wrong = next(d for d in depths if not low <= d <= config.max_loops)
            raise UsageError(f"depths of {self.id!r} must be in {low}..{config.max_loops}, got {wrong}")
