"""Bytes behind pools: every unit has its own, entries find them, moves touch nothing else, red zones tell."""

import itertools

import numpy as np
import pytest
import torch

from hybridkv import ModelGeometry, Organization, UnsupportedError, UsageError
from hybridkv.alloc.builders import BUILDERS
from hybridkv.alloc.checkpoint import Checkpoint, State
from hybridkv.alloc.organization import Placement, Pool, StateKind
from hybridkv.alloc.plan import Copy
from hybridkv.arena import Arena, ArenaLayout
from hybridkv.arena.arena import POISON
from hybridkv.testing.toy_hybrid import (
    ATTENTION,
    CONV,
    LIVE,
    ORGANIZATIONS,
    SSM,
    WINDOW,
    toy_geometry,
    toy_organization,
)

ORDERS = ("layer_major", "page_major")


def toy(name="s2", *, order="layer_major", pages=7, red_zone=0, layers=(2, 4), **changes):
    o = toy_organization(name, toy_geometry(layers=layers, **changes))
    return Arena(o, {p.name: pages for p in o.pools}, order=order, red_zone=red_zone, poison=True)


def every_unit(arena, kind):
    """All ids of a kind, in order."""
    return np.arange(arena.layout.units[kind].total, dtype=np.int32)


def written(arena):
    """Bytes that are poison no more."""
    return sum(int((arena._pages(name) != POISON).sum()) for name in arena._storage)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ORGANIZATIONS)
def test_units_of_all_layers_tile_the_pool(name, order):
    """Address = base + layer offset + entry * granule (DESIGN section 6), for whole pages and for slots."""
    arena = toy(name, order=order, red_zone=48)
    for pool, layout in arena.layout.pools.items():
        seen = torch.zeros_like(arena._storage[pool], dtype=torch.int32)
        for layer, page in itertools.product(range(layout.layers), range(layout.pages)):
            start = arena.red_zone + layer * layout.layer_stride + page * layout.page_stride
            seen[start : start + layout.page_bytes] += 1
        assert seen.max() == 1
        assert int(seen.sum()) == layout.layers * layout.pages * layout.page_bytes
    for kind, units in arena.layout.units.items():
        layout = arena.layout.pools[units.pool]
        entries = arena.entries(kind, every_unit(arena, kind))
        assert len(set(entries.tolist())) == len(entries)
        for layer in range(layout.layers):
            view = arena.view(kind, layer, torch.uint8)
            for unit, entry in enumerate(entries.tolist()):
                page, slot = divmod(unit, units.slots_per_page)
                expected = layer * layout.layer_stride + page * layout.page_stride + slot * units.slot_bytes
                at = view.storage_offset() + entry * units.granule
                assert at == arena.red_zone + expected + units.offset
                assert entry * units.granule + units.slot_bytes - units.offset <= view.numel()


def test_absent_stays_absent():
    """I4: negative ids are absent, page 0 and line 0 are ordinary."""
    units = toy("s2").layout.units[CONV]
    assert units.slots_per_page == 4
    assert units.entries(np.array([-1, 0, 5, -7], np.int32)).tolist() == [-1, 0, 5, -1]
    nested = toy("nested").layout.units[ATTENTION]
    step, slot = nested.page_stride // nested.granule, nested.slot_bytes // nested.granule
    assert nested.entries(np.array([[3], [-1]], np.int32)).tolist() == [[step + slot], [-1]]


def published():
    """Every organization of every preset; a model without one of its parts has no D0."""
    for model, name in itertools.product(ModelGeometry.preset_names(), BUILDERS):
        g = ModelGeometry.preset(model)
        if name != "d0" or (g.attention and g.recurrent):
            yield pytest.param(Organization.named(name, g), id=f"{model}-{name}")


@pytest.mark.parametrize("o", list(published()))
def test_every_model_fits_entries_of_int32(o):
    """100 GiB of any published model in any organization: aligned granules, entries below 2^31."""
    pages = o.pages(100 << 30, layers="all")
    for order in ORDERS:
        layout = ArenaLayout.of(o, pages, order=order)
        for units in layout.units.values():
            pool = layout.pools[units.pool]
            assert units.granule % 16 == 0 and pool.page_stride % units.granule == 0
            last = np.array([units.total - 1])
            entry = int(units.entries(last)[0])
            assert 0 <= entry < 2**31
            assert entry * units.granule + pool.page_bytes <= pool.pages * pool.page_stride + pool.page_bytes


