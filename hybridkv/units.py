"""What lies where inside one unit of storage, in elements: pieces of a convolution line, parts of a replay window.

And how far apart the tokens of activations may lie. Both twins of every kernel use it, and whoever sizes a pool. Does
not know where units lie.
"""

from __future__ import annotations

from typing import NamedTuple

ALIGNMENT = 16  # bytes: every piece and part starts at a 128-bit boundary
SSD_CHUNK = 64  # tokens: a window of Falcon-H1-7B then fits a page of 512 KiB (research note kernels, 5.7)
DELTA_CHUNK = 16  # tokens: one tile of a matrix instruction, see hybridkv/triton/delta.py
PITCH = 8  # elements: tokens of activations lie a multiple of these apart, so that bf16 is read 128 bits at a time


def _up(elements: int, itemsize: int) -> int:
    step = ALIGNMENT // itemsize
    return -(-elements // step) * step


def piece_elements(line: int, pieces: int, itemsize: int) -> int:
    """How many elements of a line each of its equal pieces holds; the last may be shorter."""
    return _up(-(-line // pieces), itemsize)


class Window(NamedTuple):
    """Token-major parts of a replay window: where the second and third begin (the first at 0), and the whole."""

    second: int
    third: int
    size: int


def _window(chunk: int, widths: tuple[int, int, int], itemsize: int) -> Window:
    first, second, third = (_up(chunk * width, itemsize) for width in widths)
    return Window(first, first + second, first + second + third)


def ssd_window(
    chunk: int, heads: int, head_dim: int, groups: int, state_dim: int, itemsize: int = 2
) -> Window:
    """Parts: x `[chunk, heads, head_dim]`, B `[chunk, groups, state_dim]`, raw dt `[chunk, heads]`."""
    return _window(chunk, (heads * head_dim, groups * state_dim, heads), itemsize)


def delta_window(key_heads: int, key_dim: int, value_heads: int, value_dim: int, itemsize: int = 2) -> Window:
    """Parts: k `[16, key_heads, key_dim]`, v' `[16, value_heads, value_dim]`, raw a `[16, value_heads]`."""
    return _window(DELTA_CHUNK, (key_heads * key_dim, value_heads * value_dim, value_heads), itemsize)
