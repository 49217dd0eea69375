"""Moves of whole units: copy, zero, gather, scatter. Byte-exact; safe to capture in a CUDA graph.

A unit is `unit` elements of a pool at `entry * granule`. An absent source reads as zeros, an absent destination is
skipped. Empty tables are fine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybridkv.ops._register import register
from hybridkv.ops._validate import (
    FLOATS,
    check_base,
    check_destinations,
    check_entries,
    check_pool,
    check_table,
    check_tensor,
    require,
)

if TYPE_CHECKING:
    from torch import Tensor

# A move does not look at what it moves.
MOVABLE = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _check_copy(pool: Tensor, source: Tensor, destination: Tensor, *, granule: int, unit: int) -> None:
    check_entries("source", source, pool, granule=granule, unit=unit)
    _check_zero(pool, destination, granule=granule, unit=unit)
    check_destinations(
        "destination", destination, granule=granule, unit=unit, source_name="source", source=source
    )


def _check_zero(pool: Tensor, destination: Tensor, *, granule: int, unit: int) -> None:
    check_base("pool", pool)
    check_entries("destination", destination, pool, granule=granule, unit=unit)
    check_destinations("destination", destination, granule=granule, unit=unit)


def _check_gather(pool: Tensor, table: Tensor, out: Tensor, *, granule: int, unit: int) -> None:
    del out
    check_base("pool", pool)
    check_entries("table", table, pool, granule=granule, unit=unit)


def _check_scatter(pool: Tensor, table: Tensor, values: Tensor, *, granule: int, unit: int) -> None:
    _check_gather(pool, table, values, granule=granule, unit=unit)
    check_destinations("table", table, granule=granule, unit=unit)


_copy = register("moves", "copy_units", mutates=["pool"], check=_check_copy)
_zero = register("moves", "zero_units", mutates=["pool"], check=_check_zero)
_gather = register("moves", "gather_units", mutates=["out"], check=_check_gather)
_scatter = register("moves", "scatter_units", mutates=["pool"], check=_check_scatter)


def copy_units(
    pool: Tensor, source: Tensor, destination: Tensor, *, granule: int, unit: int, impl: str = ""
) -> None:
    """Copy units inside a pool; a unit with an absent source is filled with zeros.

    A unit may be its own destination; no other overlap of the tables is allowed.

    Args:
        pool: raw storage, mutated, `[elements]`.
        source: entries to read, `[units]`, int32.
        destination: entries to write, `[units]`, int32.
        granule: elements of the pool that one entry counts.
        unit: elements of a unit.
        impl: "reference" or "triton"; empty for the device's own.
    """
    check_pool("pool", pool, granule, MOVABLE)
    require(unit > 0, "unit", "positive", unit)
    check_table("source", source, (None,), pool.device)
    check_table("destination", destination, (source.shape[0],), pool.device)
    _copy(pool, source, destination, granule=granule, unit=unit, impl=impl)


def zero_units(pool: Tensor, destination: Tensor, *, granule: int, unit: int, impl: str = "") -> None:
    """Fill units of a pool with zeros.

    Args:
        pool: raw storage, mutated, `[elements]`.
        destination: entries to write, `[units]`, int32.
        granule: elements of the pool that one entry counts.
        unit: elements of a unit.
        impl: "reference" or "triton"; empty for the device's own.
    """
    check_pool("pool", pool, granule, MOVABLE)
    require(unit > 0, "unit", "positive", unit)
    check_table("destination", destination, (None,), pool.device)
    _zero(pool, destination, granule=granule, unit=unit, impl=impl)


def gather_units(
    pool: Tensor, table: Tensor, out: Tensor, *, granule: int, unit: int, impl: str = ""
) -> None:
    """Collect checkpoints: the members of every row of a table, side by side in a dense row. Absent ones are zeros.

    Args:
        pool: raw storage, `[elements]`.
        table: members of every checkpoint, `[rows, members]`, int32.
        out: mutated, `[rows, size]` with members * unit >= size, dtype of `pool`; any stride between rows.
        granule: elements of the pool that one entry counts.
        unit: elements of a member; the last may be used in part.
        impl: "reference" or "triton"; empty for the device's own.
    """
    _check_dense(pool, table, "out", out, granule, unit)
    _gather(pool, table, out, granule=granule, unit=unit, impl=impl)


def scatter_units(
    pool: Tensor, table: Tensor, values: Tensor, *, granule: int, unit: int, impl: str = ""
) -> None:
    """Distribute dense rows over the members of checkpoints; the inverse of `gather_units`.

    Args:
        pool: raw storage, mutated, `[elements]`.
        table: members of every checkpoint, `[rows, members]`, int32; no two may overlap.
        values: `[rows, size]` with members * unit >= size, dtype of `pool`; any stride between rows.
        granule: elements of the pool that one entry counts.
        unit: elements of a member; what a last, partly used member has left keeps its bytes.
        impl: "reference" or "triton"; empty for the device's own.
    """
    _check_dense(pool, table, "values", values, granule, unit)
    _scatter(pool, table, values, granule=granule, unit=unit, impl=impl)


def _check_dense(pool: Tensor, table: Tensor, name: str, dense: Tensor, granule: int, unit: int) -> None:
    check_pool("pool", pool, granule, MOVABLE)
    require(unit > 0, "unit", "positive", unit)
    check_table("table", table, (None, None), pool.device)
    check_tensor(name, dense, (table.shape[0], None), pool.dtype, pool.device)
    least, most = (table.shape[1] - 1) * unit + 1, table.shape[1] * unit
    require(
        least <= dense.shape[1] <= most, f"{name}.shape[1]", f"between {least} and {most}", dense.shape[1]
    )
