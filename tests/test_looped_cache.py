"""KV of looped models through organizations and `HybridCache`: bytes, planes, holes, shared pages, loop policy (D42)."""

import numpy as np
import pytest

from hybridkv import (
    CachePolicy,
    CorruptionError,
    HybridCache,
    ModelGeometry,
    Organization,
    UnsupportedError,
    UsageError,
)
from hybridkv.alloc.organization import Placement, Pool, StateKind
from hybridkv.alloc.plan import Admitted, Extended, Forked, Refused, Truncated
from hybridkv.alloc.planes import PlaneTable, TokenDepths
from hybridkv.geometry import AttentionSpec, LoopLayout, LoopSpec

NAMES = ("s0", "s1", "s2", "striped", "nested")
INDEXED, LAST, SINGLE, FIRST = LoopLayout  # in the order of D42
BYTES = {  # section 8 of the reference: KV bytes of one token by layout
    "ouro-1.4b": {INDEXED: 786_432, LAST: 786_432, FIRST: 393_216, SINGLE: 196_608},
    "ouro-2.6b": {INDEXED: 1_572_864, LAST: 1_572_864, FIRST: 786_432, SINGLE: 393_216},
    "huginn-3.5b": {INDEXED: 1_436_160, LAST: 1_436_160, FIRST: 253_440, SINGLE: 168_960},
}
GIB = {"ouro-1.4b": (3.0, 1.5, 0.75), "ouro-2.6b": (6.0, 3.0, 1.5), "huginn-3.5b": (5.48, 0.97, 0.64)}
TOKENS = 4096


def preset(name, layout):
    return ModelGeometry.preset(
        name, loop_layout=layout, **({"max_loops": 16} if name == "huginn-3.5b" else {})
    )


def small(layout=LAST, *, loops=4, prelude=2, core=4, coda=2, tokens=16):
    """A small looped model whose block is `tokens` tokens and one page a group."""
    loop = LoopSpec(prelude=prelude, core=core, coda=coda, max_loops=loops, layout=layout)
    attention = AttentionSpec(layers=loop.layers, kv_heads=1, key_dim=8, value_dim=8)
    geometry = ModelGeometry(name="small", layers=loop.layers, attention=attention, recurrent=None, loop=loop)
    made = Organization.named("nested", geometry)
    assert made.block_tokens == tokens
    return made


def caches(organization, pages=1000, **policy):
    return HybridCache(organization, pages={"shared": pages}, policy=CachePolicy(**policy), check=3)


def plain(organization, pages):
    """The same blocks in whole pages, one a group."""
    size = organization.block_tokens * organization.geometry.kv_bytes_per_token
    made = Organization(
        name="plain",
        geometry=organization.geometry,
        pools=(Pool(name="shared", page_bytes=size),),
        placements={StateKind.ATTENTION: Placement(pool="shared", payload_bytes=size, pages=1)},
        block_tokens=organization.block_tokens,
        grid_tokens=organization.block_tokens,
    )
    return caches(made, pages)


def run(cache, name, prompt, decoded=0, first=0):
    """A request that prefilled `prompt` tokens and decoded some, with all of its known tokens but the last computed."""
    r = cache.request(name, np.arange(first, first + prompt))
    assert isinstance(cache.admit(r), Admitted)
    cache.commit(r, prompt, [1])
    for _ in range(decoded):
        assert isinstance(cache.extend(r, r.length), Extended)
        cache.commit(r, r.length, [1])
    return r


def held(cache):
    """Units of attention that are held, whether they are pages or slots."""
    return cache.storage.by_kind[StateKind.ATTENTION].held


# ------------------------------------------------------------------------------------------------- bytes and planes
@pytest.mark.parametrize("layout", LoopLayout)
@pytest.mark.parametrize("model", BYTES)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_pages_of_section_8(name, model, layout):
    g = preset(model, layout)
    organization = Organization.named(name, g)
    place = organization.placements[StateKind.ATTENTION]
    blocks = TOKENS // organization.block_tokens
    loop = g.loop
    layers = loop.prelude + loop.planes * loop.core + loop.coda
    assert g.attention_groups * g.layers_per_group == layers

    cache = HybridCache(organization, pages={"shared": 2 * g.attention_groups * blocks}, check=3)
    r = cache.request("r", np.arange(TOKENS))
    plan = cache.admit(r).plan
    assert plan.attention.shape == (g.attention_groups, blocks)
    assert held(cache) == len(np.unique(plan.attention)) == plan.attention.size
    kept = held(cache) * g.layers_per_group * place.payload_bytes
    assert kept == TOKENS * BYTES[model][layout]
    gib = dict(zip((INDEXED, FIRST, SINGLE), GIB[model], strict=True)).get(layout, GIB[model][0])
    assert round(kept / 2**30, 2) == gib
    if place.pages and place.payload_bytes == organization.pools[0].page_bytes:  # no page is partly used
        assert organization.footprint(attention=blocks, checkpoints=0, layers="all") == kept


