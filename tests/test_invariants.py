"""One short test for each invariant of the design; the kit (`test_kit_*`) checks them everywhere else."""

import re
from typing import Any

import numpy as np
import pytest

from hybridkv import CachePolicy, CorruptionError, HybridCache, ModelGeometry, UsageError
from hybridkv.alloc.organization import StateKind
from hybridkv.alloc.plan import Admitted, Extended, Refused
from hybridkv.alloc.requests import Request
from hybridkv.testing import RULES, World, tiny_organization
from hybridkv.testing.cache_adapter import CacheSpec, make_cache
from hybridkv.testing.geometries import ORGANIZATIONS, tiny_geometry

SIX = pytest.mark.parametrize("name", ORGANIZATIONS)
PROMPT = [1, 2, 3, 4, 5]


def build(name: str = "s2", pages: int = 12, **options: Any) -> HybridCache:
    shape = {
        k: options.pop(k) for k in list(options) if k in ("groups", "members", "slots", "grid_tokens", "live")
    }
    organization = tiny_organization(name, **shape)
    return HybridCache(organization, pages={p.name: pages for p in organization.pools}, check=3, **options)


def run(cache: HybridCache, name: str, tokens: list[int] = PROMPT, salt: str | None = None) -> Request:
    r = cache.request(name, tokens, salt=salt)
    answer = cache.admit(r)
    assert isinstance(answer, Admitted)
    cache.commit(r, len(tokens))
    return r


def everything(cache: HybridCache) -> Any:
    """What can be observed: ids in every list, with their order."""
    pools = [(p.free_ids(), p.cached_ids(), p.references.tolist()) for p in cache.storage.pools.values()]
    slots = [(sorted(s.slabs), s.queue.order(), s.free) for s in cache.storage.slot_pools]
    found = sorted(map(repr, [*cache.index.blocks.values(), *cache.index.checkpoints.values()]))
    return pools, slots, found, [repr(r) for r in cache.requests.values()]


@SIX
def test_i1_a_checkpoint_is_found_whole_or_not_at_all(name: str) -> None:
    """I1: losing any one unit of any state loses the whole state."""
    cache = build(name, groups=(2, 3), pages=60)
    cache.release(run(cache, "a"))
    for state in [*cache.index.checkpoints.values()]:
        kind, units = next(reversed(state.units.items()))
        store = cache.storage.by_kind[kind]
        owner = (
            store.owner(int(units[-1, -1]))
            if kind is StateKind.CONV and name == "s2"
            else store.owners[units[-1, -1]]
        )
        assert owner is state
        cache.storage.lose(owner)
        assert state not in cache.index.checkpoints.values()
    assert cache.match(cache.request("b", PROMPT)).joint == 0


@SIX
def test_i2_every_part_that_a_running_request_needs_is_held(name: str) -> None:
    """I2: a reference on each unit of the hit, the destination and the table; nothing of them can be had."""
    cache = build(name, groups=(2, 3), pages=60)
    cache.release(run(cache, "a"))
    r = cache.request("b", PROMPT)
    assert isinstance(cache.admit(r), Admitted)
    parts = [(StateKind.ATTENTION, r.table[:, : r.blocks]), *(part for state in r.states() for part in state)]
    assert r.source is not None
    for kind, units in parts:
        assert (cache.storage.by_kind[kind].references_of(units.ravel()) > 0).all()
    assert cache.clear() >= 0
    r.source.check()


@SIX
def test_i3_dependants_leave_the_index_before_the_page_goes_elsewhere(name: str) -> None:
    """I3: when somebody else is given a unit, no published state names it; a kept handle of a lost state raises."""
    cache = build(name, pages=4 if name == "d0" else 6)
    old = run(cache, "a", [1, 2, 3])
    state = next(iter(cache.index.checkpoints.values()))
    cache.release(old)
    for i in range(4):
        r = cache.request(i, [10 * i + 20, 7, 8])
        if isinstance(cache.admit(r), Admitted):
            own = {(k, u) for s in r.states() for k, ids in s for u in ids.ravel().tolist()}
            published = {
                (k, u) for s in cache.index.checkpoints.values() for k, ids in s for u in ids.ravel().tolist()
            }
            assert own.isdisjoint(published)
            cache.commit(r, 3)
        cache.release(r)
    assert cache.storage.reclaimed
    with pytest.raises(CorruptionError, match="I3"):
        state.check()


@SIX
def test_i4_page_0_is_ordinary_and_absence_is_negative(name: str) -> None:
    """I4: the first unit handed out is 0 and is hit like any other; what is absent is None or negative."""
    cache = build(name)
    r = cache.request("a", PROMPT)
    answer = cache.admit(r)
    assert isinstance(answer, Admitted)
    assert answer.plan.source is None
    assert answer.plan.window is None
    used = [answer.plan.attention, *(u for w in answer.plan.writes for u in w.state.units.values())]
    assert 0 in np.concatenate([u.ravel() for u in used])
    assert all((u >= 0).all() for u in used)
    cache.commit(r, 5)
    assert cache.match(cache.request("b", PROMPT)).joint == 4


@SIX
def test_i5_free_cached_and_held_add_up(name: str) -> None:
    """I5: from ids; and the audit finds a page that is lost, or counted twice."""
    cache = build(name, pages=20)
    run(cache, "a")
    cache.release(run(cache, "b", [9, 8, 7]))
    for pool in cache.storage.pools.values():
        held = np.flatnonzero(pool.references).tolist()
        assert sorted(pool.free_ids() + pool.cached_ids() + held) == list(range(pool.size))
    pool = next(iter(cache.storage.pools.values()))
    pool._top -= 1
    with pytest.raises(CorruptionError, match="I5"):
        cache.audit()


@SIX
def test_i6_refused_and_failed_calls_change_nothing(name: str) -> None:
    """I6: refusals, misuse, and an abandoned plan leave ids, references and the reclaim order as they were."""
    cache = build(name, pages=6)
    cache.release(run(cache, "a", [1, 2, 3]))
    r = run(cache, "b", [4, 5, 6])
    before = everything(cache)
    long = cache.request("long", list(range(40)))
    assert isinstance(cache.admit(long), Refused)
    cache.release(long)
    assert isinstance(cache.extend(r, 60), Refused)
    for call in (
        lambda: cache.request("b", [1]),
        lambda: cache.commit(r, 3),
        lambda: cache.extend(r, 3),
        lambda: cache.abandon(r),
        lambda: cache.truncate(r, 9),
        lambda: cache.fork(r, "b"),
        lambda: cache.admit(r),
    ):
        with pytest.raises(UsageError):
            call()
    assert everything(cache) == before
    if isinstance(cache.extend(r, 4), Extended):
        cache.abandon(r)
    assert everything(cache) == before


@SIX
def test_i7_written_before_found(name: str) -> None:
    """I7: planned is not found, abandoned is not found, committed is found."""
    cache = build(name)
    r = cache.request("a", PROMPT)
    assert isinstance(cache.admit(r), Admitted)
    probe = cache.request("b", PROMPT)
    assert cache.match(probe) == (0, 0, 0)
    cache.abandon(r)
    assert cache.match(probe) == (0, 0, 0)
    assert isinstance(cache.admit(r), Admitted)
    cache.commit(r, 5)
    assert cache.match(probe).joint == 4


@SIX
def test_i8_what_a_step_writes_is_its_own(name: str) -> None:
    """I8: no unit that the steps of three requests write is shared or published, also after a fork."""
    cache = build(name, pages=30)
    r = run(cache, "a")
    assert not isinstance(cache.fork(r, "fork"), Refused)
    cache.commit(cache.requests["fork"], 6, [1, 2]) if isinstance(
        cache.extend(cache.requests["fork"], 6), Extended
    ) else None
    written: list[tuple[StateKind, int]] = []
    for other in (r, cache.requests["fork"], cache.request("c", PROMPT)):
        step = cache.admit(other) if other.id == "c" else cache.extend(other, other.computed + 1)
        assert isinstance(step, Admitted | Extended)
        first = step.plan.start // 2
        states = {
            id(s): s for s in (step.plan.destination, *(w.state for w in step.plan.writes)) if s is not None
        }
        written += [(k, u) for s in states.values() for k, ids in s for u in ids.ravel().tolist()]
        written += [(StateKind.ATTENTION, u) for u in step.plan.attention[:, first:].ravel().tolist()]
    assert len(written) == len(set(written))
    for kind, unit in written:
        store = cache.storage.by_kind[kind]
        assert int(store.references_of(np.array([unit], np.int32))[0]) == 1


def test_i9_identity_covers_prefix_salt_model_and_numerics() -> None:
    """I9: one key each for every token of the prefix, the salt, the model, dtypes, chunk and decode mode."""
    keys = []
    geometry = tiny_geometry()
    for tokens, salt, organization, policy in (
        (PROMPT, None, tiny_organization("s2"), CachePolicy()),
        ([1, 2, 3, 9, 5], None, tiny_organization("s2"), CachePolicy()),
        ([9, 2, 3, 4, 5], None, tiny_organization("s2"), CachePolicy()),
        (PROMPT, 2, tiny_organization("s2"), CachePolicy()),
        (PROMPT, 1, tiny_organization("s2"), CachePolicy()),
        (PROMPT, None, tiny_organization("s2", live=True), CachePolicy()),
        (PROMPT, None, tiny_organization("s2", chunk_tokens=2), CachePolicy()),
        (PROMPT, None, tiny_organization("s2", window=True), CachePolicy(decode="replay")),
    ):
        cache = HybridCache(organization, pages={"shared": 20}, policy=policy)
        keys.append(cache.request("r", tokens, salt=salt).chain[1])
    assert len(set(keys)) == len(keys)
    same = [
        HybridCache(tiny_organization(n), pages={p.name: 9 for p in tiny_organization(n).pools})
        for n in ORGANIZATIONS
    ]
    assert len({c.request("r", PROMPT).chain[1] for c in same}) == 1  # where states lie is not what they are
    assert geometry.fingerprint != geometry.replace(state_dtype="fp32").fingerprint


@pytest.mark.parametrize("buckets", [1, 5])
def test_i9_a_weak_hash_is_never_trusted(buckets: int) -> None:
    """I9: with one digest for everything, prefixes are still told apart."""
    world = World(make_cache, CacheSpec(organization="s0", pages=(9,), buckets=buckets))
    for tokens in ((0, 0, 0, 0, 1), (1, 1, 0, 0, 1), (0, 0, 1, 1, 1), (0, 0, 0, 0, 1)):
        world.do(("serve", tokens, None))
        world.check()


@SIX
def test_i10_contents_depend_on_the_prefix_only(name: str) -> None:
    """I10, as far as an allocator goes: in any chunks, with a hit, resumed or forked, what a unit holds is its prefix."""
    world = World(make_cache, CacheSpec(organization=name, pages=(24, 24) if name == "d0" else (24,)))
    for operation in (
        ("admit", (0, 0, 1, 1, 0), None, 1),
        ("commit", 0, None, 1),
        ("extend", 0, 3),
        ("commit", 0, None, 1),
        ("preempt", 0),
        ("resume", 0, None),
        ("commit", 0, None, 1),
        ("fork", 0),
        ("round", 1),
        ("round", 0),
    ):
        world.do(operation)
        world.check()
    assert [live.computed for live in world.live] == [7, 7]


@SIX
@pytest.mark.parametrize("length", range(1, 9))
def test_i11_a_resend_hits_its_last_usable_boundary(name: str, length: int) -> None:
    """I11: and never the whole prompt."""
    cache = build(name, pages=30)
    cache.release(run(cache, "a", list(range(length))))
    assert cache.match(cache.request("b", list(range(length)))).joint == (length - 1) // 2 * 2


@SIX
def test_i11_nothing_is_refused_while_enough_is_reclaimable(name: str) -> None:
    cache = build(name, pages=10)
    for i in range(20):
        cache.release(run(cache, str(i), [i + 10 * k for k in range(5)]))


@SIX
def test_i12_the_same_calls_give_the_same_ids(name: str) -> None:
    def once() -> list[str]:
        cache, seen = build(name, pages=10), []
        for i in range(6):
            r = cache.request(i, [1, 2, i % 3, 4, i])
            answer = cache.admit(r, budget=3)
            seen.append(repr(answer))
            if isinstance(answer, Admitted):
                cache.commit(r, answer.plan.stop)
            if i % 2:
                cache.release(r)
        return [re.sub(r"0x[0-9a-f]+", "", text) for text in seen]

    assert once() == once()


def test_every_invariant_is_cited_by_a_rule() -> None:
    assert {i for rule in RULES.values() for i in rule.invariants} == {f"I{n}" for n in range(1, 13)}
    assert ModelGeometry.preset("falcon-h1-7b").fingerprint