def test_lines_of_s2_are_those_of_the_paper():
    """Line 16 p + s of a 32-KiB slot: the entry itself."""
    o = Organization.named("s2", ModelGeometry.preset("falcon-h1-7b"))
    units = ArenaLayout.of(o, {"shared": 254}).units
    assert units[CONV].granule == 32 * 1024
    assert units[CONV].entries(np.array([16 * 5 + 3])).tolist() == [83]
    assert units[SSM].entries(np.array([5])).tolist() == [5]


def test_pages_are_padded_where_entries_would_not_fit():
    g = toy_geometry()
    places = dict(toy_organization("nested", g).placements)
    places[ATTENTION] = Placement(pool="shared", payload_bytes=2048, slot_bytes=2064)
    o = Organization(
        name="odd", geometry=g, pools=(Pool(name="shared", page_bytes=4352),), placements=places,
        block_tokens=16, grid_tokens=32,
    )  # fmt: skip
    assert ArenaLayout.of(o, {"shared": 100}).units[ATTENTION].granule == 16
    padded = ArenaLayout.of(o, {"shared": 10**7})
    assert padded.units[ATTENTION].granule == 2064
    assert padded.pools["shared"].page_stride == 3 * 2064
    with pytest.raises(
        UnsupportedError, match=r"pages of 'shared' must take less than \d+ bytes for entries of int32"
    ):
        ArenaLayout.of(o, {"shared": 10**9})


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ORGANIZATIONS)
def test_what_is_written_is_read_and_nothing_else_changes(name, order, impl):
    layers = (1, 1) if impl == "triton" else (2, 4)
    arena = toy(name, order=order, red_zone=32, layers=layers, pages=14)
    rng = np.random.default_rng(3)
    o = arena.organization
    g = o.geometry
    total, values = 0, {}
    pools = {pool.name: rng.permutation(14).astype(np.int32) for pool in o.pools}
    for kind in (ATTENTION, SSM, CONV, WINDOW):
        place = o.placements[kind]
        groups = g.attention_groups if kind is ATTENTION else g.recurrent_groups
        count = groups * arena.members(kind)
        if place.within is None:
            spp = arena.layout.units[kind].slots_per_page
            pages, pools[place.pool] = pools[place.pool][:count], pools[place.pool][count:]
            ids = (pages * spp + spp - 1).reshape(groups, -1)
        else:
            ids = values[place.within][0]
        new = torch.randn(g.layers_per_group, groups, arena.cut(kind).size).to(arena.dtype(kind))
        arena.write(kind, ids, new, impl)
        values[kind] = ids, new
        total += new.numel() * new.element_size()
    for kind, (ids, new) in values.items():
        assert torch.equal(arena.read(kind, ids, impl=impl), new)
    assert arena.violations() == []
    spare = sum(int((new.view(torch.uint8) == POISON).sum()) for _, new in values.values())
    assert written(arena) == total - spare


def test_copies_of_a_plan_move_whole_units_in_every_layer():
    arena = toy("s2", layers=(2, 2))
    ssm, conv = np.array([[0, 1, 2]], np.int32), np.array([[12], [13]], np.int32)
    arena.write(SSM, ssm, torch.randn(2, 1, arena.cut(SSM).size).to(torch.bfloat16))
    arena.write(CONV, conv, torch.randn(2, 2, arena.cut(CONV).size).to(torch.bfloat16))
    copies = (
        Copy(SSM, np.array([0, 1, 2], np.int32), np.array([6, 4, 5], np.int32)),
        Copy(CONV, np.array([12, 13], np.int32), np.array([15, 14], np.int32)),
    )
    arena.copy(copies)
    assert torch.equal(arena.read(SSM, np.array([[6, 4, 5]], np.int32)), arena.read(SSM, ssm))
    assert torch.equal(arena.read(CONV, np.array([[15], [14]], np.int32)), arena.read(CONV, conv))


