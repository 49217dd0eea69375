"""Where keys and values lie inside an attention block, and how attention is cut along positions.

Both twins of every attention kernel use it, and whoever sizes a pool. Declared, never inferred: with two KV heads two
layouts have the same shape. Does not know where blocks lie.
"""

from __future__ import annotations

from typing import NamedTuple

# Softmax is summed over absolute segments of positions [512 s, 512 (s + 1)), then over segments in order (rule R1).
SEGMENT = 512


class KVLayout(NamedTuple):
    """One block: `[block_tokens]` keys and as many values of `kv_heads` heads. Everything counts elements.

    Element `d` of head `h` of token `t` lies at t * token_stride + h * head_stride + d for keys, and `value_offset`
    behind that for values. A mapping table's entry counts `granule` elements.
    """

    kv_heads: int
    head_dim: int
    block_tokens: int
    token_stride: int
    head_stride: int
    value_offset: int
    granule: int

    @classmethod
    def token_major(cls, kv_heads: int, head_dim: int, block_tokens: int, granule: int) -> KVLayout:
        """Keys `[block_tokens, kv_heads, head_dim]`, then values."""
        width = kv_heads * head_dim
        return cls(kv_heads, head_dim, block_tokens, width, head_dim, block_tokens * width, granule)

    @classmethod
    def head_major(cls, kv_heads: int, head_dim: int, block_tokens: int, granule: int) -> KVLayout:
        """Keys `[kv_heads, block_tokens, head_dim]`, then values."""
        plane = block_tokens * head_dim
        return cls(kv_heads, head_dim, block_tokens, head_dim, plane, kv_heads * plane, granule)

    @property
    def extent(self) -> int:
        """Elements from the first of a block to its last."""
        last = (self.block_tokens - 1) * self.token_stride + (self.kv_heads - 1) * self.head_stride
        return self.value_offset + last + self.head_dim
