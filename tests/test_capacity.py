"""Tables A-1, A-2, B-2, B-3 and the storage identities of arXiv 2610.15755; sizes that organizations derive."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv import ModelGeometry, Organization, UnsupportedError, UsageError
from hybridkv.alloc.builders import BUILDERS
from hybridkv.alloc.capacity import Mix, concurrent_requests, feasible, largest, needs, whole_pages
from hybridkv.alloc.organization import Placement, Pool, StateKind
from tests.conftest import load_golden

KIB, MIB = 1024, 1024**2
PAPER = load_golden("paper_tables")
TABLES, STATEMENTS = PAPER["tables"], PAPER["statements"]
FALCON = ModelGeometry.preset("falcon-h1-7b")
GRANITE = ModelGeometry.preset("granite-4.0-h-micro")
BUDGETS = {name: int(name[1:]) * FALCON.uniform_unit.bytes for name in ("b63", "b83", "b108")}


def org(name, geometry=FALCON, **options):
    return Organization.named(name, geometry, **options)


@pytest.mark.parametrize("row", TABLES["A-1"]["rows"], ids=str)
def test_table_a1_footprints(row):
    attention, checkpoints, slabs, *mib = row
    for name, expected in zip(("s0", "s1", "s2"), mib, strict=True):
        got = org(name).footprint(attention=attention, checkpoints=checkpoints, slabs=slabs)
        assert round(got / MIB, 6) == expected


def test_table_a1_ideal_capacities():
    for name, expected in STATEMENTS["geometry"]["capacity_100mib_mix_1_1"].items():
        o = org(name.lower())
        assert largest(o, Mix(1, 1), whole_pages(o, {"shared": 100 * MIB})) == expected


def test_table_a2_two_pools_fail_where_one_does_not():
    rows = {quantity: (d0, s2) for quantity, d0, s2 in TABLES["A-2"]["rows"]}
    d0, s2 = org("d0"), org("s2")
    half, whole = rows["budget_mib"]
    d0_mix = Mix(rows["attention_objects"][0], rows["recurrent_checkpoints"][0])
    s2_mix = Mix(rows["attention_objects"][1], rows["recurrent_checkpoints"][1])
    d0_pages = whole_pages(d0, {pool: mib * MIB for pool, mib in half.items()})
    s2_pages = whole_pages(s2, {pool: mib * MIB for pool, mib in whole.items()})
    assert (feasible(d0, d0_mix, d0_pages), feasible(s2, s2_mix, s2_pages)) == rows["feasible"]
    assert [n.feasible for n in needs(d0, d0_mix, d0_pages)] == [False, True]
    footprints = (
        d0.footprint(attention=d0_mix.attention, checkpoints=d0_mix.checkpoints) / MIB,
        s2.footprint(attention=s2_mix.attention, checkpoints=s2_mix.checkpoints, slabs=rows["slabs"][1])
        / MIB,
    )
    assert footprints == rows["total_mib"]


@pytest.mark.parametrize("row", TABLES["B-2"]["rows"], ids=lambda row: row[0])
def test_table_b2_budgets_to_pages(row):
    cells = dict(zip(TABLES["B-2"]["columns"], row, strict=True))
    budget = BUDGETS[cells["budget"]]
    assert budget == cells["nominal_bytes"]
    assert org("s0").pages(budget) == {"shared": cells["override_s0"]}
    assert org("s1").pages(budget) == org("s2").pages(budget) == {"shared": cells["override_s2"]}
    d0 = org("d0")
    pages = d0.pages(budget)
    assert pages["attention"] * d0.pool("attention").page_bytes == cells["d0_attention_bytes"]
    assert pages["recurrent"] * d0.pool("recurrent").page_bytes == cells["d0_recurrent_bytes"]
    assert sum(pages[p.name] * p.page_bytes for p in d0.pools) == cells["d0_total_bytes"]
    assert cells["override_s0"] * org("s0").pools[0].page_bytes == cells["s0_bytes"]
    assert cells["override_s2"] * org("s2").pools[0].page_bytes == cells["s1_s2_bytes"]


@pytest.mark.parametrize("row", TABLES["B-3"]["rows"], ids=lambda row: row[0])
def test_table_b3_native_splits(row):
    model, attention, recurrent, attention_bytes, recurrent_bytes = row
    d0 = org("d0", {"Falcon": FALCON, "Granite": GRANITE}[model])
    assert [float(p.share) for p in d0.pools] == [attention, recurrent]
    assert [p.page_bytes for p in d0.pools] == [attention_bytes, recurrent_bytes]
    assert sum(p.share for p in d0.pools) == 1


def test_paper_geometry_of_the_organizations():
    g = STATEMENTS["geometry"]
    s0, s1, s2, d0 = (org(n) for n in ("s0", "s1", "s2", "d0"))
    assert s0.pools[0].page_bytes == g["page_s0_bytes"] == g["page_s0_kib"] * KIB
    assert s1.pools[0].page_bytes == s2.pools[0].page_bytes == g["page_s1_s2_kib"] * KIB
    assert s2.placements[StateKind.SSM].pages == g["ssm_members"]
    assert s2.placements[StateKind.CONV].slot_bytes == g["conv_slot_kib"] * KIB
    assert s2.slots_per_page(s2.checkpoint_parts[1]) == g["slots_per_slab"]
    assert {o.block_tokens for o in (s0, s1, s2)} == {o.grid_tokens for o in (s0, s1, s2)} == {512}
    assert (d0.block_tokens, d0.grid_tokens) == (
        g["d0_attention_block_tokens"],
        g["d0_checkpoint_interval_tokens"],
    )
    one = {n: org(n).footprint(attention=0, checkpoints=1) for n in ("s2", "d0")}
    assert one["s2"] - one["d0"] == g["one_checkpoint_s2_minus_d0_kib"] * KIB
    many = {n: org(n).footprint(attention=0, checkpoints=16, slabs=s) for n, s in (("s2", 1), ("d0", None))}
    assert many["s2"] - many["d0"] == g["sixteen_checkpoints_s2_minus_d0_kib"] * KIB
    assert s0.footprint(attention=1, checkpoints=0) - FALCON.kv_bytes_per_token * 512 == 1045 * KIB
    whole = s0.footprint(attention=0, checkpoints=1, layers="all")
    assert whole == g["recurrent_bytes_per_logical_block_all_layers"]


def test_striped_and_nested_of_falcon():
    striped, nested = org("striped"), org("nested")
    assert striped.pools[0].page_bytes == 519 * KIB
    assert nested.pools[0].page_bytes == 1557 * KIB
    assert nested.slots_per_page(nested.attention_parts[0]) == 97
    assert (nested.block_tokens, nested.grid_tokens) == (16, 512)


@given(st.integers(0, 500), st.integers(0, 500))
def test_storage_formulas(attention, checkpoints):
    """Formulas 1-4, and ours for striped."""
    sizes = {n: org(n).footprint(attention=attention, checkpoints=checkpoints) // KIB for n in BUILDERS}
    slabs = -(-checkpoints // 16)
    assert sizes["s0"] == 1557 * (attention + checkpoints)
    assert sizes["s1"] == 512 * attention + 2048 * checkpoints
    assert sizes["s2"] == 512 * attention + 1536 * checkpoints + 512 * slabs
    assert sizes["s1"] - sizes["s2"] == 512 * (checkpoints - slabs)
    assert sizes["s0"] - sizes["s1"] == 1045 * attention - 491 * checkpoints
    assert sizes["d0"] == 16 * attention + 1557 * checkpoints
    assert sizes["striped"] == 519 * attention + 1557 * checkpoints
    assert sizes["nested"] == 1557 * (-(-attention // 97) + checkpoints)


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 2000))
def test_largest_mix_is_the_last_feasible(attention, checkpoints, pages):
    o = org("s2")
    unit = Mix(attention, checkpoints)
    count = largest(o, unit, {"shared": pages})
    assert feasible(o, unit.times(count), {"shared": pages})
    assert not feasible(o, unit.times(count + 1), {"shared": pages})


def test_granite_units_and_budget():
    """Research note 2.1 and the golden's identities."""
    unit = GRANITE.uniform_unit
    assert (unit.tokens, unit.bytes) == (528, 1_081_344)
    budget = 160 * unit.bytes
    assert budget == STATEMENTS["geometry"]["granite_b160_nominal_bytes"]
    assert org("s2", GRANITE).pages(budget) == {"shared": 330}
    s2 = org("s2", GRANITE)
    assert (s2.block_tokens, s2.placements[StateKind.SSM].pages) == (256, 2)
    assert s2.placements[StateKind.CONV].slot_bytes == 32 * KIB


