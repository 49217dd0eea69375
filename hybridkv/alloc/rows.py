"""Numbers of all live requests as arrays, so that a step over many requests is a few array operations.

Owns rows, handles and steps in flight. A handle is a row with its generation; a row that was given to another request
no longer answers to it. Knows no pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import UsageError

IN_FLIGHT = 8  # steps of one request that may be planned and not yet committed
ROW_BITS = 32
NOT_RUNNING = -1
ROW_MASK = (1 << ROW_BITS) - 1

Rows = NDArray[np.int64]


class RowTable:
    """One row per live request; grows by doubling.

    handle    of a running request, else `NOT_RUNNING`
    computed  tokens whose states are written            planned  the same, once everything in flight is done
    length    tokens known                               limit    a step up to here needs no storage
    next_publish  a commit up to here publishes          opened_at  where the running state was opened
    pending   ends of the steps in flight, between `head` and `tail` (modulo `IN_FLIGHT`)
    fresh     tokens of the block in progress, by position modulo the block
    """

    def __init__(self, block_tokens: int, rows: int = 64) -> None:
        self.block_tokens = block_tokens
        self.generation = np.zeros(rows, np.int64)
        self.handle = np.full(rows, NOT_RUNNING, np.int64)
        self.computed = np.zeros(rows, np.int64)
        self.planned = np.zeros(rows, np.int64)
        self.length = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.next_publish = np.zeros(rows, np.int64)
        self.opened_at = np.zeros(rows, np.int64)
        self.head = np.zeros(rows, np.int64)
        self.tail = np.zeros(rows, np.int64)
        self.pending = np.zeros((rows, IN_FLIGHT), np.int64)
        self.fresh = np.zeros((rows, block_tokens), np.int32)
        self._free = list(range(rows - 1, -1, -1))

    def add(self, length: int) -> int:
        """A handle for a new request that knows `length` tokens."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.length[row] = length
        self.reset(row)
        return int(self.generation[row]) << ROW_BITS | row

    def reset(self, row: int) -> None:
        """Nothing computed, nothing in flight."""
        self.handle[row] = NOT_RUNNING
        for column in (self.computed, self.planned, self.limit, self.next_publish, self.opened_at):
            column[row] = 0
        self.head[row] = self.tail[row] = 0

    def run(self, handle: int) -> None:
        """The request runs: its handle answers."""
        self.handle[handle & ROW_MASK] = handle

    def remove(self, row: int) -> None:
        """The row's handle is stale from now on."""
        self.reset(row)
        self.generation[row] += 1
        self._free.append(row)

    def of(self, handles: NDArray[np.int64]) -> Rows:
        """Rows of running requests; a stale handle, one named twice, or one that does not run is refused."""
        rows = handles & ROW_MASK
        try:
            good = self.handle[rows] == handles
        except IndexError:
            good = np.zeros(len(rows), np.bool_)
        if not good.all():
            raise UsageError(
                f"handles must name running requests, got {handles[~good].tolist()} that do not run"
            )
        if len(rows) > 1 and np.bincount(rows).max() > 1:
            raise UsageError(f"handles must name each request once, got {handles.tolist()}")
        return rows

    def running(self, handles: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which handles name running requests; any number is asked for, also one that never was a handle."""
        rows = handles & ROW_MASK
        known = rows < len(self.handle)
        return known & (self.handle[np.where(known, rows, 0)] == handles) & (handles >= 0)

    def push(self, rows: Rows, stop: NDArray[np.int64]) -> None:
        """One more step in flight for each row."""
        tail = self.tail[rows]
        self.pending[rows, tail % IN_FLIGHT] = stop
        self.tail[rows] = tail + 1
        self.planned[rows] = stop

    def push_one(self, row: int, stop: int) -> int:
        """`push` of one row; the step's number."""
        step = int(self.tail[row])
        self.pending[row, step % IN_FLIGHT] = stop
        self.tail[row] = step + 1
        self.planned[row] = stop
        return step

    def flights(self, row: int) -> int:
        """Steps of this row in flight."""
        return int(self.tail[row] - self.head[row])

    def ends(self, row: int) -> list[int]:
        """Ends of the steps in flight, oldest first."""
        return [
            int(self.pending[row, i % IN_FLIGHT]) for i in range(int(self.head[row]), int(self.tail[row]))
        ]

    def check_room(self, rows: Rows) -> None:
        """Refuse one more step where `IN_FLIGHT` are pending."""
        full = self.tail[rows] - self.head[rows] >= IN_FLIGHT
        if full.any():
            raise UsageError(
                f"steps in flight must be at most {IN_FLIGHT} a request, got one more; commit first"
            )

    def _grow(self) -> None:
        old = len(self.handle)
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))  # pyright: ignore[reportUnknownArgumentType]
        self.handle[old:] = NOT_RUNNING
        self._free = list(range(2 * old - 1, old - 1, -1))


def as_tokens(tokens: Sequence[int] | NDArray[Any], name: str = "token_ids") -> NDArray[np.int32]:
    """Token ids as int32 `[tokens]`; anything else is refused."""
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{name} must be a flat sequence of integers, got {error}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(
            f"{name} must be a flat sequence of integers, got {array.ndim} dimensions of {array.dtype}"
        )
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise UsageError(f"{name} must be in [0, 2**31), got {array.min()} to {array.max()}")
    return array.astype(np.int32, copy=True)


def as_sampled(tokens: NDArray[Any] | Sequence[int], count: int) -> NDArray[np.int64]:
    """One token id for each of `count` rows, or a negative number for none."""
    added = np.asarray(tokens)
    if added.shape != (count,) or added.dtype.kind not in "iu" or (added > np.iinfo(np.int32).max).any():
        raise UsageError(
            f"new_tokens must be {count} token ids below 2**31, got shape {added.shape} of {added.dtype}"
        )
    return added.astype(np.int64, copy=False)
