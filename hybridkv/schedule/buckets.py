"""Batch sizes for which a graph is captured, and the one that a launch runs in."""

from __future__ import annotations

from bisect import bisect_left

from hybridkv.errors import UsageError


def bucket_sizes(width: int) -> tuple[int, ...]:
    """Sizes up to `width`, which is always one of them: dense where padding would be dear."""
    if width < 1:
        raise UsageError(f"width must be at least 1, got {width}")
    ladder = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 497, 16), *range(512, width + 1, 32))
    return (*(size for size in ladder if size < width), width)


def bucket_of(sizes: tuple[int, ...], rows: int) -> int:
    """The smallest size that holds `rows`."""
    if not 1 <= rows <= sizes[-1]:
        raise UsageError(f"rows must be in 1..{sizes[-1]}, got {rows}")
    return sizes[bisect_left(sizes, rows)]
