"""Wrong use of the cache: a typed error that names the value and what was expected, and nothing changes (I6)."""

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
from hybridkv.alloc.policy.placement import Placement
from hybridkv.alloc.rows import IN_FLIGHT

FALCON = ModelGeometry.preset("falcon-h1-7b")
S2 = Organization.named("s2", FALCON)


def make(**policy):
    """A cache with a running, a waiting, a released and a flying request, and something cached."""
    cache = HybridCache(
        S2, pages={"shared": 100}, policy=CachePolicy(**({"decode": "update_shared"} | policy))
    )
    old = cache.request("old", np.arange(1200))
    cache.admit(old)
    cache.commit(old, 1200, [5])
    cache.release(old)
    running = cache.request("running", np.arange(5000, 6000))
    cache.admit(running, upto=700)
    cache.commit(running, 700)
    flying = cache.request("flying", np.arange(9000, 9800))
    cache.admit(flying)
    return cache, {
        "old": old,
        "running": running,
        "flying": flying,
        "waiting": cache.request("waiting", np.arange(600)),
    }


def picture(cache):
    """Everything that can be observed, the reclaim order included."""
    pools = [(p.free_ids(), p.cached_ids(), p.references.tolist()) for p in cache.storage.pools.values()]
    slots = [
        (page, s.free, tuple(s.references))
        for store in cache.storage.slot_pools
        for page, s in store.slabs.items()
    ]
    rows = [
        (r.id, r.status, r.length, r.computed, r.planned, r.blocks, tuple(map(repr, r.states())))
        for r in cache.requests.values()
    ]
    index = (list(map(str, cache.index.blocks.values())), list(map(str, cache.index.checkpoints.values())))
    return pools, slots, rows, index, [cache.rows.ends(r.row) for r in cache.requests.values()]


