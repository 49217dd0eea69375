"""Lists and counts of a depth planner (D4, D7, D8, D10): who is where, and who holds how many blocks.

Owns the moves that keep the sums right: take, seat, release. Does not know modes or launches.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from hybridkv.schedule.depth.config import Admission, Preemption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridkv.schedule.depth.config import DepthConfig, DepthRequest, RequestId


class Live:
    """A request between submission and its end, and its one live token.

    `limit` is D, `cursor` the decode tokens emitted since the last prefill; `loop` counts the loops that the live
    token has run, `depth` is where it leaves, `passed` the recurrent launches that left it out (D28).
    """

    __slots__ = (
        "blocks", "cursor", "depth", "depths", "ended", "filled", "finished", "id", "kv", "limit", "loop",
        "offloaded", "overtaken", "passed", "prompt", "reservation", "serial", "shallow",
    )  # fmt: skip

    def __init__(self, request: DepthRequest, serial: int, reservation: int) -> None:
        self.id = request.id
        self.serial = serial
        self.prompt = request.prompt
        self.limit = request.decode_tokens
        self.depths: Sequence[int] | None = request.depths
        self.reservation = reservation
        self.filled = self.kv = self.cursor = self.blocks = 0
        self.loop = self.depth = self.passed = self.overtaken = 0
        self.offloaded = self.ended = self.finished = False
        self.shallow = False
        """An emitted token left before full depth since the last prefill (D35)."""

    def restart(self) -> None:
        """Become a prompt again that holds all emitted tokens (D35). The pending token's own depth is spent."""
        if self.depths is not None:
            self.depths = self.depths[self.cursor + 1 :]
        self.prompt, self.limit = self.kv + 1, self.limit - self.cursor - 1
        self.filled = self.kv = self.cursor = self.overtaken = 0
        self.shallow = False

    def changed_by_full_depth(self, max_loops: int) -> bool:
        """Whether recomputing would change KV: some token emitted since the last prefill left early."""
        emitted = self.depths[: self.cursor] if self.depths is not None else ()
        return self.shallow or any(depth < max_loops for depth in emitted)