def test_slab_dumps_of_the_paper():
    for dump in ("original", "extension"):
        d = STATEMENTS["slab_dumps"][dump]
        s1 = org("s1").footprint(attention=0, checkpoints=d["live"])
        s2 = org("s2").footprint(attention=0, checkpoints=d["live"], slabs=d["slabs"])
        assert (s1 - s2) / MIB == d["difference_mib"]
        assert d["slabs"] == math.ceil(d["live"] / 16)


def test_hot_set_pages():
    """Research note 1, finding 4: what 8 shared contexts of 3,072 tokens keep resident."""
    pages = PAPER["derived"]["hot_set_pages_for_3072_shared_tokens_8_contexts"]
    for name in ("s0", "s1", "s2"):
        used = org(name).used_pages(attention=48, checkpoints=48)["shared"]
        assert used == pages[f"{name.upper()}_every_512"]
    assert org("s2").used_pages(attention=48, checkpoints=8)["shared"] == pages["S2_prefix_end_only"]


@pytest.mark.parametrize("model", ModelGeometry.preset_names())
@pytest.mark.parametrize("name", BUILDERS)
def test_every_model_has_every_organization(model, name):
    """Slot size classes, members that do not divide evenly, attention only, recurrent only."""
    g = ModelGeometry.preset(model)
    if name == "d0" and (g.attention is None or g.recurrent is None):
        with pytest.raises(UnsupportedError, match="d0 has one pool"):
            org(name, g)
        return
    o = org(name, g)
    assert o.grid_tokens % o.block_tokens == 0 and o.grid_tokens % g.chunk_tokens == 0
    floor = 4 * g.kv_bytes_per_token * o.block_tokens + 3 * g.composite_bytes
    assert o.footprint(attention=4, checkpoints=3) >= floor
    whole = o.footprint(attention=4, checkpoints=3, layers="all")
    assert whole >= 4 * g.kv_bytes_per_sequence_token * o.block_tokens + 3 * g.recurrent_bytes_per_sequence