def test_groups_of_planes_cover_the_table_once():
    for layout in LoopLayout:
        for shape in ({}, {"prelude": 0, "coda": 0}):
            g = small(layout, **shape).geometry
            planes, loop = PlaneTable(g), g.loop
            found = {group for r in range(1, loop.max_loops + 1) for group in planes.groups(r)}
            first = loop.prelude // g.layers_per_group
            assert sorted(found) == list(range(first, first + loop.planes * loop.core // g.layers_per_group))
            for layer in range(loop.prelude, loop.prelude + loop.core):
                for r in range(1, loop.max_loops + 1):
                    assert planes.row(layer, loop.plane_of(r)) // g.layers_per_group in planes.groups(r)
            rows = [planes.row(layer, p) for p in range(loop.planes) for layer in range(loop.layers)]
            assert set(rows) == set(range(loop.attention_layers))
            assert planes.row(loop.layers - 1, loop.planes - 1) == loop.attention_layers - 1
    with pytest.raises(UsageError, match="geometry must be of a looped model, got 'falcon-h1-7b'"):
        PlaneTable(ModelGeometry.preset("falcon-h1-7b"))


def test_fill_copies_the_exit_plane_to_every_deeper_one():
    planes = PlaneTable(small(loops=4).geometry)
    assert planes.fill(7, 4) is None
    for depth in (1, 2, 3):
        fill = planes.fill(7, depth)
        assert (fill.position, fill.source.tolist()) == (7, list(planes.groups(depth)))
        assert fill.destinations.tolist() == [list(planes.groups(r)) for r in range(depth + 1, 5)]
    assert all(PlaneTable(small(layout).geometry).fill(0, 2) is None for layout in (INDEXED, SINGLE, FIRST))
    with pytest.raises(UsageError, match="loop must be 1 to max_loops"):
        planes.fill(0, 5)


# -------------------------------------------------------------------------------------- validity, truncation, identity
def test_a_lost_page_of_one_plane_loses_the_block():
    """I1: one page of the 20 of two blocks is reclaimed, and one block is found less."""
    organization = small(INDEXED, prelude=2, core=4, coda=2, loops=4)
    groups, width = organization.geometry.attention_groups, organization.block_tokens
    assert groups == 10
    cache = plain(organization, 4 * groups - 1)
    r = run(cache, "a", 2 * width + 1)
    cache.release(r)
    again = cache.request("again", np.arange(2 * width + 1))
    assert cache.match(again).attention == 2 * width
    other = cache.request("other", np.arange(1000, 1000 + 2 * width))
    assert isinstance(cache.admit(other), Admitted)  # takes 2 blocks where 2 * groups - 1 pages are free
    assert cache.stats().counters["reclaimed"] == 1
    assert cache.match(again).attention == width
    assert cache.stats().pools["shared"].free == groups - 1


@pytest.mark.parametrize("layout", LoopLayout)
def test_truncation_drops_all_planes(layout):
    organization = small(layout)
    cache, groups, width = (
        caches(organization),
        organization.geometry.attention_groups,
        organization.block_tokens,
    )
    r = run(cache, "a", width // 2, decoded=3 * width)
    assert held(cache) == 4 * groups
    answer = cache.truncate(r, width + 1)
    assert isinstance(answer, Truncated)
    assert answer.plan.attention.shape == (groups, 2)
    assert held(cache) == 2 * groups
    cache.release(r)
    assert held(cache) == 0


def test_states_of_another_loop_policy_are_never_shared():
    """I9: exit policy, number of loops and layout are part of the identity."""

    def keys(organization, **policy):
        return caches(organization, **policy).request("r", np.arange(64)).chain

    base = keys(small())
    assert keys(small()) == base
    others = [
        keys(small(), loop_policy="hazard q=0.5"), keys(small(), loop_policy="hazard q=0.9"),
        keys(small(loops=3)), *(keys(small(layout)) for layout in (INDEXED, SINGLE, FIRST)),
    ]  # fmt: skip
    assert len({chain[0] for chain in (base, *others)}) == 1 + len(others)
    with pytest.raises(UsageError, match="loop_policy must be a string, got 3"):
        CachePolicy(loop_policy=3)


# ---------------------------------------------------------------------------------------------------- holes and depths
def test_a_hole_raises_and_never_shrinks():
    """I7, scenario 7."""
    depths = TokenDepths(small(INDEXED).geometry.loop)
    for position, depth in enumerate((4, 2, 3)):
        for loop in range(1, depth + 1):
            depths.run(position, loop)
        depths.leave(position)
    assert depths.planes(2, 3).tolist() == [1, 1, 1]
    for loop, tokens, hole, got in ((3, 3, 1, 2), (1, 4, 3, 0), (4, 1000, 1, 2)):
        message = rf"I7: position {hole} must have written plane {loop - 1} before loop {loop} .*\(D42\), got {got} loops"
        with pytest.raises(CorruptionError, match=message):
            depths.planes(loop, tokens)
    with pytest.raises(UsageError, match="loop must be 1 to max_loops"):
        depths.run(0, 5)
    depths.cut(1)
    with pytest.raises(CorruptionError, match="position 1 must"):
        depths.planes(1, 3)


def test_last_exited_reads_each_token_at_its_depth():
    depths = TokenDepths(small().geometry.loop)
    for position, depth in enumerate((4, 2, 3)):
        depths.run(position, depth)
    with pytest.raises(CorruptionError, match="position 1 must"):  # it has not left: it may write plane 2 yet
        depths.planes(3, 3)
    for position in range(3):
        depths.leave(position)
    assert [depths.planes(loop, 3).tolist() for loop in range(1, 5)] == [
        [0, 0, 0],
        [1, 1, 1],
        [2, 1, 2],
        [3, 1, 2],
    ]
    depths.fill(1, 2)
    assert depths.planes(4, 3).tolist() == [3, 3, 2]
    assert (depths.uniform(0, 2), depths.uniform(1, 3), depths.uniform(2, 3), depths.uniform(2, 4)) == (
        4,
        0,
        3,
        0,
    )


def test_shared_layouts_read_their_plane():
    for layout, expected in ((SINGLE, [0, 0, 0, 0]), (FIRST, [0, 1, 1, 1])):
        depths = TokenDepths(small(layout).geometry.loop)
        for loop in (1, 2):
            depths.run(0, loop)
        depths.leave(0)
        assert [int(depths.planes(loop, 1)[0]) for loop in range(1, 5)] == expected
    shallow = TokenDepths(small(FIRST).geometry.loop)
    shallow.run(0, 1)
    with pytest.raises(CorruptionError, match="plane 1 before loop 3 reads it"):
        shallow.planes(3, 1)


# ------------------------------------------------------------------------------------------------------ aliased pages
@pytest.mark.parametrize("kind", ["slots", "pages"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_alias_gives_the_deeper_planes_pages_back(kind, depth):
    organization = small()
    cache = caches(organization) if kind == "slots" else plain(organization, 1000)
    planes, width = PlaneTable(organization.geometry), organization.block_tokens
    r = run(cache, "a", width // 2, decoded=2 * width)
    earlier = cache.extend(r, r.length).plan
    before, total, gains = earlier.attention.copy(), held(cache), cache.storage.gains
    cache.commit(r, r.length, [1])
    plan = cache.alias(r, 1, depth)
    assert (earlier.attention == before).all()  # plans are values
    assert cache.storage.gains > gains  # what was refused may fit now
    assert held(cache) == total - (4 - depth) * 2
    for loop in range(1, 5):
        own = planes.groups(min(loop, depth))
        assert (plan.attention[planes.groups(loop), 1] == before[own, 1]).all()
        assert (plan.attention[planes.groups(loop), 0] == before[planes.groups(loop), 0]).all()
    assert (plan.attention[:1] == before[:1]).all() and (plan.attention[-1:] == before[-1:]).all()
    shared = plan.attention[planes.groups(depth), 1]
    assert cache.storage.by_kind[StateKind.ATTENTION].references_of(shared).tolist() == [1, 1]
    with pytest.raises(UsageError, match="block must not be aliased yet, got 1"):
        cache.alias(r, 1, depth)
    cache.release(r)
    assert held(cache) == 0
    cache.audit()


def test_alias_at_full_depth_changes_nothing():
    cache = caches(small())
    r = run(cache, "a", 8, decoded=16)
    before = held(cache)
    cache.alias(r, 0, 4)
    assert held(cache) == before


def test_alias_refuses_what_a_step_or_another_request_may_use():
    organization = small()
    cache, width = caches(organization), organization.block_tokens
    r = run(cache, "a", 2 * width, decoded=width + 1)
    for block in (0, 1, 3, 4, -1):  # published, published, in progress, absent, absent
        with pytest.raises(UsageError, match=rf"block must be in \[2, 3\) .*got {block}"):
            cache.alias(r, block, 2)
    for depth in (0, 5):
        with pytest.raises(UsageError, match="loop must be"):
            cache.alias(r, 2, depth)
    cache.extend(r, r.length)
    with pytest.raises(UsageError, match="must have no step in flight"):
        cache.alias(r, 2, 2)
    cache.abandon(r)
    cache.alias(r, 2, 2)
    for layout in (INDEXED, SINGLE, FIRST):
        other = caches(small(layout))
        with pytest.raises(UnsupportedError, match=r"loop\.layout must be last_exited to alias planes"):
            other.alias(run(other, "a", 8, decoded=16), 0, 2)
    shared = caches(small(), decode="update_shared")
    with pytest.raises(UsageError, match=r"block must be in \[1, 1\)"):
        shared.alias(run(shared, "a", 8, decoded=16), 0, 2)


@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_a_life_with_aliased_blocks(kind):
    """Fork, extend, abandon, truncate into the block, preempt: every page is released once (I2, I5)."""
    organization = small()
    cache = caches(organization) if kind == "slots" else plain(organization, 1000)
    groups, width = organization.geometry.attention_groups, organization.block_tokens
    r = run(cache, "a", 8, decoded=2 * width)
    cache.alias(r, 0, 2)
    cache.alias(r, 1, 1)
    aliased = held(cache)
    assert aliased == 3 * groups - 4 - 6
    fork = cache.fork(r, "b")
    assert isinstance(fork, Forked)
    child = cache.at(fork.request)
    assert held(cache) == aliased + groups  # the block in progress
    cache.extend(child, child.length)
    cache.abandon(child)
    answer = cache.truncate(child, width + 3)  # into block 1, whose planes share one page
    assert isinstance(answer, Truncated)
    copy = answer.plan.copies[0]
    assert len(np.unique(copy.source)) == groups - 6
    assert len(np.unique(copy.destination)) == groups
    assert held(cache) == aliased + groups
    cache.truncate(child, width)  # block 0 stays whole, and shared
    assert held(cache) == aliased
    for _ in range(width + 1):
        cache.extend(child, child.computed + 1)
        cache.commit(child, child.computed + 1, [1])
    cache.preempt(r)
    assert held(cache) == groups - 4 + 2 * groups
    cache.release(child)
    assert held(cache) == 0
    cache.release(r)
    cache.audit()


def test_a_truncation_that_finds_no_page_to_copy_to_is_refused():
    organization = small()
    cache = plain(organization, 2 * organization.geometry.attention_groups)
    r = run(cache, "a", 8, decoded=16)
    cache.alias(r, 0, 2)
    assert cache.stats().pools["shared"].free == 4
    assert isinstance(cache.truncate(r, 5), Refused)
    assert r.computed == 24
    cache.audit()


def test_audit_finds_a_page_that_planes_share_wrongly():
    """I8: an aliased block in progress, and planes that share another page than D42 says."""
    for block, target, source in ((0, [1], [3]), (0, [7], [5]), (0, [9], [8]), (1, [7, 8], [5, 6])):
        cache = plain(small(), 100)
        r = run(cache, "a", 8, decoded=20)
        r.table[target, block] = r.table[source, block]
        with pytest.raises(CorruptionError, match="I8: block"):
            cache.audit()
