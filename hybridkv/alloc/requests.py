"""One live request: its tokens and their keys, and what it holds while it runs.

positions   [0, cached)        [cached, computed)           [computed, planned)    [planned, blocks * block)
blocks      shared, cached     ours; full ones published    a step writes them     reserved, unwritten
on release  reference drops    reclaimable if published     freed                  freed

checkpoints `source` at or below `computed`: read, kept for a rollback until the next boundary is passed
            `boundaries` in (computed, planned]: being written by steps in flight, oldest first
            `open`: the running state from `opened_at` on; it becomes the next kept boundary's checkpoint
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.alloc.checkpoint import Checkpoint, State
from hybridkv.alloc.organization import StateKind
from hybridkv.alloc.policy.placement import NEVER, Kept
from hybridkv.alloc.prefix import Key, TokenHash, extend_chain
from hybridkv.alloc.rows import ROW_MASK, RowTable
from hybridkv.alloc.storage import Lost


class Status(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    RELEASED = "released"


class Undo(NamedTuple):
    """How a request was before one step in flight reserved storage, and what the step took and reclaimed."""

    step: int
    admitted: bool
    blocks: int
    open: Checkpoint | None
    opened_at: int
    boundaries: tuple[Checkpoint, ...]
    live: State | None
    window: State | None
    taken: list[dict[StateKind, NDArray[np.int32]]]
    lost: list[Lost]


class Request:
    """Handle of one request. Engines read `id`, `handle`, `tokens`, `computed`, `cached`; the rest is the cache's."""

    __slots__ = (
        "_rows", "_stored", "_tokens", "blocks", "boundaries", "cached", "chain", "handle", "id", "journal", "kept",
        "kept_until", "live", "open", "preemptions", "prompt_tokens", "published", "root", "row", "salt", "source",
        "status", "table", "window",
    )  # fmt: skip

    def __init__(
        self, request_id: Hashable, tokens: NDArray[np.int32], rows: RowTable, root: bytes, salt: int | None
    ) -> None:
        self.id, self.salt, self.root = request_id, salt, root
        self._rows, self._tokens, self._stored = rows, tokens, len(tokens)
        self.handle = rows.add(len(tokens))
        self.row = self.handle & ROW_MASK
        self.chain: list[Key] = []
        self.status = Status.WAITING
        self.prompt_tokens = len(tokens)
        self.preemptions = 0
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        self.cached = self.blocks = self.published = 0
        self.table = np.empty((0, 0), np.int32)
        self.source: Checkpoint | None = None
        self.open: Checkpoint | None = None
        self.boundaries: list[Checkpoint] = []
        self.live: State | None = None
        self.window: State | None = None
        self.kept = Kept(0)
        self.kept_until = 0
        self.journal: list[Undo] = []

    # ----------------------------------------------------------------------------------------------- tokens
    @property
    def length(self) -> int:
        """Tokens known."""
        return int(self._rows.length[self.row])

    @property
    def computed(self) -> int:
        """Tokens whose states are written."""
        return int(self._rows.computed[self.row])

    @property
    def planned(self) -> int:
        """Tokens whose states are written once every step in flight is done."""
        return int(self._rows.planned[self.row])

    @property
    def opened_at(self) -> int:
        """Where the running state was opened: a step that starts here reads `source`, later ones work in place."""
        return int(self._rows.opened_at[self.row])

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids known so far, int32 `[length]`."""
        self.collect()
        return self._tokens[: self._stored].copy()

    def collect(self) -> None:
        """Take the tokens that batched commits left in the row table. O(new tokens)."""
        length, width = self.length, self._rows.block_tokens
        while self._stored < length:
            low = self._stored % width
            count = min(width - low, length - self._stored)
            self._append(self._rows.fresh[self.row, low : low + count])

    def append(self, tokens: NDArray[np.int32]) -> None:
        """New tokens at the end."""
        self.collect()
        self._append(tokens)
        self._rows.length[self.row] = self._stored

    def cut(self, length: int) -> None:
        """Forget tokens behind `length`."""
        self.collect()
        self._stored = length
        self._rows.length[self.row] = length
        del self.chain[length // self._rows.block_tokens :]

    def hash(self, hash_tokens: TokenHash) -> None:
        """Keys of all full blocks. O(new tokens)."""
        if (len(self.chain) + 1) * self._rows.block_tokens > self.length:
            return
        self.collect()
        extend_chain(
            self.chain, self.root, self._tokens[: self._stored], self._rows.block_tokens, hash_tokens
        )

    def _append(self, tokens: NDArray[np.int32]) -> None:
        stop = self._stored + len(tokens)
        if stop > len(self._tokens):
            wider = np.empty(max(stop, 2 * len(self._tokens)), np.int32)
            wider[: self._stored] = self._tokens[: self._stored]
            self._tokens = wider
        self._tokens[self._stored : stop] = tokens
        self._stored = stop

    # ------------------------------------------------------------------------------------------- boundaries
    def next_kept(self, position: int) -> int:
        """The first boundary behind `position` that this request keeps, or `NEVER`."""
        found = self.kept.after(position)
        return found if found <= self.kept_until else NEVER

    def kept_between(self, start: int, stop: int) -> list[int]:
        """Kept boundaries in (start, stop], in order."""
        return self.kept.between(start, min(stop, self.kept_until))

    def states(self) -> list[State]:
        """Every state but attention blocks that the request holds a reference on."""
        held = (self.source, *self.boundaries, self.open, self.live, self.window)
        return [state for state in held if state is not None]

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.status.value}, {self.computed} of {self.length} tokens computed)"