CALLS = {
    "duplicate live id": (lambda c, r: c.request("running", [1]), "request_id must be new, got 'running', which is running"),
    "duplicate waiting id": (lambda c, r: c.request("waiting", [1]), "got 'waiting', which is waiting"),
    "no tokens": (lambda c, r: c.request("n", []), "token_ids must hold at least one token, got none"),
    "negative token": (lambda c, r: c.request("n", [3, -1]), r"token_ids must be in \[0, 2\*\*31\), got -1 to 3"),
    "token too large": (lambda c, r: c.request("n", [2**31]), r"token_ids must be in \[0, 2\*\*31\), got 2147483648"),
    "token far too large": (lambda c, r: c.request("n", [2**80]), "token_ids must be a flat sequence of integers"),
    "float tokens": (lambda c, r: c.request("n", [1.0, 2.0]), "flat sequence of integers, got 1 dimensions of float64"),
    "text tokens": (lambda c, r: c.request("n", ["a"]), "token_ids must be a flat sequence of integers"),
    "boolean tokens": (lambda c, r: c.request("n", [True]), "flat sequence of integers, got 1 dimensions of bool"),
    "nested tokens": (lambda c, r: c.request("n", [[1], [2]]), "flat sequence of integers, got 2 dimensions"),
    "ragged tokens": (lambda c, r: c.request("n", [[1], [2, 3]]), "token_ids must be a flat sequence of integers"),
    "float salt": (lambda c, r: c.request("n", [1], salt=1.5), "salt must be an integer or None, got 1.5"),
    "text salt": (lambda c, r: c.request("n", [1], salt="t"), "salt must be an integer or None, got 't'; hash a name to an integer"),
    "boolean salt": (lambda c, r: c.request("n", [1], salt=True), "salt must be an integer or None, got True"),
    "tuple salt": (lambda c, r: c.request("n", [1], salt=("a",)), "salt must be an integer or None"),
    "admit twice": (lambda c, r: c.admit(r["running"]), "request 'running' must be waiting, got running"),
    "admit released": (lambda c, r: c.admit(r["old"]), "request must be live, got 'old', which was released"),
    "admit nothing": (lambda c, r: c.admit(r["waiting"], upto=0), r"upto must be in 1..600 \(tokens known\), got 0"),
    "admit too much": (lambda c, r: c.admit(r["waiting"], upto=601), "upto must be in 1..600"),
    "no budget": (lambda c, r: c.admit(r["waiting"], budget=0), "budget must be at least 1, got 0"),
    "extend waiting": (lambda c, r: c.extend(r["waiting"], 5), "request 'waiting' must be running, got waiting"),
    "extend backwards": (lambda c, r: c.extend(r["running"], 700), r"upto must be above 700 \(tokens planned\), got 700"),
    "extend released": (lambda c, r: c.extend(r["old"], 5), "request must be live, got 'old'"),
    "commit waiting": (lambda c, r: c.commit(r["waiting"], 5), "request 'waiting' must be running"),
    "commit without a step": (lambda c, r: c.commit(r["running"], 701), "must have a step in flight, got none; extend first"),
    "commit backwards": (lambda c, r: c.commit(r["flying"], 0), r"computed must be in 1..800 \(end of the step\), got 0"),
    "commit too much": (lambda c, r: c.commit(r["flying"], 801), "computed must be in 1..800"),
    "commit bad token": (lambda c, r: c.commit(r["flying"], 800, [-4]), r"new_tokens must be in \[0, 2\*\*31\), got -4"),
    "commit float token": (lambda c, r: c.commit(r["flying"], 800, [0.5]), "new_tokens must be a flat sequence of integers"),
    "abandon nothing": (lambda c, r: c.abandon(r["running"]), "must have a step in flight, got none"),
    "abandon waiting": (lambda c, r: c.abandon(r["waiting"]), "request 'waiting' must be running"),
    "preempt waiting": (lambda c, r: c.preempt(r["waiting"]), "request 'waiting' must be running"),
    "double release": (lambda c, r: c.release(r["old"]), "request must be live, got 'old', which was released"),
    "foreign request": (lambda c, r: c.release(make()[1]["running"]), "released or belongs to another cache"),
    "fork in flight": (lambda c, r: c.fork(r["flying"], "n"), "must have no step in flight, got 1; commit first"),
    "fork onto a live id": (lambda c, r: c.fork(r["running"], "waiting"), "request_id must be new, got 'waiting'"),
    "fork waiting": (lambda c, r: c.fork(r["waiting"], "n"), "request 'waiting' must be running"),
    "truncate in flight": (lambda c, r: c.truncate(r["flying"], 5), "must have no step in flight"),
    "truncate to nothing": (lambda c, r: c.truncate(r["running"], 0), r"tokens must be in 1..1000 \(tokens known\), got 0"),
    "truncate upwards": (lambda c, r: c.truncate(r["running"], 1001), "tokens must be in 1..1000"),
    "batch names one twice": (lambda c, r: c.extend_many([r["running"]] * 2, [800, 900]), "handles must name each request once"),
    "batch of a waiting one": (lambda c, r: c.extend_many([r["waiting"]], [5]), "handles must name running requests"),
    "batch of a stale handle": (lambda c, r: c.extend_many(np.array([r["old"].handle]), [5]), "handles must name running requests"),
    "batch of no handle": (lambda c, r: c.extend_many(np.array([10**6]), [5]), "handles must name running requests, got .1000000."),
    "batch of a negative": (lambda c, r: c.extend_many(np.array([-1]), [5]), "handles must name running requests"),
    "batch of another length": (lambda c, r: c.extend_many([r["running"]], [800, 900]), "upto must hold 1 positions, got shape"),
    "batch backwards": (lambda c, r: c.extend_many([r["running"]], [10]), "upto must be above .700."),
    "batch commit without steps": (lambda c, r: c.commit_many([r["running"]], [800]), "requests must have a step in flight"),
    "batch commit in part": (lambda c, r: c.commit_many([r["flying"]], [700]), r"computed must be the ends of the steps, \[800\], got \[700\]"),
    "batch commit of another length": (lambda c, r: c.commit_many([r["flying"]], [1, 2]), "computed must hold 1 positions"),
    "batch commit of odd tokens": (lambda c, r: c.commit_many([r["flying"]], [800], [0.5]), "new_tokens must be 1 token ids below"),
    "batch commit of a huge token": (lambda c, r: c.commit_many([r["flying"]], [800], [2**31]), "new_tokens must be 1 token ids below"),
    "unknown handle": (lambda c, r: c.at(77), "handle must name a live request, got 77"),
    "stale handle": (lambda c, r: c.at(r["old"].handle), "handle must name a live request"),
    "lease ended twice": (lambda c, r: c.end_lease(r["running"].source), "state must be leased"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls_are_refused_and_change_nothing(name):
    call, message = CALLS[name]
    cache, requests = make()
    before = picture(cache)
    with pytest.raises(UsageError, match=message):
        call(cache, requests)
    assert picture(cache) == before
    cache.audit()


def test_steps_in_flight_are_bounded():
    cache, requests = make()
    r = requests["running"]
    for i in range(IN_FLIGHT):
        cache.extend(r, 702 + i)
    before = picture(cache)
    for call in (lambda: cache.extend(r, 720), lambda: cache.extend_many([r], [720])):
        with pytest.raises(
            UsageError, match="steps in flight must be at most 8 a request, got one more; commit first"
        ):
            call()
    with pytest.raises(UsageError, match="computed must be 702 while later steps are in flight"):
        cache.commit(r, 701)
    assert picture(cache) == before


def test_a_state_whose_pages_went_elsewhere_cannot_be_used():
    """HK-F4: a stale handle raises; it never reads another's state."""
    cache, requests = make()
    state = next(iter(cache.index.checkpoints.values()))
    cache.clear()
    with pytest.raises(
        CorruptionError, match=r"I3: Checkpoint.* was used after its pages went elsewhere"
    ) as caught:
        cache.lease(state)
    assert caught.value.invariant == "I3"
    assert requests["running"].source.position == 512


BUILDS = [
    (lambda: HybridCache(S2, pages={"shared": 0}), "pages of pool 'shared' must be at least 1, got 0"),
    (lambda: HybridCache(S2, pages={}), r"pages must name the pools \['shared'\], got \[\]"),
    (lambda: HybridCache(S2, pages={"shared": 5, "other": 5}), "pages must name the pools"),
    (lambda: HybridCache(S2, pages={"shared": 5}, check=4), "check must be 0, 1, 2 or 3, got 4"),
    (lambda: CachePolicy(headroom=1), r"headroom must be in \[0, 1\), got 1"),
    (lambda: CachePolicy(headroom=-0.1), r"headroom must be in \[0, 1\), got -0.1"),
    (lambda: CachePolicy(headroom="half"), r"headroom must be a number in \[0, 1\), got 'half'"),
    (lambda: CachePolicy(placement="often"), "placement must be one of every_block, end_only, end_junction"),
    (lambda: CachePolicy(decode="fast"), "decode must be one of replay, update, update_shared, got 'fast'"),
    (
        lambda: HybridCache(S2, pages={"shared": 5}, policy=CachePolicy(placement=Placement(interval_tokens=700))),
        r"interval_tokens must be a multiple of grid_tokens \(512\), got 700",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("build", "message"), BUILDS, ids=range(len(BUILDS)))
def test_wrong_settings_are_refused(build, message):
    with pytest.raises(UsageError, match=message):
        build()


def test_replay_needs_a_window():
    jamba = Organization.named("s2", ModelGeometry.preset("jamba-v0.1"))
    with pytest.raises(
        UnsupportedError, match=r"decode='replay' needs a window, which jamba-v0.1 .s2. has not"
    ):
        HybridCache(jamba, pages={"shared": 50}, policy=CachePolicy(decode="replay"))
