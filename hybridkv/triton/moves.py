"""Batched moves of whole units: copy, zero, gather, scatter. Bytes are carried as they are.

An absent source reads as zeros; an absent destination is skipped.
"""

import triton
import triton.language as tl
from torch import Tensor

from hybridkv.triton.common import SHAPES, CompileCase, options, signature

_BYTES = 16384  # of one program: four 128-bit accesses a thread
_OPTIONS = options(warps=8)


def _tiles(granule: int, unit: int, item: int) -> dict[str, int]:
    """Constexprs of a launch over elements of `item` bytes."""
    return {"GRANULE": granule, "UNIT": unit, "BLOCK": min(_BYTES // item, triton.next_power_of_2(unit))}


@triton.jit(do_not_specialize_on_alignment=("source_ptr", "destination_ptr"))
def _copy_units_kernel(
    pool_ptr, source_ptr, destination_ptr, GRANULE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    i_unit = tl.program_id(0)
    source = tl.load(source_ptr + i_unit).to(tl.int64)
    destination = tl.load(destination_ptr + i_unit).to(tl.int64)
    if destination < 0:
        return
    o_unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_unit = o_unit < UNIT
    b_unit = tl.load(pool_ptr + source * GRANULE + o_unit, mask=m_unit & (source >= 0), other=0)
    tl.store(pool_ptr + destination * GRANULE + o_unit, b_unit, mask=m_unit)


def copy_units(pool: Tensor, source: Tensor, destination: Tensor, *, granule: int, unit: int) -> None:
    """Copy units of `unit` elements inside a pool, from the entries of one table to those of another."""
    tiles = _tiles(granule, unit, pool.element_size())
    _copy_units_kernel[source.shape[0], triton.cdiv(unit, tiles["BLOCK"])](
        pool, source, destination, **tiles, **_OPTIONS
    )


@triton.jit(do_not_specialize_on_alignment=("destination_ptr",))
def _zero_units_kernel(
    pool_ptr, destination_ptr, GRANULE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    destination = tl.load(destination_ptr + tl.program_id(0)).to(tl.int64)
    if destination < 0:
        return
    o_unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_zero = tl.zeros((BLOCK,), pool_ptr.dtype.element_ty)
    tl.store(pool_ptr + destination * GRANULE + o_unit, b_zero, mask=o_unit < UNIT)


def zero_units(pool: Tensor, destination: Tensor, *, granule: int, unit: int) -> None:
    """Fill units with zeros."""
    tiles = _tiles(granule, unit, pool.element_size())
    _zero_units_kernel[destination.shape[0], triton.cdiv(unit, tiles["BLOCK"])](
        pool, destination, **tiles, **_OPTIONS
    )


@triton.jit(do_not_specialize_on_alignment=("table_ptr",), do_not_specialize=("table_stride",))
def _gather_units_kernel(
    pool_ptr, table_ptr, table_stride: tl.int64, out_ptr, out_stride: tl.int64,
    GRANULE: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    i_member = tl.program_id(1)
    entry = tl.load(table_ptr + i_row * table_stride + i_member).to(tl.int64)
    o_unit = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    o_row = i_member * UNIT + o_unit
    m_unit = (o_unit < UNIT) & (o_row < SIZE)
    b_unit = tl.load(pool_ptr + entry * GRANULE + o_unit, mask=m_unit & (entry >= 0), other=0)
    tl.store(out_ptr + i_row * out_stride + o_row, b_unit, mask=m_unit)


def gather_units(pool: Tensor, table: Tensor, out: Tensor, *, granule: int, unit: int) -> None:
    """Collect the members of every row of a table into one dense row."""
    tiles = _tiles(granule, unit, pool.element_size())
    _gather_units_kernel[*table.shape, triton.cdiv(unit, tiles["BLOCK"])](
        pool, table, table.stride(0), out, out.stride(0),
        SIZE=out.shape[1], **tiles, **_OPTIONS,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=("table_ptr",), do_not_specialize=("table_stride",))
def _scatter_units_kernel(
    pool_ptr, table_ptr, table_stride: tl.int64, values_ptr, values_stride: tl.int64,
    GRANULE: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    i_member = tl.program_id(1)
    entry = tl.load(table_ptr + i_row * table_stride + i_member).to(tl.int64)
    if entry < 0:
        return
    o_unit = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    o_row = i_member * UNIT + o_unit
    m_unit = (o_unit < UNIT) & (o_row < SIZE)
    b_unit = tl.load(values_ptr + i_row * values_stride + o_row, mask=m_unit, other=0)
    tl.store(pool_ptr + entry * GRANULE + o_unit, b_unit, mask=m_unit)


def scatter_units(pool: Tensor, table: Tensor, values: Tensor, *, granule: int, unit: int) -> None:
    """Distribute dense rows over the members that a table names."""
    tiles = _tiles(granule, unit, pool.element_size())
    _scatter_units_kernel[*table.shape, triton.cdiv(unit, tiles["BLOCK"])](
        pool, table, table.stride(0), values, values.stride(0),
        SIZE=values.shape[1], **tiles, **_OPTIONS,
    )  # fmt: skip


def compile_cases(arch: str) -> list[CompileCase]:
    """Whole pages, and checkpoints of bf16 state, whose entries count 32-KiB slots as in S2."""
    del arch  # one launch for all
    cases = []
    for name, shape in SHAPES.items():
        page = shape.page_bytes // 2
        heads, rows, columns = shape.state
        size = heads * rows * columns
        tiles = _tiles(16384, page, 2)
        pages = {"geometry": name, "options": _OPTIONS, "per": "page"}
        dense = {
            "geometry": name,
            "options": _OPTIONS,
            "per": "checkpoint",
            "constexprs": tiles | {"SIZE": size},
        }
        moved = 2.0 * shape.page_bytes
        cases += [
            CompileCase(
                kernel=_copy_units_kernel, constexprs=tiles, bytes_per_token=moved, floor_bytes=moved,
                signature=signature(p_bf16_16="pool_ptr", p_i32="source_ptr destination_ptr"), **pages,
            ),
            CompileCase(
                kernel=_zero_units_kernel, constexprs=tiles, bytes_per_token=moved / 2, floor_bytes=moved / 2,
                signature=signature(p_bf16_16="pool_ptr", p_i32="destination_ptr"), **pages,
            ),
        ]  # fmt: skip
        for kernel, row in ((_gather_units_kernel, "out"), (_scatter_units_kernel, "values")):
            types = signature(
                p_bf16_16=f"pool_ptr {row}_ptr", p_i32="table_ptr", i64="table_stride", i64_16=f"{row}_stride"
            )
            cases.append(
                CompileCase(
                    kernel=kernel, signature=types, bytes_per_token=4.0 * size, floor_bytes=4.0 * size, **dense
                )
            )  # fmt: skip
    return cases