def test_running_states_of_another_dtype_are_converted():
    arena = toy("s1", live_state_dtype="fp32", layers=(1, 1), pages=12)
    retained = Checkpoint(32, {SSM: np.array([[0, 1, 2]], np.int32), CONV: np.array([[3]], np.int32)})
    running = State(32, {LIVE: np.array([[4, 6, 5]], np.int32), CONV: np.array([[10]], np.int32)})
    state = torch.randn(1, 1, arena.cut(SSM).size)
    arena.write(LIVE, running.units[LIVE], state)
    arena.convert([(running, retained)])
    assert torch.equal(arena.read(SSM, retained.units[SSM]), state.bfloat16())
    arena.convert([(retained, running)])
    assert torch.equal(arena.read(LIVE, running.units[LIVE]), state.bfloat16().float())


def test_red_zones_tell_who_wrote_outside():
    arena = toy("s1", red_zone=16)
    assert arena.violations() == []
    page = arena.layout.pools["shared"].page_bytes
    arena._storage["shared"][16 + page + 3] = 1
    assert arena.violations() == [f"shared: bytes {16 + page + 3} to {16 + page + 3}"]


def test_a_block_of_two_widths_has_no_kv_layout():
    g = ModelGeometry.preset("falcon-h1-7b")
    layout = Arena(Organization.named("s2", g), {"shared": 1}).kv_layout
    assert (layout.kv_heads, layout.head_dim, layout.block_tokens, layout.value_offset) == (
        2,
        128,
        512,
        512 * 256,
    )
    mla = g.replace(attention=None).replace(
        attention=g.attention.__class__(layers=44, kv_heads=1, key_dim=512, value_dim=64)
    )
    with pytest.raises(UnsupportedError, match=r"key_dim and value_dim must be equal .* got \(512, 64\)"):
        _ = Arena(Organization.named("s1", mla), {"shared": 1}).kv_layout


REFUSED = [
    (lambda: toy(order="row_major"), "order must be one of layer_major, page_major, got 'row_major'"),
    (lambda: toy(red_zone=8), "red_zone must be a multiple of 16 bytes, got 8"),
    (lambda: toy(pages=0), r"pages must hold at least one page of each of \['shared'\], got {'shared': 0}"),
    (lambda: Arena(toy().organization, {"other": 3}), "pages must hold at least one page of each"),
    (lambda: toy().view(SSM, 2), r"layer must be in 0..1 \(layers of a group\), got 2"),
    (lambda: toy().view(LIVE, 0), "kind must be one of attention, ssm, conv, window in s2, got "),
    (lambda: toy().read(SSM, np.zeros((1, 2), np.int32)), r"ids must have 3 members of 'ssm', got \(1, 2\)"),
    (lambda: toy().read(SSM, np.array([[0, 1, 7]], np.int32)), "ids of 'ssm' must be below 7, got 7"),
    (
        lambda: toy().copy([Copy(CONV, np.array([0]), np.array([28]))]),
        "ids of 'conv' must be below 28, got 28",
    ),
    (
        lambda: ArenaLayout.of(placed(SSM, pages=6), {"shared": 2}),
        "members of 'ssm' must be 3 for 3 rows of 1 to a member, got 6",
    ),
    (
        lambda: ArenaLayout.of(placed(SSM, pages=2, offset=1408), {"shared": 2}),
        "2 rows of 512 bytes must fit a member of 'ssm', got 896 bytes",
    ),
    (
        lambda: ArenaLayout.of(placed(CONV, pages=1, offset=8), {"shared": 2}),
        "offset must be a multiple of 16 bytes, got 8",
    ),
]


def placed(kind, **where):
    o = toy_organization("s1", toy_geometry())
    places = dict(o.placements)
    places[kind] = Placement(**{"pool": "shared", "payload_bytes": places[kind].payload_bytes} | where)
    return Organization(
        name="mine", geometry=o.geometry, pools=o.pools, placements=places, block_tokens=16, grid_tokens=32
    )


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_wrong_use_is_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_kinds_have_their_dtypes():
    arena = toy("s1", live_state_dtype="fp32", kv_dtype="fp16")
    assert [arena.dtype(k) for k in StateKind] == [
        torch.float16, torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16,
    ]  # fmt: skip
