"""Wrong versions of `HybridCache`, one decision each. The kit is good when it refuses every one.

A mutant patches a fresh cache and reads like a bug report. `python -m hybridkv.testing.mutants` prints mutant x rule.
"""

# ruff: noqa: D103, ARG001, ARG005  # a mutant's name is its description, and it keeps the signature it replaces
# Patching is what a mutant is.
# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false
from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hybridkv.alloc.cache import HybridCache
from hybridkv.alloc.checkpoint import Checkpoint, Lifecycle
from hybridkv.alloc.growth import ATTENTION
from hybridkv.alloc.organization import StateKind
from hybridkv.alloc.plan import Copy, Plan, Write
from hybridkv.alloc.policy.placement import NEVER
from hybridkv.alloc.prefix import Found, Match
from hybridkv.testing._explore import PLAIN, PROMPTS, Report, Scope, Shape, explore
from hybridkv.testing._rules import RULES
from hybridkv.testing.cache_adapter import CacheSpec, make_cache

if TYPE_CHECKING:
    from hybridkv.alloc.requests import Request

Change = Callable[[HybridCache], None]

SPECS = {
    "s0": CacheSpec(organization="s0", pages=(5,)),
    "s0 large": CacheSpec(organization="s0", pages=(9,)),
    "s2": CacheSpec(organization="s2", pages=(6,)),
    "s2 large": CacheSpec(organization="s2", pages=(10,)),
    "nested": CacheSpec(organization="nested", pages=(6,)),
    "attention": CacheSpec(organization="s1", pages=(3,), shape=(("groups", (1, 0)),)),
    "groups": CacheSpec(organization="s0", pages=(8,), shape=(("groups", (2, 1)),)),
    "update": CacheSpec(organization="s0", pages=(6,), decode="update"),
    "replay": CacheSpec(
        organization="s0",
        pages=(8,),
        shape=(("window", True), ("chunk_tokens", 2)),
        decode="replay",
    ),
    "replay lines": CacheSpec(
        organization="s1",
        pages=(12,),
        shape=(("window", True), ("chunk_tokens", 2)),
        decode="replay",
    ),
    "weak": CacheSpec(organization="s0", pages=(5,), buckets=2),
}


class Mutant(NamedTuple):
    """A wrong version, and where it is looked for.

    `expects`: rules that may speak; the first one does, in a shortest trace.
    """

    name: str
    family: str
    expects: tuple[str, ...]
    change: Change
    spec: str
    operations: frozenset[str]
    prompts: tuple[tuple[int, ...], ...] = PROMPTS


MUTANTS: dict[str, Mutant] = {}


def _mutant(
    family: str,
    *expects: str,
    spec: str = "s0",
    ops: str = "",
    prompts: tuple[tuple[int, ...], ...] = PROMPTS,
) -> Callable[[Change], Change]:
    """Register a mutant. Plans are probed (made and abandoned) only where that is what should speak."""

    def register(change: Change) -> Change:
        name = change.__name__.replace("_", " ")
        chosen = PLAIN if "HK-G5" in expects else PLAIN - {"abandon"}
        MUTANTS[name] = Mutant(name, family, expects, change, spec, chosen | set(ops.split()), prompts)
        return change

    return register


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper(original, *arguments)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: wrapper(original, *a, **k))


def _pools(cache: HybridCache) -> list[Any]:
    return list(cache.storage.pools.values())


def _replan(cache: HybridCache, change: Callable[[Request, Plan], Plan]) -> None:
    def plan(original: Any, r: Request, *a: Any) -> Plan:
        made = original(r, *a)
        changed = change(r, made)
        return changed._replace(line=changed.source) if made.line is made.source else changed

    _around(cache.growth, "plan", plan)


# ------------------------------------------------------------------------------------------------- A ownership
@_mutant("A", "HK-A6", "HK-A3", "HK-A0")
def hit_takes_no_reference(cache: HybridCache) -> None:
    def begin(original: Any, r: Request, *a: Any, **k: Any) -> int:
        stop = original(r, *a, **k)
        if r.blocks:
            cache.storage.by_kind[ATTENTION].references[r.table[:, : r.blocks]] -= 1  # type: ignore[union-attr]
        return stop

    _around(cache, "_begin", begin)


