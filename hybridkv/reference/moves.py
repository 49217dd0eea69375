"""Batched moves of whole units: copy, zero, gather, scatter. Bytes are carried as they are.

An absent source reads as zeros; an absent destination is skipped.
"""

from collections.abc import Iterator

from torch import Tensor

from hybridkv.reference.common import unit as view


def copy_units(pool: Tensor, source: Tensor, destination: Tensor, *, granule: int, unit: int) -> None:
    """Copy units of `unit` elements inside a pool, from the entries of one table to those of another."""
    for read, write in zip(source.tolist(), destination.tolist(), strict=True):
        if write < 0:
            continue
        if read < 0:
            view(pool, write, granule, unit).zero_()
        else:
            view(pool, write, granule, unit).copy_(view(pool, read, granule, unit))


def zero_units(pool: Tensor, destination: Tensor, *, granule: int, unit: int) -> None:
    """Fill units with zeros."""
    for write in destination.tolist():
        if write >= 0:
            view(pool, write, granule, unit).zero_()


def gather_units(pool: Tensor, table: Tensor, out: Tensor, *, granule: int, unit: int) -> None:
    """Collect the members of every row of a table into one dense row."""
    for row, part, entry in _members(table, out, unit):
        if entry < 0:
            out[row, part].zero_()
        else:
            out[row, part].copy_(view(pool, entry, granule, part.stop - part.start))


def scatter_units(pool: Tensor, table: Tensor, values: Tensor, *, granule: int, unit: int) -> None:
    """Distribute dense rows over the members that a table names."""
    for row, part, entry in _members(table, values, unit):
        if entry >= 0:
            view(pool, entry, granule, part.stop - part.start).copy_(values[row, part])


def _members(table: Tensor, dense: Tensor, unit: int) -> Iterator[tuple[int, slice, int]]:
    """Yield (row, elements of the dense row, entry). The last member may hold less than a unit."""
    for row, entries in enumerate(table.tolist()):
        for member, entry in enumerate(entries):
            yield row, slice(member * unit, min((member + 1) * unit, dense.shape[1])), entry
