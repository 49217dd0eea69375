"""Whose fault it is, as a tree.

    HybridKVError
    ├── UsageError        the caller broke the contract; nothing was changed
    ├── UnsupportedError  a sound request that this library does not serve
    ├── OutOfMemory       memory that can never be had, where no refusal can be returned as a value
    └── CorruptionError   an invariant is broken, or a handle outlived what it named

Running short of pages is not an error: calls return a refusal that says what was needed and what could be had.
Messages read "<name> must be <expected>, got <actual>", with a hint where there is one.
"""

from __future__ import annotations


class HybridKVError(Exception):
    """Everything that this library raises on purpose."""


class UsageError(HybridKVError, ValueError):
    """The caller broke the contract. Nothing was changed."""


class UnsupportedError(HybridKVError, NotImplementedError):
    """The request is sound, but this library does not serve it."""


class OutOfMemory(HybridKVError, MemoryError):
    """What was asked for can never fit. `needed` and `obtainable` count units of `pool`."""

    def __init__(self, message: str, *, pool: str = "", needed: int = 0, obtainable: int = 0) -> None:
        super().__init__(message)
        self.pool = pool
        self.needed = needed
        self.obtainable = obtainable


class CorruptionError(HybridKVError, RuntimeError):
    """An invariant of DESIGN section 5 does not hold, or a stale handle was used. `invariant` is its id."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant
