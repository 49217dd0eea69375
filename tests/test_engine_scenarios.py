"""Scenarios of `engines.md` section 9 that concern allocation: operation sequences out of public bug reports, and the
right outcome of each. Ids are those of that table; planner scenarios stand elsewhere.
"""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from hybridkv import CachePolicy, CorruptionError, HybridCache, ModelGeometry, Organization, UsageError
from hybridkv.alloc.organization import StateKind
from hybridkv.alloc.plan import Admitted, Extended, Refused
from hybridkv.alloc.requests import Request
from hybridkv.testing import World, tiny_organization
from hybridkv.testing.cache_adapter import CacheSpec, make_cache
from hybridkv.testing.geometries import ORGANIZATIONS


def build(
    name: str = "s2", pages: int | tuple[int, ...] = 64, *, policy: CachePolicy | None = None, **shape: Any
) -> HybridCache:
    organization = tiny_organization(name, **shape)
    counts = (pages,) * len(organization.pools) if isinstance(pages, int) else pages
    named = dict(zip((p.name for p in organization.pools), counts, strict=True))
    return HybridCache(organization, pages=named, policy=policy, check=3)


def counts(cache: HybridCache) -> dict[str, tuple[int, int, int]]:
    return {name: (p.free, p.cached, p.held) for name, p in cache.storage.pools.items()}


def start(cache: HybridCache, name: str, tokens: Iterable[int], **limits: Any) -> tuple[Request, Admitted]:
    r = cache.request(name, list(tokens))
    answer = cache.admit(r, **limits)
    assert isinstance(answer, Admitted), answer
    return r, answer


def serve(cache: HybridCache, name: str, tokens: Iterable[int], chunk: int | None = None) -> int:
    """Run a prompt to its end and release it; how much of it was cached."""
    tokens = list(tokens)
    r, answer = start(cache, name, tokens, budget=chunk)
    cache.commit(r, answer.plan.stop)
    while r.computed < len(tokens):
        step = cache.extend(r, min(len(tokens), r.computed + (chunk or len(tokens))))
        assert isinstance(step, Extended)
        cache.commit(r, step.plan.stop)
    cache.release(r)
    return answer.cached


def prefix(length: int, seed: int = 1) -> list[int]:
    return [seed * 1000 + i for i in range(length)]


# ------------------------------------------------------------------------------- A. a state equals its boundary
def test_a2_a_boundary_passed_inside_a_chunk_is_written_from_inside() -> None:
    """1,866 tokens, then 1,160 more, grid 2,048: never the state of 1,866 under the key of 2,048."""
    cache = build(block_tokens=16, grid_tokens=2048, pages=400)
    r, answer = start(cache, "r", prefix(3026), budget=1866)
    assert answer.plan.writes == ()
    cache.commit(r, 1866)
    step = cache.extend(r, 3026)
    assert isinstance(step, Extended)
    assert [w.position for w in step.plan.writes] == [2048]
    assert step.plan.writes[0].state is not step.plan.destination
    cache.commit(r, 3026)
    assert [c.position for c in cache.index.checkpoints.values()] == [2048]
    assert cache.match(cache.request("again", prefix(3026))).joint == 2048


@pytest.mark.parametrize("drafts", range(17))
def test_a3_drafts_behind_a_chunk_that_ends_on_a_block(drafts: int) -> None:
    """The block of the drafts is reserved before the step, and the step after a rejection starts from st[16]."""
    cache = build(block_tokens=16, grid_tokens=16, policy=CachePolicy(decode="update_shared"))
    r, _ = start(cache, "r", prefix(16))
    cache.commit(r, 16, [7])
    step = cache.extend(r, 17 + drafts)
    assert isinstance(step, Extended)
    assert step.plan.attention.shape[1] >= -(-(17 + drafts) // 16)
    at_16 = next(iter(cache.index.checkpoints.values()))
    assert step.plan.source is at_16
    assert at_16.position == 16
    cache.commit(r, 17, [8])
    following = cache.extend(r, 18)
    assert isinstance(following, Extended)
    assert following.plan.source is step.plan.home(17)
    assert following.plan.source is not at_16


def test_a5_nothing_is_found_before_its_step_is_known_complete() -> None:
    """Step n is with the device, n+1 is planned: nobody hits what n writes. A copy that is pending stays in its plan."""
    cache = build()
    r, _ = start(cache, "r", prefix(4), budget=2)
    assert isinstance(cache.extend(r, 4), Extended)
    other, answer = start(cache, "other", prefix(4))
    assert answer.cached == 0
    cache.commit(r, 2)
    third, answer = start(cache, "third", prefix(4))
    assert answer.cached == 2
    cache.commit(r, 4)
    cache.commit(other, 4)
    cache.commit(third, 4)
    forked = cache.fork(r, "fork")
    assert not isinstance(forked, Refused)
    cache.extend(other, 5)
    cache.commit(other, 5, [1])  # the fork sits this step out
    assert all(copy.destination.min() >= 0 for copy in forked.plan.copies)


def test_a6_waiting_requests_do_not_hit_each_others_plans() -> None:
    cache = build(pages=200)
    _, first = start(cache, "r1", prefix(64))
    _, second = start(cache, "r2", prefix(64))
    _, third = start(cache, "r3", prefix(8, seed=2))
    assert (first.cached, second.cached, third.cached) == (0, 0, 0)


def test_a8_resumes_at_the_deepest_shared_boundary() -> None:
    """ck(100) and ck(200) of one sequence; a request shares 150 tokens and starts from 100."""
    cache = build(block_tokens=50, grid_tokens=100)
    serve(cache, "a", prefix(201))
    _r, answer = start(cache, "b", prefix(150) + prefix(60, seed=3))
    assert answer.cached == 100
    assert answer.plan.source is not None
    assert answer.plan.source.position == 100
    assert answer.plan.attention.shape[1] >= 2
    assert cache.match(cache.request("c", prefix(201))).joint == 200


def test_a14_boundaries_lie_on_the_states_own_grid() -> None:
    """Block 816 and grid 1,648 do not divide; with 824 they do, and the boundaries are those of the grid."""
    with pytest.raises(UsageError, match="grid_tokens must be a multiple of block_tokens"):
        build(block_tokens=816, grid_tokens=1648)
    cache = build(block_tokens=824, grid_tokens=1648)
    _r, answer = start(cache, "r", prefix(5000))
    assert [w.position for w in answer.plan.writes] == [1648, 3296, 4944]
    cut = cache.request("cut", prefix(5000, seed=2))
    admitted = cache.admit(cut, budget=4096, cut=True)
    assert isinstance(admitted, Admitted)
    assert admitted.plan.stop == 1648


# ------------------------------------------------------------------- B. a hit needs every component at one boundary
def test_b1_joint_depth_is_not_the_smaller_of_two_depths() -> None:
    """ck(32) and ck(80), KV evicted from 64 on: joint 32, although attention reaches 64 and the state 80."""
    cache = build(block_tokens=16, grid_tokens=16)
    serve(cache, "a", prefix(97))
    for state in [*cache.index.checkpoints.values()]:
        if state.position not in (32, 80):
            cache.storage.lose(state)
    for block in [*cache.index.blocks.values()]:
        if block.position > 64:
            cache.storage.lose(block)
    assert cache.match(cache.request("again", prefix(97))) == (32, 64, 80)


@pytest.mark.parametrize(("shared", "own", "block"), [(48, 48, 16), (1600, 600, 528)])
def test_b2_a_shared_prefix_pays_off_at_its_third_sighting(shared: int, own: int, block: int) -> None:
    """Only the end is kept: the second sharer learns that attention matched and the state did not, keeps the junction,
    and the third hits it. At full size the boundary below 1,600 is 1,584."""
    cache = build(block_tokens=block, grid_tokens=block, policy=CachePolicy(placement="end_junction"))
    junction = shared // block * block
    hits = []
    for i in range(4):
        prompt = prefix(shared) + prefix(own, seed=10 + i)
        r = cache.request(f"r{i}", prompt)
        found = cache.match(r)
        cache.release(r)
        if i == 1:
            assert (found.joint, found.attention) == (0, junction)
        hits.append(serve(cache, f"r{i}", prompt))
    assert hits == [0, 0, junction, junction]


def test_b3_never_on_attention_alone() -> None:
    cache = build(block_tokens=16, grid_tokens=64)
    serve(cache, "a", prefix(129))
    r = cache.request("b", prefix(63) + prefix(40, seed=2))
    assert cache.match(r) == (0, 0, 0)  # attention is counted on the grid, too: only there could it be used
    answer = cache.admit(r)
    assert isinstance(answer, Admitted)
    assert answer.cached == 0
    assert answer.plan.source is None


def test_b5_a_checkpoint_exists_where_a_resend_resumes() -> None:
    """Only the end is kept, and a resend stops one boundary below it: that one is kept."""
    cache = build(block_tokens=16, grid_tokens=16, policy=CachePolicy(placement="end_only"))
    assert serve(cache, "a", prefix(32)) == 0
    assert serve(cache, "b", prefix(32)) == 16


@pytest.mark.parametrize("length", [32, 48])
@pytest.mark.parametrize("name", ORGANIZATIONS)
def test_b6_the_last_token_is_recomputed(name: str, length: int) -> None:
    cache = build(name, block_tokens=16, grid_tokens=16)
    serve(cache, "a", prefix(length))
    assert serve(cache, "b", prefix(length)) == length - 16


# ------------------------------------------------------------------------- C. ownership: references, leaks, reuse
def test_c1_refused_admissions_leave_no_trace() -> None:
    """The match takes references, admission is refused for lack of pages; a thousand times."""
    world = World(make_cache, CacheSpec(organization="s0", pages=(5,)))
    world.do(("serve", (0, 0), None))
    world.do(("admit", (1, 1), None, None))
    before = world.sut.fingerprint()
    for _ in range(1000):
        r = world.sut.cache.request("r", [0, 0, 0, 0, 1])  # type: ignore[attr-defined]
        assert isinstance(world.sut.cache.admit(r), Refused)  # type: ignore[attr-defined]
        world.sut.cache.release(r)  # type: ignore[attr-defined]
    assert world.sut.fingerprint() == before


def test_c2_aborted_before_the_first_step() -> None:
    cache = build(pages=12)
    serve(cache, "warm", prefix(5))
    before = counts(cache)
    for _ in range(1000):
        r, _ = start(cache, "r", prefix(5))
        cache.release(r)
    assert counts(cache) == before


def test_c3_no_handle_outlives_its_slot() -> None:
    cache = build(pages=12)
    r, _ = start(cache, "r", prefix(5))
    cache.commit(r, 5)
    state = next(iter(cache.index.checkpoints.values()))
    cache.release(r)
    for call in (cache.extend, cache.commit, cache.truncate):
        with pytest.raises(UsageError, match="must be live"):
            call(r, 6)
    with pytest.raises(UsageError, match="handles must name"):
        cache.extend_many(np.array([r.handle]), [6])
    again, _ = start(cache, "r", prefix(5))
    assert again.row == r.row
    assert again.handle != r.handle
    cache.release(again)
    cache.clear()
    with pytest.raises(CorruptionError, match="used after its pages went elsewhere"):
        cache.lease(state)
    assert counts(cache) == {"shared": (12, 0, 0)}


def test_c4_a_second_release_raises() -> None:
    cache = build(pages=12)
    r, _ = start(cache, "r", prefix(5), budget=3)
    cache.release(r)
    before = counts(cache)
    with pytest.raises(UsageError, match="must be live, got 'r', which was released"):
        cache.release(r)
    assert counts(cache) == before


@pytest.mark.parametrize("name", ORGANIZATIONS)
def test_c5_a_pool_full_of_cached_states_admits(name: str) -> None:
    cache = build(name, pages=10)
    for i in range(12):
        serve(cache, f"fill{i}", prefix(5, seed=i + 2))
    assert all(pool.cached for pool in cache.storage.pools.values())
    assert serve(cache, "r", prefix(5, seed=99)) == 0


@pytest.mark.parametrize("name", ORGANIZATIONS)
def test_c9_everything_comes_back(name: str) -> None:
    """200 requests in random chunks with random aborts; after a clear everything is free."""
    rng = random.Random(3)
    cache = build(name, pages=24)
    cache.check = 1
    whole = counts(cache)
    for i in range(200):
        r = cache.request(i, prefix(rng.randrange(1, 12), seed=1 + i % 3))
        answer = cache.admit(r, budget=rng.randrange(1, 5))
        while isinstance(answer, Admitted | Extended) and rng.random() > 0.15:
            cache.commit(r, answer.plan.stop)
            if r.computed == r.length:
                break
            answer = cache.extend(r, min(r.length, r.computed + rng.randrange(1, 5)))
        cache.release(r)
    cache.clear()
    assert counts(cache) == whole
    cache.audit()


def test_c10_id_0_is_ordinary() -> None:
    cache = build("s0", pages=5)
    _r, answer = start(cache, "r", prefix(3))
    assert 0 in answer.plan.attention
    world = World(make_cache, CacheSpec(organization="nested", pages=(4,)))
    world.do(("serve", (0, 0, 1), None))
    world.do(("admit", (0, 0, 1), None, None))
    world.check()
    assert world.live[0].computed == 2


def test_c12_a_column_is_counted_in_its_own_unit() -> None:
    """Blocks of 128 and a grid of 2,176 at position 100,096: the state column is 45, not 781."""
    cache = build(block_tokens=128, grid_tokens=2176, pages=4000)
    r, answer = start(cache, "r", prefix(100_096))
    assert (100_096 - 1) // 2176 == 45
    assert len(answer.plan.writes) == 46
    assert answer.plan.writes[-1].position == 100_096
    assert answer.plan.attention.shape[1] == 782
    assert cache.growth.state_at(r, 100_095) is answer.plan.writes[45].state


# --------------------------------------------------------------------------------------- D, E. absence, capacity
def test_d3_padding_needs_no_slot_and_no_request_twice() -> None:
    """Every slot is live, five requests step and three are parked: nothing of the parked ones is in any plan."""
    cache = build("s2", pages=64, slots=8)
    rs = [start(cache, f"r{i}", prefix(3, seed=i + 1))[0] for i in range(8)]
    for r in rs:
        cache.commit(r, 3, [9])
    answer = cache.extend_many(rs[:5], [4] * 5)
    assert answer.refused == {}
    parked = {int(line) for r in rs[5:] for s in r.states() for line in s.units[StateKind.CONV].ravel()}
    written = [
        int(line)
        for p in answer.plans.values()
        if p.destination
        for line in p.destination.units[StateKind.CONV].ravel()
    ]
    assert parked.isdisjoint(written)
    assert len(written) == len(set(written))
    with pytest.raises(UsageError, match="each request once"):
        cache.extend_many([rs[0], rs[0]], [5, 5])


def test_d5_more_sequences_than_slots_are_refused_with_the_number() -> None:
    cache = build("d0", pages=(512, 161), grid_tokens=4)
    refused = None
    for i in range(256):
        answer = cache.admit(cache.request(i, prefix(3, seed=i + 1)))
        if isinstance(answer, Refused):
            refused = answer
            break
    assert refused is not None
    assert i == 161
    assert (refused.pool, refused.needed, refused.obtainable, refused.never) == ("recurrent", 1, 0, False)
    assert cache.storage.pools["recurrent"].size == 161


@pytest.mark.parametrize("tokens", [3, 6, 9])
@pytest.mark.parametrize("name", ORGANIZATIONS)
def test_e4_capacity_asked_is_capacity_had(name: str, tokens: int) -> None:
    """Uniform requests that share nothing, admitted until refused: as many as the footprint of their states says."""
    cache = build(name, pages=40, grid_tokens=4)
    organization = cache.organization
    blocks, states = -(-tokens // 2), tokens // 4 + (tokens % 4 > 0)

    def fits(count: int) -> bool:
        used = organization.used_pages(attention=blocks * count, checkpoints=states * count)
        return all(used[p] <= 40 for p in used)

    expected = next(n for n in range(200) if not fits(n + 1))
    admitted = 0
    while isinstance(cache.admit(cache.request(admitted, prefix(tokens, seed=admitted + 1))), Admitted):
        admitted += 1
    assert admitted == expected


def test_e5_the_grid_is_a_multiple_of_the_chunk() -> None:
    with pytest.raises(UsageError, match=r"grid_tokens must be a multiple of chunk_tokens \(256\), got 800"):
        build(block_tokens=16, grid_tokens=800, chunk_tokens=256)


# ----------------------------------------------------------------------------------- F. admission and liveness
@pytest.mark.parametrize("name", ORGANIZATIONS)
def test_f1_what_never_fits_is_refused_at_once(name: str) -> None:
    """Alone in the cache, a request runs to its end or is told that it never will; no loop of prefill and requeue."""
    for length in range(1, 24):
        cache = build(name, pages=10)
        r = cache.request("r", prefix(length))
        never = cache.fits(length)
        answer = cache.admit(r, budget=1)
        assert isinstance(answer, Admitted)
        alive = True
        while alive and answer.plan.stop <= length:
            cache.commit(r, answer.plan.stop)
            if r.computed == length:
                break
            answer = cache.extend(r, r.computed + 1)
            alive = isinstance(answer, Extended)
        assert alive == (never is None), f"{length} tokens: fits says {never}"


@pytest.mark.parametrize(("pages", "pool"), [((20, 1), "recurrent"), ((1, 20), "attention")])
def test_f2_every_resource_is_asked_for(pages: tuple[int, int], pool: str) -> None:
    cache = build("d0", pages=pages)
    start(cache, "first", prefix(2))
    answer = cache.admit(cache.request("second", prefix(2, seed=2)))
    assert isinstance(answer, Refused)
    assert answer.pool == pool
    assert counts(cache)[pool] == (0, 0, 1)


def test_f5_a_rollback_too_far_is_refused_and_changes_nothing() -> None:
    cache = build(grid_tokens=4, policy=CachePolicy(decode="update_shared"))
    r, _ = start(cache, "r", prefix(9))
    cache.commit(r, 9)
    before = (counts(cache), r.computed, r.length, r.table.tobytes())
    answer = cache.truncate(r, 3)  # the retained state is that of 8
    assert isinstance(answer, Refused)
    assert (counts(cache), r.computed, r.length, r.table.tobytes()) == before
    answer = cache.truncate(r, 8)
    assert not isinstance(answer, Refused)
    assert (answer.computed, answer.plan.source) == (8, r.source)


def test_f7_a_hit_refreshes_the_state_that_it_used_not_the_path() -> None:
    """Eight slots, LRU. X and Y at 64..256; X is resent, four states arrive, Y and X are resent: both hit 256.

    Here the resend itself takes a running state, so that the scene needs a slot more than the table's eight.
    """
    cache = build("d0", pages=(64, 9), block_tokens=64, grid_tokens=64)
    x, y = prefix(257, seed=1), prefix(257, seed=2)
    serve(cache, "x", x, chunk=64)
    serve(cache, "y", y, chunk=64)
    assert serve(cache, "x again", x) == 256
    for i in range(2):
        serve(cache, f"new{i}", prefix(129, seed=10 + i), chunk=64)
    assert serve(cache, "y again", y) == 256
    assert serve(cache, "x at last", x) == 256


# --------------------------------------------------------------------------------------------------- G. transfer
@pytest.mark.parametrize("preset", ["falcon-h1-7b", "granite-4.0-h-micro", "nemotron-h-8b"])
def test_g2_ranks_have_the_same_page_ids_and_sections_cut_by_themselves(preset: str) -> None:
    """As far as ids go: ranks give the same plans. x is split; B and C are split by group, or replicated."""
    whole = ModelGeometry.preset(preset)
    plans = []
    for _ in range(2):
        cache = HybridCache(Organization.named("s2", whole.shard(2)), pages={"shared": 400})
        r, answer = start(cache, "r", prefix(1300))
        cache.commit(r, 1300)
        states = [w.state.units for w in answer.plan.writes]
        plans.append(
            (answer.plan.attention.tolist(), [{k: u.tolist() for k, u in units.items()} for units in states])
        )
    assert plans[0] == plans[1]
    assert whole.recurrent is not None
    half = whole.shard(2).recurrent
    assert half is not None
    x, b, c = whole.recurrent.conv_sections
    assert half.conv_sections[0] == x // 2
    assert half.conv_sections[1:] in ((b // 2, c // 2), (b, c))


def test_g3_a_leased_state_is_not_reused_before_its_copy_ends() -> None:
    cache = build("s0", pages=5)
    serve(cache, "a", prefix(3))
    state = next(iter(cache.index.checkpoints.values()))
    cache.lease(state)
    page = int(state.units[StateKind.SSM].ravel()[0])
    for i in range(6):
        r = cache.request(i, prefix(3, seed=i + 5))
        answer = cache.admit(r)
        if isinstance(answer, Admitted):
            taken = {int(u) for s in r.states() for _, ids in s for u in ids.ravel()} | set(
                answer.plan.attention.ravel().tolist()
            )
            assert page not in taken
            cache.commit(r, 3)
        cache.release(r)
    cache.end_lease(state)
    with pytest.raises(UsageError, match="state must be leased"):
        cache.end_lease(state)
    cache.clear()
    assert counts(cache) == {"shared": (5, 0, 0)}


def test_g4_each_role_is_conserved_with_its_own_size() -> None:
    """Two roles with 64 and 96 state slots are two caches; neither audit knows the other's size."""
    for slots in (64, 96):
        cache = build("d0", pages=(256, slots))
        r, _ = start(cache, "r", prefix(7))
        cache.commit(r, 7)
        cache.audit()
        free, cached, held = counts(cache)["recurrent"]
        assert free + cached + held == slots