@_mutant("A", "HK-A4", "HK-A6", "HK-A3", "HK-A8", "HK-D4", "HK-A0", ops="fork")
def release_ignores_other_holders(cache: HybridCache) -> None:
    for pool in _pools(cache):

        def release(original: Any, ids: Any, pool: Any = pool, **k: Any) -> None:
            pool.references[ids] = 1
            original(ids, **k)

        _around(pool, "release", release)


@_mutant("A", "HK-A1", "HK-G1")
def release_forgets_the_partial_page(cache: HybridCache) -> None:
    def let_go(original: Any, r: Request) -> None:
        r.blocks -= r.computed % cache.organization.block_tokens > 0
        original(r)

    _around(cache.growth, "let_go", let_go)


@_mutant("A", "HK-A2", "HK-A3")
def page_freed_twice(cache: HybridCache) -> None:
    for pool in _pools(cache):

        def push(original: Any, ids: Any) -> None:
            original(ids)
            original(ids[:1])

        _around(pool, "_push_free", push)


@_mutant("A", "HK-A2", "HK-A0", spec="s2")
def second_release_is_accepted(cache: HybridCache) -> None:
    _around(cache, "release", lambda release, r: release(r) if cache.requests.get(r.id) is r else None)


@_mutant("A", "HK-A7", "HK-A1")
def two_requests_share_a_running_state(cache: HybridCache) -> None:
    def attach(original: Any, r: Request, *a: Any) -> None:
        original(r, *a)
        others = [o.open for o in cache.requests.values() if o is not r and o.open is not None]
        if r.open is not None and others:
            r.open = others[0]

    _around(cache.growth, "_attach", attach)


@_mutant("A", "HK-B5", "HK-A0", "HK-B2", "HK-C2", "HK-C3")
def hit_is_not_pinned_while_room_is_made(cache: HybridCache) -> None:
    held: list[Checkpoint] = []

    def begin(original: Any, r: Request, *a: Any, **k: Any) -> int:
        stop = original(r, *a, **k)
        if r.source is not None:
            cache.storage.release([r.source], touch=False)
            held.append(r.source)
        return stop

    def admitted(original: Any, r: Request, *a: Any) -> None:
        original(r, *a)
        if held and held.pop() is r.source and r.source is not None:
            cache.storage.reference([r.source])

    def unpin(original: Any, r: Request) -> None:
        if held and held.pop() is r.source and r.source is not None:
            cache.storage.reference([r.source])
        original(r)

    _around(cache, "_begin", begin)
    _around(cache, "_admitted", admitted)
    _around(cache, "_unpin", unpin)


@_mutant("A", "HK-A8", "HK-C1", "HK-D4", spec="s2")
def reference_on_the_first_member_only(cache: HybridCache) -> None:
    conv = cache.storage.by_kind[StateKind.CONV]
    protects = [False]

    def begin(original: Any, *a: Any, **k: Any) -> int:
        protects[0] = True
        stop = original(*a, **k)
        protects[0] = False
        return stop

    _around(cache, "_begin", begin)
    _around(conv, "reference", lambda reference, lines: None if protects[0] else reference(lines))


@_mutant("A", "HK-A3", "HK-A2")
def cached_page_is_left_in_the_free_list(cache: HybridCache) -> None:
    for pool in _pools(cache):

        def release(original: Any, ids: Any, pool: Any = pool, **k: Any) -> None:
            original(ids, **k)
            if len(cached := ids[(pool.references[ids] == 0) & pool.published[ids]]):
                pool._push_free(cached)  # noqa: SLF001  # this is the mistake

        _around(pool, "release", release)


@_mutant("A", "HK-A6", "HK-A1")
def growth_names_one_page_twice(cache: HybridCache) -> None:
    _around(
        cache.growth,
        "_add_blocks",
        lambda add, r, units, count: add(r, np.repeat(units[:, :1], count, axis=1), count),
    )


@_mutant("A", "HK-A5", ops="clear")
def clear_forgets_the_checkpoints(cache: HybridCache) -> None:
    def clear() -> int:
        return sum(
            cache.storage.lose(b) is None for b in [*cache.index.blocks.values()] if cache.storage.idle(b)
        )

    cache.clear = clear


@_mutant("A", "HK-A4")
def refusal_keeps_references(cache: HybridCache) -> None:
    _around(cache, "_unpin", lambda _, r: r.clear())