class State:
    """Every list of D7, first in first out, and the counts that make a plan O(rows).

    Offloaded requests are kept apart from `waiting`: while one waits, no new prompt is looked at (D20).
    """

    def __init__(self, config: DepthConfig) -> None:
        pool = config.pool
        self.config = config
        self.pool = pool
        self.free = pool.blocks if pool is not None else 0
        self.reserves = pool is not None and pool.admission is Admission.RESERVE
        self.reserved = 0
        self.live: dict[RequestId, Live] = {}
        self.waiting: deque[Live] = deque()
        self.offloaded: deque[Live] = deque()
        self.residents: dict[RequestId, Live] = {}
        self.partial: Live | None = None
        """The mid-prompt resident: there is at most one (D22)."""
        self.decoding = 0
        self.pre: list[Live] = []
        self.stalled: deque[Live] = deque()
        self.ready: list[Live] = []
        self.core: list[Live] = []
        self.coda: list[Live] = []
        self.drain = False
        self.launches = 0
        self.prefill_run = 0
        self.retiring: deque[tuple[int, Live]] = deque()
        self.ended: set[Live] = set()
        self.serials = 0

    def register(self, request: DepthRequest) -> Live:
        """Make a request known, in no list yet."""
        reservation = (
            self.pool.reservation(request.prompt, request.decode_tokens) if self.pool and self.reserves else 0
        )
        live = self.live[request.id] = Live(request, self.serials, reservation)
        self.serials += 1
        return live

    @property
    def queued(self) -> int:
        """Q_P: new and offloaded requests that wait."""
        return len(self.waiting) + len(self.offloaded)

    @property
    def headroom(self) -> float:
        """The headroom rho N: admission leaves this many blocks free while somebody decodes."""
        return self.config.headroom * self.pool.blocks if self.pool is not None else 0.0

    def take(self, live: Live, tokens: int) -> bool:
        """Hold blocks for `tokens` tokens: all that are missing, or none (D10)."""
        if self.pool is None:
            return True
        missing = -(-tokens // self.pool.block_tokens) - live.blocks
        if missing > self.free:
            return False
        if missing > 0:
            self.free -= missing
            live.blocks += missing
        return True

    def seat(self, live: Live) -> None:
        """Make a request resident."""
        self.residents[live.id] = live
        self.reserved += live.reservation

    def fill(self, live: Live, tokens: int) -> None:
        """Count prompt tokens as run; the first ones make a request resident."""
        if live.filled == 0:
            self.seat(live)
        live.kv = live.filled = live.filled + tokens
        if live.filled < live.prompt:
            self.partial = live
        else:
            self.partial = None
            self.decoding += 1

    def leave(self, live: Live) -> None:
        """Take a request out of the residents and give its blocks back."""
        del self.residents[live.id]
        self.reserved -= live.reservation
        self.free += live.blocks
        live.blocks = 0
        if live is self.partial:
            self.partial = None
        else:
            self.decoding -= 1

    def finish(self, live: Live) -> None:
        """A request is over (D32): gone now, or one launch late (D37)."""
        live.finished = True
        if self.config.retire_lag:
            self.retiring.append((self.launches, live))
        else:
            self._retire(live)

    def release_due(self) -> None:
        """Carry out the retirements whose lag has passed (D12)."""
        while self.retiring and self.retiring[0][0] < self.launches:
            self._retire(self.retiring.popleft()[1])

    def release_all(self) -> bool:
        """Carry out every retirement; False if none was pending (D37)."""
        pending = bool(self.retiring)
        while self.retiring:
            self._retire(self.retiring.popleft()[1])
        return pending

    def _retire(self, live: Live) -> None:
        if live.id in self.residents:
            self.leave(live)
        del self.live[live.id]
        self.drain = False

    def drop_ended(self) -> None:
        """Drop what is staged for requests that have ended (D41). What is inside a launch goes when that applies."""
        if self.partial in self.ended:
            self.ended.discard(self.partial)
            self.finish(self.partial)
        for staged in (
            self.pre,
            self.ready,
            self.core,
            self.coda,
            self.stalled,
            self.waiting,
            self.offloaded,
        ):
            gone = [live for live in staged if live in self.ended]
            if not gone:
                continue
            kept = [live for live in staged if live not in self.ended]
            staged.clear()
            staged.extend(kept)
            for live in gone:
                self.ended.discard(live)
                self.finish(live)

    def secure(self) -> list[Live]:
        """Blocks for the next token of stalled, then of fresh tokens (D13, D14). Returns those that stall now."""
        while self.stalled and self.take(self.stalled[0], self.stalled[0].kv + 1):
            self.ready.append(self.stalled.popleft())
        fresh, self.pre = self.pre, []
        if self.pool is None:
            self.ready += fresh
            return []
        missed: list[Live] = []
        for live in fresh:
            if self.take(live, live.kv + 1):
                self.ready.append(live)
            else:
                self.stalled.append(live)
                missed.append(live)
        return missed

    def restore(self) -> Live | None:
        """Bring the oldest offloaded request back, if it fits (D15)."""
        if self.drain or not self.offloaded or len(self.residents) >= self.config.width:
            return None
        live = self.offloaded[0]
        if not self.take(live, live.kv + 1):
            return None
        self.offloaded.popleft()
        live.offloaded = False
        self.seat(live)
        self.decoding += 1
        self.ready.append(live)
        return live

    def victim(self) -> Live:
        """The stalled request with the fewest KV tokens; of equals the one that stalled last (D33)."""
        return min(reversed(self.stalled), key=lambda live: live.kv)

    def preempt(self, live: Live) -> None:
        """Take a stalled request out and make it wait (D33-D35)."""
        self.stalled.remove(live)
        self.leave(live)
        self.drain = True
        if self.pool is not None and self.pool.preemption is Preemption.OFFLOAD:
            live.offloaded = True
            self.offloaded.append(live)
        else:
            live.restart()
            self.waiting.append(live)
