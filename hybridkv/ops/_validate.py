"""What every op checks before a launch.

Two kinds. Shapes, dtypes, strides and devices are checked by the public functions, which `torch.compile` traces, so
compiled code pays nothing. Values (ids in range, destinations that alias) are checked by the `check` of `register`,
and for tables on a CPU only: reading a table back from a GPU would stall it. An engine has its tables on the host
before they travel, and checks them there.

Messages read "<name> must be <expected>, got <actual>".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybridkv.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from hybridkv.kv_layout import KVLayout

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes; one 128-bit access
HEAD_DIMS = (16, 32, 64, 128, 256)


def require(ok: bool, name: str, expected: object, actual: object) -> None:
    """Raise `UsageError` unless `ok`."""
    if not ok:
        raise UsageError(f"{name} must be {expected}, got {actual}")


def support(ok: bool, name: str, expected: object, actual: object) -> None:
    """Raise `UnsupportedError` unless `ok`."""
    if not ok:
        raise UnsupportedError(f"{name} must be {expected}, got {actual}")


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check a tensor's shape (None: any extent), dtype and device, and that its last axis is contiguous."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    require(tensor.dtype in dtypes, f"{name}.dtype", " or ".join(map(str, dtypes)), tensor.dtype)
    require(tensor.device == device, f"{name}.device", device, tensor.device)
    fits = tensor.dim() == len(shape)
    for actual, expected in zip(tensor.shape, shape, strict=False):
        fits = fits and expected in (None, actual)
    words = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    require(fits, f"{name}.shape", words, list(tensor.shape))
    if shape and tensor.shape[-1] > 1:
        require(tensor.stride(-1) == 1, f"{name}.stride(-1)", 1, tensor.stride(-1))


def check_table(name: str, table: Tensor, shape: tuple[int | None, ...], device: torch.device) -> None:
    """Check a mapping table, or any other list of indices: int32 on the pool's device."""
    check_tensor(name, table, shape, torch.int32, device)


def check_pool(
    name: str, pool: Tensor, granule: int, dtype: torch.dtype | tuple[torch.dtype, ...] = FLOATS
) -> None:
    """Check raw storage (one-dimensional, typed) and that entries of `granule` elements keep it aligned."""
    check_tensor(name, pool, (None,), dtype, pool.device)
    size = granule * pool.element_size()
    require(
        granule > 0 and size % ALIGNMENT == 0,
        "granule",
        f"a positive multiple of {ALIGNMENT} bytes",
        f"{size} bytes",
    )


def check_aligned(name: str, elements: int, pool: Tensor) -> None:
    """Check that an offset, stride or extent in elements of `pool` keeps 128-bit accesses aligned."""
    size = elements * pool.element_size()
    require(
        elements >= 0 and size % ALIGNMENT == 0, name, f"a multiple of {ALIGNMENT} bytes", f"{size} bytes"
    )


def check_layout(pool: Tensor, layout: KVLayout) -> None:
    """Check the description of an attention block against the pool that holds it."""
    check_pool("pool", pool, layout.granule)
    support(layout.head_dim in HEAD_DIMS, "layout.head_dim", f"one of {HEAD_DIMS}", layout.head_dim)
    require(layout.kv_heads > 0, "layout.kv_heads", "positive", layout.kv_heads)
    require(layout.block_tokens > 0, "layout.block_tokens", "positive", layout.block_tokens)
    check_aligned("layout.token_stride", layout.token_stride, pool)
    check_aligned("layout.head_stride", layout.head_stride, pool)
    check_aligned("layout.value_offset", layout.value_offset, pool)


def check_base(name: str, pool: Tensor) -> None:
    """Check the address of a pool. For a `check`, since a traced tensor has none."""
    require(
        pool.data_ptr() % ALIGNMENT == 0, f"{name}.data_ptr()", f"a multiple of {ALIGNMENT}", pool.data_ptr()
    )


def check_ids(name: str, ids: Tensor, limit: int) -> None:
    """Check that indices lie below `limit`. Negative ones are absent. Values on a GPU are not read."""
    if ids.device.type == "cpu" and ids.numel():
        highest = int(ids.max())
        require(highest < limit, name, f"below {limit}", highest)


def check_entries(name: str, table: Tensor, pool: Tensor, *, granule: int, unit: int) -> None:
    """Check that units of `unit` elements at the entries of a table lie inside the pool."""
    check_ids(name, table, max(0, pool.numel() - unit) // granule + (pool.numel() >= unit))


def check_destinations(
    name: str, table: Tensor, *, granule: int, unit: int, source_name: str = "", source: Tensor | None = None
) -> None:
    """Check that no two destinations overlap, and that none overlaps a source of another row.

    A source equal to the destination in the same place of its table is the in-place case and allowed. In tables of
    one shape, a source whose destination is absent is not read.
    """
    if table.device.type != "cpu":
        return
    apart = -(-unit // granule)  # entries that one unit covers
    flat = table.reshape(-1).to(torch.int64)
    where = torch.nonzero(flat >= 0).reshape(-1)
    used, order = flat[where].sort()
    close = torch.nonzero(used[1:] - used[:-1] < apart).reshape(-1)
    if close.numel():
        pair = used[close[0] : close[0] + 2].tolist()
        raise UsageError(
            f"{name} must be at least {apart} entries apart from each other, got {pair[0]} and {pair[1]}"
        )
    if source is None or not used.numel():
        return
    read = source.reshape(-1).to(torch.int64)
    if source.shape == table.shape:
        read = torch.where(flat < 0, -1, read)
    for step in (-1, 0):  # the destination below and the one above each source
        near = (torch.searchsorted(used, read, right=step < 0) + step).clamp(0, used.numel() - 1)
        own = (where[order[near]] == torch.arange(read.numel())) & (used[near] == read)
        clash = torch.nonzero((read >= 0) & ((used[near] - read).abs() < apart) & ~own).reshape(-1)
        if clash.numel():
            at = int(clash[0])
            raise UsageError(
                f"{name} must be disjoint from {source_name}, got {int(used[near[at]])} against {int(read[at])}; only "
                "a unit's own source may be its destination"
            )
