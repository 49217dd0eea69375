"""The bytes: one tensor behind every pool of an organization, and typed views of it for the ops.

Owns storage and its layout. Does not know requests, or what a unit holds; `alloc` says which unit is whose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hybridkv import ops
from hybridkv.alloc.organization import Organization, StateKind
from hybridkv.arena.layout import ArenaLayout, Order, Units
from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.kv_layout import KVLayout
from hybridkv.units import piece_elements

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from hybridkv.alloc.checkpoint import State
    from hybridkv.alloc.plan import Copy

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
POISON, RED = 0xFF, 0xA5  # NaN in every float type; and what red zones hold


class Cut(NamedTuple):
    """How a payload is dealt to its members, in elements: `unit` to each, `size` in all."""

    unit: int
    size: int


class Arena:
    """Storage of `pages` pages of every pool, for all layers, and what the ops need to know about it.

    `order`: whether pages of one layer are neighbours (`layer_major`) or the layers of one page (`page_major`).
    Uninitialised, unless `poison` fills it with NaN. `red_zone` bytes behind every page of every layer, and at both
    ends of a pool, hold a pattern that `violations` checks. Both are for tests.
    """

    def __init__(
        self,
        organization: Organization,
        pages: Mapping[str, int],
        *,
        device: torch.device | str = "cpu",
        order: Order = "layer_major",
        red_zone: int = 0,
        poison: bool = False,
    ) -> None:
        self.organization, self.red_zone = organization, red_zone
        self.layout = ArenaLayout.of(organization, pages, order=order, red_zone=red_zone)
        self.device = torch.device(device)
        self._storage = {
            name: torch.empty(pool.size + 2 * red_zone, dtype=torch.uint8, device=self.device)
            for name, pool in self.layout.pools.items()
        }
        if poison or red_zone:
            for name in self._storage:
                self._storage[name].fill_(RED if red_zone else POISON)
                if red_zone:
                    self._pages(name).fill_(POISON)

    # ------------------------------------------------------------------------------------- what ops are given
    def view(self, kind: StateKind, layer: int, dtype: torch.dtype | None = None) -> Tensor:
        """Raw storage of one state kind in layer `layer` of its group, `[elements]`, as the ops take it."""
        units = self._units(kind)
        pool = self.layout.pools[units.pool]
        if not 0 <= layer < pool.layers:
            raise UsageError(f"layer must be in 0..{pool.layers - 1} (layers of a group), got {layer}")
        start = self.red_zone + layer * pool.layer_stride + units.offset
        end = start - units.offset + (pool.pages - 1) * pool.page_stride + pool.page_bytes
        return self._storage[units.pool][start:end].view(dtype or self.dtype(kind))

    def dtype(self, kind: StateKind) -> torch.dtype:
        """Element type of a state kind. A window holds inputs of the convolution's type."""
        g = self.organization.geometry
        name = {
            StateKind.ATTENTION: g.kv_dtype,
            StateKind.SSM: g.state_dtype,
            StateKind.LIVE: g.live_state_dtype or g.state_dtype,
        }.get(kind, g.conv_dtype)
        return DTYPES[name]

    def entries(self, kind: StateKind, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Mapping entries of page ids or lines, int32 of the same shape."""
        return self._units(kind).entries(ids)

    def members(self, kind: StateKind) -> int:
        """Units of one state of this kind in one group: columns of its tables."""
        return self._units(kind).members

    def granule(self, kind: StateKind) -> int:
        """Elements that one entry counts."""
        return self._units(kind).granule // self.dtype(kind).itemsize

    def cut(self, kind: StateKind) -> Cut:
        """How a payload of this kind lies in its members."""
        g, units, itemsize = self.organization.geometry, self._units(kind), self.dtype(kind).itemsize
        if kind in (StateKind.SSM, StateKind.LIVE):
            assert g.recurrent is not None
            size = g.recurrent.state_elements
            return Cut(self.heads_per_member(kind) * (size // g.state_rows), size)
        size = g.conv_bytes // itemsize if kind is StateKind.CONV else units.payload // itemsize
        return Cut(piece_elements(size, units.members, itemsize) if units.members > 1 else size, size)

    def heads_per_member(self, kind: StateKind = StateKind.SSM) -> int:
        """Heads that one member of a state holds; the last may hold fewer."""
        return -(-self.organization.geometry.state_rows // self._units(kind).members)

    @property
    def kv_layout(self) -> KVLayout:
        """Where keys and values lie inside an attention block: token by token, keys before values."""
        spec = self.organization.geometry.attention
        if spec is None or spec.key_dim != spec.value_dim:
            dims = None if spec is None else (spec.key_dim, spec.value_dim)
            raise UnsupportedError(f"key_dim and value_dim must be equal for the attention ops, got {dims}")
        granule = self.granule(StateKind.ATTENTION)
        return KVLayout.token_major(spec.kv_heads, spec.key_dim, self.organization.block_tokens, granule)

    # -------------------------------------------------------------------------------------------- whole units
    def copy(self, copies: Iterable[Copy], impl: str = "") -> None:
        """Execute the copies of a plan, whole units in every layer, in order; before anything else of the step."""
        for kind, source, destination in copies:
            units = self._units(kind)
            pairs = [self._table(kind, ids.ravel()) for ids in (source, destination)]
            for layer in range(self.layout.pools[units.pool].layers):
                words, size = self.view(kind, layer, torch.int32), (units.slot_bytes - units.offset) // 4
                ops.copy_units(words, *pairs, granule=units.granule // 4, unit=size, impl=impl)

    def read(
        self, kind: StateKind, ids: NDArray[np.int32], out: Tensor | None = None, impl: str = ""
    ) -> Tensor:
        """Payloads, without what the organization puts around them: `[layers of a group, rows, elements]`.

        `ids`: int32 `[..., members]`, one row for each state and group; absent members are zeros.
        """
        layers, cut = self.organization.geometry.layers_per_group, self.cut(kind)
        rows = self._rows(kind, ids)
        if out is None:
            out = torch.empty(layers, len(rows), cut.size, dtype=self.dtype(kind), device=self.device)
        table = self._table(kind, rows)
        for layer in range(layers):
            ops.gather_units(
                self.view(kind, layer),
                table,
                out[layer],
                granule=self.granule(kind),
                unit=cut.unit,
                impl=impl,
            )
        return out

    def write(self, kind: StateKind, ids: NDArray[np.int32], values: Tensor, impl: str = "") -> None:
        """The inverse of `read`. Bytes of a unit that are not payload keep what they hold."""
        table = self._table(kind, self._rows(kind, ids))
        for layer in range(self.organization.geometry.layers_per_group):
            pool, granule = self.view(kind, layer), self.granule(kind)
            ops.scatter_units(
                pool, table, values[layer], granule=granule, unit=self.cut(kind).unit, impl=impl
            )

    def convert(self, pairs: Iterable[tuple[State, State]], impl: str = "") -> None:
        """Write each first state's recurrent part to the second one in that one's dtype: running from retained, or back."""
        for pair in pairs:
            source, target = (StateKind.LIVE if StateKind.LIVE in s.units else StateKind.SSM for s in pair)
            values = self.read(source, pair[0].units[source], impl=impl).to(self.dtype(target))
            self.write(target, pair[1].units[target], values, impl)

    def violations(self) -> list[str]:
        """Red zones that something wrote into: `pool: byte` of the first and last of each pool."""
        found: list[str] = []
        for name, storage in self._storage.items() if self.red_zone else ():
            red = torch.ones_like(storage, dtype=torch.bool)
            self._pages(name, red).fill_(False)  # noqa: FBT003  # a value, not a switch
            wrong = torch.nonzero(red & (storage != RED)).ravel()
            if len(wrong):
                found.append(f"{name}: bytes {int(wrong[0])} to {int(wrong[-1])}")
        return found

    # -------------------------------------------------------------------------------------------------- parts
    def _units(self, kind: StateKind) -> Units:
        try:
            return self.layout.units[kind]
        except KeyError:
            known = ", ".join(self.layout.units)
            raise UsageError(
                f"kind must be one of {known} in {self.organization.name}, got {kind!r}"
            ) from None

    def _pages(self, name: str, storage: Tensor | None = None) -> Tensor:
        """Every page of every layer, `[layers, pages, page_bytes]`."""
        pool, storage = self.layout.pools[name], self._storage[name] if storage is None else storage
        strides = (pool.layer_stride, pool.page_stride, 1)
        return storage.as_strided((pool.layers, pool.pages, pool.page_bytes), strides, self.red_zone)

    def _rows(self, kind: StateKind, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        if ids.shape[-1] != self.members(kind):
            raise UsageError(f"ids must have {self.members(kind)} members of {kind.value!r}, got {ids.shape}")
        return ids.reshape(-1, ids.shape[-1])

    def _table(self, kind: StateKind, ids: NDArray[np.int32]) -> Tensor:
        limit = self._units(kind).total
        if ids.size and int(ids.max()) >= limit:
            raise UsageError(f"ids of {kind.value!r} must be below {limit}, got {int(ids.max())}")
        table = torch.from_numpy(self.entries(kind, ids))
        if self.device.type == "cuda":  # from pageable memory the host would wait for the stream
            table = table.pin_memory()
        return table.to(self.device, non_blocking=True)