@_mutant("A", "HK-A4", "HK-A0")
def refusal_reclaims_first(cache: HybridCache) -> None:
    def shortage(original: Any, *a: Any) -> Any:
        refused = original(*a)
        if refused is not None and (pool := cache.storage.pools[refused.pool]).cached:
            cache.storage._reclaim_page(pool)  # noqa: SLF001  # this is the mistake
        return refused

    _around(cache.storage, "shortage", shortage)


@_mutant("A", "HK-A4", prompts=((0, 0), (1, 1), (0, 0, 0, 0, 1)))
def refusal_refreshes_the_reclaim_order(cache: HybridCache) -> None:
    for pool in _pools(cache):
        _around(pool, "release", lambda release, ids, **_: release(ids))


@_mutant("A", "HK-A0")
def room_is_assumed(cache: HybridCache) -> None:
    cache.storage.shortage = lambda *_: None


# --------------------------------------------------------------------------------------------------- B content
@_mutant("B", "HK-F3", "HK-B6", "HK-B2", spec="attention")
def identity_is_the_last_block_only(cache: HybridCache) -> None:
    original = cache._hash  # noqa: SLF001  # injected
    root: dict[str, bytes] = {}

    class LastBlock:
        collision_resistant = True

        def __call__(self, parent: bytes, tokens: bytes) -> bytes:
            if len(tokens) > 4 * cache.organization.block_tokens:
                return root.setdefault("", original(parent, tokens))
            return original(root[""], tokens)

    cache._hash = LastBlock()  # noqa: SLF001


@_mutant("B", "HK-B4", "HK-A0")
def hit_reaches_the_end(cache: HybridCache) -> None:
    cache._find = lambda r: (r.hash(cache._hash), cache.index.find(r.chain, r.length + 1))[1]  # noqa: SLF001
    cache._depths = lambda found, upto: [*(c.position for c in reversed(found.checkpoints)), 0]  # noqa: SLF001


@_mutant("B", "HK-B2", "HK-D2", "HK-B1", "HK-B5", "HK-B6")
def growth_reorders_the_table(cache: HybridCache) -> None:
    def reserve(original: Any, r: Request, *a: Any, **k: Any) -> Plan:
        plan = original(r, *a, **k)
        r.table[:, : r.blocks] = -np.sort(-r.table[:, : r.blocks])
        return plan

    _around(cache.growth, "reserve", reserve)


@_mutant("B", "HK-C3", "HK-B6", "HK-A0", "HK-C1")
def published_when_planned(cache: HybridCache) -> None:
    def reserve(original: Any, r: Request, start: int, stop: int, **k: Any) -> Plan:
        plan = original(r, start, stop, **k)
        full = min(stop, r.length) // cache.organization.block_tokens
        for i in range(r.published, min(full, r.blocks)):
            cache._publish_block(r, i)  # noqa: SLF001
        return plan

    _around(cache.growth, "reserve", reserve)


@_mutant("B", "HK-B6", "HK-C1", ops="short")
def short_commit_publishes_the_whole_step(cache: HybridCache) -> None:
    def short(original: Any, r: Request, computed: int) -> None:
        for i in range(r.published, min(r.planned, r.length) // cache.organization.block_tokens):
            cache._publish_block(r, i)  # noqa: SLF001
        original(r, computed)

    _around(cache, "_commit_short", short)


@_mutant("B", "HK-B6", "HK-C1", "HK-B2", spec="update", ops="draft", prompts=((0, 0, 1),))
def decode_made_states_are_published_as_the_prompts(cache: HybridCache) -> None:
    def publish(original: Any, r: Request, computed: int) -> None:
        r.prompt_tokens = r.length
        original(r, computed)

    _around(cache, "_publish", publish)


@_mutant("B", "HK-B5", "HK-B3", spec="replay", ops="round")
def replay_takes_no_window(cache: HybridCache) -> None:
    _around(cache.growth, "wanted", lambda wanted, *a: (*(w := wanted(*a))[:3], (w[3][0], 0)))


@_mutant("B", "HK-B5", "HK-B3", spec="replay", ops="round")
def replay_reads_the_running_state_before_its_first_chunk_ends(cache: HybridCache) -> None:
    _replan(cache, lambda r, plan: plan._replace(source=plan.line) if plan.line else plan)


@_mutant("B", "HK-B3", "HK-B5", spec="replay lines", ops="round")
def replay_reads_the_line_of_the_last_chunk_end(cache: HybridCache) -> None:
    _replan(cache, lambda r, plan: plan._replace(line=plan.source))


@_mutant("B", "HK-B1", spec="attention", prompts=((0, 0, 1),))
def commit_reorders_the_table(cache: HybridCache) -> None:
    def commit(original: Any, r: Request, *a: Any) -> None:
        original(r, *a)
        r.table[:, : r.blocks] = r.table[:, : r.blocks][:, ::-1].copy()

    _around(cache, "commit", commit)


@_mutant("B", "HK-B3", prompts=((0, 0, 0, 1), (0, 0, 1)))
def second_step_starts_from_the_checkpoint_again(cache: HybridCache) -> None:
    def change(r: Request, plan: Plan) -> Plan:
        return plan._replace(source=r.source) if r.source is not None else plan

    _replan(cache, change)


# -------------------------------------------------------------------------------------------------- C composite
@_mutant("C", "HK-C2")
def hit_restores_the_pages_only(cache: HybridCache) -> None:
    _replan(cache, lambda r, plan: plan._replace(source=None) if plan.source is r.source else plan)


@_mutant("C", "HK-C2", "HK-C1", "HK-B3", spec="s0 large")
def hit_restores_the_state_of_the_boundary_below(cache: HybridCache) -> None:
    def change(r: Request, plan: Plan) -> Plan:
        below = [c for c in cache.index.checkpoints.values() if c.position < plan.start]
        return plan._replace(source=below[0]) if plan.source is r.source is not None and below else plan

    _replan(cache, change)


@_mutant("C", "HK-C1", spec="s2 large")
def hit_mixes_two_checkpoints(cache: HybridCache) -> None:
    def change(r: Request, plan: Plan) -> Plan:
        others = [c for c in cache.index.checkpoints.values() if c is not r.source]
        if plan.source is not r.source or r.source is None or not others:
            return plan
        units = {**r.source.units, StateKind.CONV: others[0].units[StateKind.CONV]}
        return plan._replace(source=Checkpoint(plan.start, units))

    _replan(cache, change)


@_mutant("C", "HK-B6", "HK-C1", "HK-A0", "HK-B3")
def checkpoint_off_its_boundary(cache: HybridCache) -> None:
    def change(r: Request, plan: Plan) -> Plan:
        early = tuple(
            Write(max(plan.start, w.position - 1), w.state) for w in plan.writes if w.position < plan.stop
        )
        return plan._replace(writes=early + plan.writes[len(early) :])

    _replan(cache, change)


@_mutant("C", "HK-B6", "HK-C1", "HK-B3", "HK-B5")
def checkpoint_never_written(cache: HybridCache) -> None:
    _replan(
        cache, lambda _, plan: plan._replace(writes=tuple(w for w in plan.writes if w.position == plan.stop))
    )


@_mutant("C", "HK-C5", "HK-B2", spec="groups")
def one_groups_hit_is_taken_for_all(cache: HybridCache) -> None:
    def change(r: Request, plan: Plan) -> Plan:
        first = r.cached // cache.organization.block_tokens or (plan.start // cache.organization.block_tokens)
        table = plan.attention.copy()
        table[1:, :first] = table[0, :first]
        return plan._replace(attention=table)

    _replan(cache, change)


@_mutant("C", "HK-C3", "HK-B6", "HK-C1")
def lost_state_stays_in_the_index(cache: HybridCache) -> None:
    cache.storage.on_loss = lambda state: setattr(state, "stage", Lifecycle.LOST)


@_mutant("C", "HK-C1", "HK-A3", "HK-A0", spec="s2")
def convolution_slot_does_not_know_its_checkpoint(cache: HybridCache) -> None:
    cache.storage.by_kind[StateKind.CONV].publish = lambda *_: None


@_mutant("C", "HK-A0", "HK-C3", "HK-C1", "HK-A3", spec="nested")
def slab_is_reclaimed_without_all_its_dependants(cache: HybridCache) -> None:
    for store in cache.storage.slot_pools:
        _around(store, "dependants", lambda dependants, page: dependants(page)[:1])


@_mutant("C", "HK-C4", "HK-B3", "HK-A0", ops="truncate")
def truncation_of_the_pages_only(cache: HybridCache) -> None:
    def truncate(original: Any, *a: Any) -> Any:
        cache.growth.recurrent = False
        try:
            return original(*a)
        finally:
            cache.growth.recurrent = True

    _around(cache, "truncate", truncate)


@_mutant("C", "HK-C4", "HK-D2", spec="attention", ops="truncate")
def truncation_forgets_to_copy_the_shared_block(cache: HybridCache) -> None:
    _around(
        cache,
        "truncate",
        lambda f, *a: x._replace(plan=x.plan._replace(copies=())) if hasattr(x := f(*a), "plan") else x,
    )


@_mutant("D", "HK-D2", spec="attention", ops="truncate", prompts=((0, 0, 1),))
def truncation_writes_on_the_shared_block(cache: HybridCache) -> None:
    def truncate(original: Any, r: Request, tokens: int) -> Any:
        r.published = 0
        return original(r, tokens)

    _around(cache, "truncate", truncate)


# ------------------------------------------------------------------------------------------------------ D plans
@_mutant("D", "HK-D3", "HK-B5")
def miss_keeps_the_old_state(cache: HybridCache) -> None:
    def change(r: Request, plan: Plan) -> Plan:
        stale = plan.start == 0 and plan.source is None
        return plan._replace(source=plan.destination) if stale else plan

    _replan(cache, change)


@_mutant("D", "HK-D1", "HK-G4", ops="fork")
def fork_copies_a_unit_onto_itself(cache: HybridCache) -> None:
    _copies(cache, lambda c: Copy(c.kind, c.source, c.source))


@_mutant("D", "HK-G4", "HK-D2", "HK-D1", "HK-B3", ops="fork")
def fork_copies_backwards(cache: HybridCache) -> None:
    _copies(cache, lambda c: Copy(c.kind, c.destination, c.source))


def _copies(cache: HybridCache, change: Callable[[Copy], Copy]) -> None:
    def fork(original: Any, *a: Any) -> Any:
        answer = original(*a)
        if not hasattr(answer, "plan"):
            return answer
        return answer._replace(plan=answer.plan._replace(copies=tuple(map(change, answer.plan.copies))))

    _around(cache, "fork", fork)


@_mutant("D", "HK-D4", "HK-A8", "HK-A0")
def source_is_released_before_the_plan_ran(cache: HybridCache) -> None:
    def admitted(original: Any, r: Request, *a: Any) -> None:
        original(r, *a)
        if r.source is not None:
            cache.storage.release([r.source])
            r.source = None

    _around(cache, "_admitted", admitted)


@_mutant("D", "HK-C3", "HK-D2", "HK-B1", "HK-B5", "HK-D4")
def absent_id_is_clamped_to_page_0(cache: HybridCache) -> None:
    def change(r: Request, plan: Plan) -> Plan:
        table = plan.attention.copy()
        if plan.start:
            table[:, plan.start // cache.organization.block_tokens :] = 0
        return plan._replace(attention=table)

    _replan(cache, change)


@_mutant("D", "HK-D5", spec="s2")
def line_is_counted_from_the_wrong_page(cache: HybridCache) -> None:
    def change(_: Request, plan: Plan) -> Plan:
        if plan.destination is None:
            return plan
        units = {**plan.destination.units, StateKind.CONV: plan.destination.units[StateKind.CONV] + 100}
        return plan._replace(destination=Checkpoint(plan.stop, units))

    _replan(cache, change)


@_mutant("D", "HK-D5", "HK-A0")
def plan_names_the_blocks_before_growth(cache: HybridCache) -> None:
    _replan(
        cache,
        lambda _, p: p._replace(attention=p.attention[:, : -(-p.start // cache.organization.block_tokens)]),
    )


# ----------------------------------------------------------------------------------------------- E usefulness
@_mutant("E", "HK-E1", "HK-E5")
def never_hits(cache: HybridCache) -> None:
    cache.index.find = lambda *_: Found(Match(0, 0, 0), [], [])


@_mutant("E", "HK-E5", "HK-E1", spec="s0 large")
def only_the_last_boundary_of_a_chunk_is_published(cache: HybridCache) -> None:
    _around(cache, "_publish_checkpoint", lambda f, r, state: None if r.boundaries else f(r, state))


@_mutant("E", "HK-E2")
def hit_or_nothing(cache: HybridCache) -> None:
    _around(cache, "_depths", lambda depths, *a: depths(*a)[:1])


@_mutant("E", "HK-E1", "HK-E2")
def shared_pages_are_counted_as_new(cache: HybridCache) -> None:
    wanting: list[Request] = []

    def begin(original: Any, r: Request, *a: Any, **k: Any) -> int:
        wanting[:] = [r]
        return original(r, *a, **k)

    def shortage(original: Any, wanted: Any, reserve: Any = None) -> Any:
        more = ((cache.storage.attention, wanting[0].blocks),) if wanting else ()
        return original((*wanted, *more), reserve)

    _around(cache, "_begin", begin)
    _around(cache.storage, "shortage", shortage)
    _around(cache, "_admitted", lambda f, *a: (f(*a), wanting.clear()))


@_mutant("E", "HK-E3")
def reclaims_though_enough_is_free(cache: HybridCache) -> None:
    def take(original: Any, wanted: Any) -> Any:
        for pool in _pools(cache):
            if pool.cached:
                cache.storage._reclaim_page(pool)  # noqa: SLF001  # this is the mistake
        return original(wanted)

    _around(cache.storage, "take", take)


@_mutant("E", "HK-E4", prompts=((0, 0), (1, 1), (0, 1), (0, 1, 1)))
def newest_is_reclaimed_first(cache: HybridCache) -> None:
    for pool in _pools(cache):
        pool.coldest = lambda pool=pool: pool.cached_ids()[-1]


# --------------------------------------------------------------------------------------------------- F identity
@_mutant("F", "HK-F1", "HK-B6", ops="namespace", prompts=((0, 0), (0, 0, 1)))
def salt_is_forgotten(cache: HybridCache) -> None:
    def request(original: Any, request_id: Any, tokens: Any, salt: Any = None) -> Request:
        r = original(request_id, tokens)
        r.salt = salt
        return r

    _around(cache, "request", request)


@_mutant("F", "HK-F2", "HK-B6", spec="weak")
def weak_hash_is_trusted(cache: HybridCache) -> None:
    cache._hash.collision_resistant = True  # noqa: SLF001


@_mutant("F", "HK-F4", "HK-A0")
def stale_handle_is_served(cache: HybridCache) -> None:
    cache._expect = lambda *_: None  # noqa: SLF001


# -------------------------------------------------------------------------------------------------- G lifecycle
@_mutant("G", "HK-G1", "HK-A1")
def cancel_forgets_what_is_in_flight(cache: HybridCache) -> None:
    def let_go(original: Any, r: Request) -> None:
        r.boundaries = []
        original(r)

    _around(cache.growth, "let_go", let_go)


@_mutant("G", "HK-A1", "HK-G1", ops="preempt resume")
def preemption_keeps_the_state(cache: HybridCache) -> None:
    def preempt(original: Any, r: Request) -> None:
        r.source = None
        original(r)

    _around(cache, "preempt", preempt)


@_mutant("G", "HK-G2", "HK-D3", ops="preempt resume")
def resume_continues_on_the_state_it_left(cache: HybridCache) -> None:
    left: dict[Any, Any] = {}

    def preempt(original: Any, r: Request) -> None:
        left[r.id] = r.source or r.open
        original(r)

    _around(cache, "preempt", preempt)
    _replan(cache, lambda r, plan: plan._replace(source=left.pop(r.id)) if left.get(r.id) else plan)


@_mutant("G", "HK-D2", "HK-G4", "HK-A6", "HK-A7", ops="fork", prompts=((0, 0, 1),))
def fork_shares_the_block_in_progress(cache: HybridCache) -> None:
    def fork(original: Any, r: Request, request_id: Any) -> Any:
        answer = original(r, request_id)
        if hasattr(answer, "plan") and r.computed % cache.organization.block_tokens:
            child, store = cache.requests[request_id], cache.storage.by_kind[ATTENTION]
            last = r.computed // cache.organization.block_tokens
            store.release(child.table[:, last].copy())
            child.table[:, last] = r.table[:, last]
            store.reference(child.table[:, last].copy())
            copies = tuple(c for c in answer.plan.copies if c.kind is not ATTENTION)
            return answer._replace(
                plan=answer.plan._replace(attention=child.table[:, : child.blocks], copies=copies)
            )
        return answer

    _around(cache, "fork", fork)


@_mutant("G", "HK-G5", "HK-A1", "HK-G1")
def abandon_keeps_what_was_taken(cache: HybridCache) -> None:
    cache.storage.untake = lambda _: None


@_mutant("G", "HK-G5")
def abandon_forgets_what_it_reclaimed(cache: HybridCache) -> None:
    _around(cache.growth, "undo", lambda undo, r, u: (undo(r, u), u.lost.clear()))


@_mutant("G", "HK-G5", spec="s0")
def abandon_gives_pages_back_in_another_order(cache: HybridCache) -> None:
    for pool in _pools(cache):
        _around(pool, "untake", lambda untake, ids: untake(ids[::-1]))


@_mutant("G", "HK-G3", ops="lease")
def lease_takes_no_reference(cache: HybridCache) -> None:
    cache.lease = cache.leases.append

    def end(state: Any) -> None:
        cache.leases.remove(state)

    cache.end_lease = end


@_mutant("G", "HK-G3", "HK-A0", ops="lease")
def lease_may_end_twice(cache: HybridCache) -> None:
    _around(
        cache, "end_lease", lambda end, state: end(state) if any(x is state for x in cache.leases) else None
    )


@_mutant("G", "HK-G6", "HK-A0", ops="fail")
def commit_is_half_done_when_the_hash_raises(cache: HybridCache) -> None:
    def append(_: Any, r: Request, added: Any, *, publishes: bool) -> None:
        r.append(added)
        if publishes:
            r.hash(cache._hash)  # noqa: SLF001

    _around(cache, "_append", append)


# ------------------------------------------------------------------------------------------------ H determinism
_TURN = itertools.count()


@_mutant("H", "HK-H1")
def ids_depend_on_what_ran_before(cache: HybridCache) -> None:
    for pool in _pools(cache):

        def take(original: Any, count: int, kind: int) -> Any:
            ids = original(count, kind)
            return ids[::-1].copy() if next(_TURN) % 3 else ids

        _around(pool, "take", take)


@_mutant("H", "HK-H3", "HK-E5", "HK-E1", ops="round")
def batch_does_not_publish(cache: HybridCache) -> None:
    def commit_many(original: Any, rs: Any, *a: Any) -> None:
        rows = [r.row for r in rs]
        kept = cache.rows.next_publish[rows].copy()
        cache.rows.next_publish[rows] = NEVER
        original(rs, *a)
        cache.rows.next_publish[rows] = kept

    _around(cache, "commit_many", commit_many)


# Rules that no mutant of `HybridCache` can make speak in one process, and why.
UNREACHABLE = {
    "HK-H2": "needs two processes with different hash seeds: tests/test_kit_determinism.py",
}


def kill(mutant: Mutant, seconds: float = 10.0) -> Report:
    """Explore one mutant at small scope."""
    spec = replace(SPECS[mutant.spec], change=mutant.change)
    scope = Scope(operations=mutant.operations, prompts=mutant.prompts, seconds=seconds)
    tight = replace(spec, pages=tuple(max(2, n - 1) for n in spec.pages))
    return explore(make_cache, [Shape(spec, scope), Shape(tight, scope)])


def matrix(seconds: float = 10.0) -> dict[str, Report]:
    """Every mutant's report."""
    return {name: kill(mutant, seconds) for name, mutant in MUTANTS.items()}


def main() -> int:
    """Print mutant x rule; fail unless every mutant is refused and every reachable rule refuses one."""
    parser = argparse.ArgumentParser(prog="python -m hybridkv.testing.mutants", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="budget of one mutant")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--show", action="store_true", help="print the shortest trace of each")
    options = parser.parse_args()
    survivors, spoke = [], set[str]()
    chosen = [m for m in MUTANTS.values() if options.only in m.name]
    start = time.perf_counter()
    for m in chosen:
        report = kill(m, options.seconds)
        rule = report.error.rule if report.error else "survived"
        spoke.add(rule)
        survivors += [] if report.error else [m.name]
        mark = "" if rule in m.expects else f"  (expected {', '.join(m.expects)})"
        length = len(report.error.trace) if report.error else report.depth
        print(
            f"{m.family} {m.name:52s} {rule:9s} {length:2d} operations {1000 * report.seconds:8.0f} ms{mark}",
            flush=True,
        )
        if options.show and report.error:
            print(report.error)
    silent = sorted(set(RULES) - spoke - set(UNREACHABLE))
    print(f"{len(chosen)} mutants, {len(survivors)} survived, {time.perf_counter() - start:.0f} s")
    print(f"rules that refused none: {', '.join(silent) or 'none'}; not reachable: {', '.join(UNREACHABLE)}")
    return 1 if survivors or (silent and not options.only) else 0


if __name__ == "__main__":
    raise SystemExit(main())