def test_fp32_state_doubles_members():
    g = FALCON.replace(state_dtype="fp32")
    assert org("s2", g).placements[StateKind.SSM].pages == 6
    live = org("s2", FALCON.replace(live_state_dtype="fp32"))
    assert live.placements[StateKind.SSM].pages == 3
    assert live.placements[StateKind.LIVE].pages == 6
    assert {p.kind for p in live.live_parts} == {StateKind.LIVE, StateKind.CONV}


def test_shards_keep_page_ids_equal():
    """Tensor parallelism: every rank plans the same pages, so one control plane serves all."""
    for tp in (2, 4):
        o = org("s2", FALCON.shard(tp))
        assert o.pages(BUDGETS["b83"] // tp) == org("s2", FALCON.shard(tp)).pages(BUDGETS["b83"] // tp)
        assert o.block_tokens == 512
    assert org("s2", FALCON.shard(2)).pages(BUDGETS["b83"] // 2) == org("s2").pages(BUDGETS["b83"])


def test_budget_of_the_whole_device():
    assert org("s2").pages(44 * BUDGETS["b83"], layers="all") == {"shared": 254}
    deep = org("s2", GRANITE)
    assert deep.pages(4 * BUDGETS["b83"], layers="all") == deep.pages(BUDGETS["b83"])


def test_concurrent_requests_of_the_paper_size():
    """Section 8.2: about 7.1 blocks and two checkpoints a request; b83 holds 9 / 16 / 18 on S0 / S1 / S2."""
    counts = {n: concurrent_requests(org(n), 3584, org(n).pages(BUDGETS["b83"])) for n in ("s0", "s1", "s2")}
    assert counts == {"s0": 84 // 9, "s1": 254 // 15, "s2": 19}


BASE = {
    "name": "mine",
    "geometry": FALCON,
    "pools": (Pool(name="shared", page_bytes=512 * KIB),),
    "placements": {
        StateKind.ATTENTION: Placement(pool="shared", payload_bytes=512 * KIB, pages=1),
        StateKind.SSM: Placement(pool="shared", payload_bytes=1536 * KIB, pages=3),
        StateKind.CONV: Placement(pool="shared", payload_bytes=21 * KIB, slot_bytes=32 * KIB),
    },
    "block_tokens": 512,
    "grid_tokens": 512,
}


def placed(kind, **place):
    return BASE | {"placements": BASE["placements"] | {kind: Placement(pool="shared", **place)}}


def test_a_seventh_organization_is_a_literal():
    mine = Organization(**BASE)
    assert mine.footprint(attention=16, checkpoints=16) == org("s2").footprint(attention=16, checkpoints=16)


BAD = [
    (
        BASE | {"grid_tokens": 800},
        "grid_tokens must be a multiple of block_tokens .512., got 800; the nearest are 512",
    ),
    (BASE | {"grid_tokens": 0}, "grid_tokens must be at least 1, got 0"),
    (BASE | {"block_tokens": -16}, "block_tokens must be at least 1, got -16"),
    (BASE | {"pools": ()}, "pools must have at least one"),
    (BASE | {"pools": BASE["pools"] * 2}, "different names"),
    (
        BASE | {"pools": (Pool(name="shared", page_bytes=1000),)},
        "page_bytes must be a positive multiple of 16, got 1000",
    ),
    (
        BASE | {"pools": (Pool(name="shared", page_bytes=512 * KIB, share=Fraction(3, 2)),)},
        "shares must sum to at most 1",
    ),
    (
        BASE | {"pools": (Pool(name="shared", page_bytes=512 * KIB, share=Fraction(0)),)},
        "share must be above 0",
    ),
    (
        BASE | {"pools": (Pool(name="other", page_bytes=512 * KIB),)},
        "pool must be one of other, got 'shared'",
    ),
    (
        BASE | {"pools": (Pool(name="shared", page_bytes=256 * KIB),)},
        "a page must not be smaller than a member",
    ),
    (placed(StateKind.SSM, payload_bytes=1536 * KIB, pages=2), "room for 1572864 bytes, got 1048576"),
    (
        placed(StateKind.SSM, payload_bytes=KIB, pages=1),
        "payload_bytes of 'ssm' must be at least 1572864, got 1024",
    ),
    (placed(StateKind.CONV, payload_bytes=21 * KIB), "must name one of pages, slot_bytes and within"),
    (placed(StateKind.CONV, payload_bytes=21 * KIB, slot_bytes=16 * KIB), "room for 21504 bytes, got 16384"),
    (
        placed(StateKind.CONV, payload_bytes=21 * KIB, slot_bytes=33_001),
        "slot_bytes of 'conv' must be a multiple of 16",
    ),
    (
        placed(StateKind.CONV, payload_bytes=21 * KIB, within=StateKind.WINDOW),
        "must lie within a state of the same pool",
    ),
    ({**BASE, "placements": {}}, "placements must hold 'attention': falcon-h1-7b has 524288 bytes of it"),
]


@pytest.mark.parametrize(("literal", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_a_wrong_literal_says_what_is_wrong(literal, message):
    with pytest.raises(UsageError, match=message):
        Organization(**literal)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: org("s3"), "organization must be one of s0, s1, s2, d0, striped, nested, got 's3'"),
        (
            lambda: org("s2").pages(1000),
            "budget_bytes must be at least 524288 for one page of pool 'shared', got 1000",
        ),
        (lambda: org("s2").pages(10**9, layers=3), "layers must be 1 or 'all', got 3"),
        (lambda: org("s2").footprint(attention=-1, checkpoints=0), "attention must be at least 0, got -1"),
        (
            lambda: org("s2").footprint(attention=0, checkpoints=17, slabs=1),
            "slabs must be at least 2 for 17 slots, got 1",
        ),
        (lambda: org("s2").pool("kv"), "pool must be one of shared, got 'kv'"),
        (lambda: org("s2", attention_fraction=".5"), "attention_fraction must be left out for s2"),
        (lambda: org("d0", attention_fraction=1.5), "attention_fraction must be in .0, 1., got 1.5"),
        (lambda: org("s2", grid_tokens=1000), "grid_tokens must be a multiple of block_tokens"),
        (
            lambda: largest(org("s2"), Mix(0, 0), {"shared": 5}),
            "unit must have an attention block or a checkpoint",
        ),
    ],
    ids=range(10),
)
def test_wrong_calls_say_what_is_wrong(call, message):
    with pytest.raises(UsageError, match=message):
        call()
