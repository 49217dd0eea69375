"""What the recurrent kernels share: states in member pages, rows of tokens cut at chunk ends, stores of tiles."""

import triton
import triton.language as tl


@triton.jit
def member(table_ptr, i_h, GRANULE: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Return the offset of head `i_h` and whether its member page is present. A page holds `HEADS` heads of `SIZE`."""
    entry = tl.load(table_ptr + i_h // HEADS).to(tl.int64)
    return entry * GRANULE + (i_h % HEADS) * SIZE, entry >= 0


@triton.jit
def piece(starts_ptr, positions_ptr, i_row, i_piece, CHUNK: tl.constexpr):
    """Cut a row of tokens at multiples of `CHUNK` in absolute positions (rule R1).

    Returns the token at position 0 of the chunk (before the row's first one if it starts inside a chunk), and the
    positions lo to hi of the chunk that belong to piece `i_piece`; lo >= hi: none do.
    """
    start = tl.load(starts_ptr + i_row)
    stop = tl.load(starts_ptr + i_row + 1)
    phase = tl.load(positions_ptr + i_row) % CHUNK
    origin = start + i_piece * CHUNK - phase
    lo = tl.where(i_piece == 0, phase, 0)
    return origin.to(tl.int64), lo, tl.minimum(stop - origin, CHUNK)


@triton.jit
def store_tile(p_tile, stride, b_tile, first, end, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store rows `first` to `end` of a tile that a matrix product made, as a vector.

    From a product's layout AMD's compiler stores 2 to 8 bytes a lane; a vector goes through shared memory to 16.
    """
    o_tile = tl.arange(0, ROWS * COLUMNS)
    o_row = o_tile // COLUMNS
    m_row = (o_row >= first) & (o_row < end)
    tl.store(p_tile + o_row * stride + o_tile % COLUMNS, tl.reshape(b_tile, (ROWS * COLUMNS,)), mask=m_row)
