"""Where every unit of an organization lies in memory: strides, granules, mapping entries. Declared, never inferred.

Owns addresses as numbers; knows no tensors and no requests. Address of a unit of one layer, in bytes:

    base of the pool + layer * layer_stride + offset + entry * granule

so kernels know neither pages nor slots nor organizations (DESIGN section 6).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from hybridkv.alloc.organization import ALIGNMENT, Organization, Placement, StateKind, round_up
from hybridkv.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

Order = Literal["layer_major", "page_major"]
ENTRIES = 2**31  # what an int32 entry can count


class PoolLayout(NamedTuple):
    """One pool, in bytes. Page `p` of layer `l` lies at p * page_stride + l * layer_stride; `size` is the whole."""

    pages: int
    page_bytes: int
    layers: int
    page_stride: int
    layer_stride: int
    size: int


class Units(NamedTuple):
    """Units of one state kind, in bytes.

    `total`: units in the pool. `members`: those of a state in one group. `slots_per_page`, `slot_bytes`: 1 and the page where units are pages.
    `granule`: what an entry counts. `offset`: where the payload begins in a unit. `payload`: of all members together.
    """

    pool: str
    total: int
    members: int
    slots_per_page: int
    slot_bytes: int
    page_stride: int
    granule: int
    offset: int
    payload: int

    def entries(self, ids: NDArray[Any]) -> NDArray[np.int32]:
        """Mapping entries of page ids or lines, int32 of the same shape; negative stays absent (I4)."""
        ids = np.asarray(ids)
        page, slot = divmod(ids, self.slots_per_page) if self.slots_per_page > 1 else (ids, 0)
        steps = page * (self.page_stride // self.granule) + slot * (self.slot_bytes // self.granule)
        return np.where(ids < 0, -1, steps).astype(np.int32)


class ArenaLayout(NamedTuple):
    """Every pool and every state kind of an organization."""

    organization: Organization
    order: Order
    pools: dict[str, PoolLayout]
    units: dict[StateKind, Units]

    @classmethod
    def of(
        cls,
        organization: Organization,
        pages: Mapping[str, int],
        *,
        order: Order = "layer_major",
        red_zone: int = 0,
    ) -> ArenaLayout:
        """Lay out `pages` of every pool; `red_zone` bytes behind each page of each layer belong to nobody."""
        if order not in get_args(Order):
            raise UsageError(f"order must be one of {', '.join(get_args(Order))}, got {order!r}")
        if red_zone < 0 or red_zone % ALIGNMENT:
            raise UsageError(f"red_zone must be a multiple of {ALIGNMENT} bytes, got {red_zone}")
        names = [pool.name for pool in organization.pools]
        if sorted(pages) != sorted(names) or min(pages.values()) < 1:
            raise UsageError(f"pages must hold at least one page of each of {names}, got {dict(pages)}")
        pools = {name: _pool(organization, name, pages[name], order, red_zone) for name in names}
        places = organization.placements
        units = {kind: _units(organization, place, pools[place.pool]) for kind, place in places.items()}
        for kind in (StateKind.SSM, StateKind.LIVE):
            if kind in units:
                _check_rows(organization, kind, units[kind])
        return cls(organization, order, pools, units)


def _check_rows(organization: Organization, kind: StateKind, units: Units) -> None:
    """A state is dealt to its members in equal numbers of rows; none may be left over, and a share must fit."""
    g = organization.geometry
    rows, size = g.state_rows, g.live_state_row_bytes if kind is StateKind.LIVE else g.state_row_bytes
    share = -(-rows // units.members)
    if -(-rows // share) != units.members:
        raise UsageError(
            f"members of {kind.value!r} must be {-(-rows // share)} for {rows} rows of {share} to a member, "
            f"got {units.members}"
        )
    tails = [p.offset for p in organization.placements.values() if p.within is kind]
    room = min([units.slot_bytes, *tails]) - units.offset
    if share * size > room:
        raise UsageError(
            f"{share} rows of {size} bytes must fit a member of {kind.value!r}, got {room} bytes"
        )


def _slots(organization: Organization, pool: str) -> list[int]:
    return [p.slot_bytes for p in organization.placements.values() if p.pool == pool and p.slot_bytes]


def _pool(organization: Organization, name: str, pages: int, order: Order, red_zone: int) -> PoolLayout:
    layers, page_bytes = organization.geometry.layers_per_group, organization.pool(name).page_bytes
    inner = page_bytes + red_zone
    stride = inner if order == "layer_major" else layers * inner
    slots = _slots(organization, name)
    granule = math.gcd(stride, *slots)
    if pages * stride // granule >= ENTRIES:  # pages are padded until slots lie on a coarser grid
        stride = round_up(stride, math.lcm(*slots) if slots else 1)
        granule = math.gcd(stride, *slots)
    if pages * stride // granule >= ENTRIES:
        most = ENTRIES * granule
        raise UnsupportedError(
            f"pages of {name!r} must take less than {most} bytes for entries of int32, got {pages * stride}; "
            "a slot_bytes with a larger power of two helps"
        )
    layer_stride = pages * stride if order == "layer_major" else inner
    return PoolLayout(
        pages,
        page_bytes,
        layers,
        stride,
        layer_stride,
        pages * stride * (layers if order == "layer_major" else 1),
    )


def _units(organization: Organization, place: Placement, pool: PoolLayout) -> Units:
    host = organization.placements[place.within] if place.within is not None else place
    if place.offset % ALIGNMENT:
        raise UsageError(f"offset must be a multiple of {ALIGNMENT} bytes, got {place.offset}")
    slots = pool.page_bytes // host.slot_bytes if host.slot_bytes else 1
    return Units(
        pool=place.pool,
        total=pool.pages * slots,
        members=host.pages or 1,
        slots_per_page=slots,
        slot_bytes=host.slot_bytes or pool.page_bytes,
        page_stride=pool.page_stride,
        granule=math.gcd(pool.page_stride, host.slot_bytes),
        offset=place.offset,
        payload=place.payload_bytes,
    )
