"""StepTables: what every row finds, made anew each step, with one copy; seats; what is refused."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv import (
    CachePolicy,
    CorruptionError,
    HybridCache,
    ModelGeometry,
    Organization,
    UnsupportedError,
    UsageError,
)
from hybridkv.alloc.plan import Plan
from hybridkv.arena import Arena, StepTables
from hybridkv.schedule.hybrid import EMPTY, HybridConfig, HybridPlanner
from hybridkv.testing.toy_hybrid import (
    ATTENTION,
    CONV,
    ORGANIZATIONS,
    SSM,
    WINDOW,
    toy_geometry,
    toy_organization,
)


class Bench(NamedTuple):
    cache: HybridCache
    planner: HybridPlanner
    arena: Arena
    tables: StepTables

    def step(self, **padded):
        step = self.planner.plan()
        return step, self.tables.update(step, **padded)

    def commit(self, step):
        self.planner.commit(step, np.full(len(step.handles), 7))


def bench(
    name="s2", *, pages=60, decode="replay", running=8, budget=64, config=None, geometry=None, **tables
):
    o = toy_organization(name, geometry or toy_geometry(layers=(1, 2)))
    counts = {p.name: pages for p in o.pools}
    cache = HybridCache(o, pages=counts, policy=CachePolicy(decode=decode), check=3)
    planner = HybridPlanner(cache, HybridConfig(token_budget=budget, max_running=running, **config or {}))
    arena = Arena(o, counts)
    sizes = {"rows": running, "tokens": budget, "context": 256, "check": 2} | tables
    return Bench(cache, planner, arena, StepTables(arena, cache, **sizes))


def prompts(count, length=20, seed=0):
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 9, 64)
    return [np.concatenate([shared[: 16 * (n % 3)], rng.integers(0, 9, length + n)]) for n in range(count)]


def expected(b, step):
    """Every row's tables by the request's own records, one by one."""
    o, entries = b.cache.organization, b.arena.entries
    line = o.placements[CONV].within or CONV
    chunk, rows = o.geometry.chunk_tokens, []
    for i, handle in enumerate(step.handles.tolist()):
        r = b.cache.at(handle)
        start, stop = int(step.start[i]), int(step.stop[i])
        fold = start - start % chunk
        read = fold if b.cache.growth.replay else start

        def state_at(position, r=r):
            held = [s for s in (r.source, *r.boundaries) if s is not None and s.position >= position]
            if position == (r.source.position if r.source else 0):
                return r.source
            return next((s for s in held if s is not r.source), r.open)

        def named(state, kind):
            return [[-1]] if state is None else entries(kind, state.units[kind]).tolist()

        row = {"blocks": entries(ATTENTION, r.table[:, : r.blocks]).tolist()}
        row["src"], row["line_src"] = named(state_at(read), SSM), named(state_at(start), line)
        kept = [s for s in r.boundaries if start < s.position <= stop]
        last = kept[-1] if kept and kept[-1].position == stop else r.open
        row["dst"], row["window"] = named(last, SSM), named(r.window, WINDOW)
        ends = {s.position: s for s in kept}
        if (done := stop - stop % chunk) > fold and done not in ends:
            ends[done] = last
        row["ends"] = {(p - fold) // chunk - 1: named(s, SSM) for p, s in ends.items()}
        lines = {s.position: s for s in kept} | {stop: last}
        row["lines"] = [(p - start, named(s, line)) for p, s in sorted(lines.items())]
        rows.append(row)
    return rows


def check(b, step, t):
    def column(tensor, *at):
        return tensor[(slice(None), *at)].tolist()

    def same(found, wanted):
        wanted = wanted * len(found) if wanted == [[-1]] else wanted
        return all(set(f) == {-1} if w == [-1] else f == w for f, w in zip(found, wanted, strict=True))

    for i, row in enumerate(expected(b, step)):
        seat = int(t.seats[i])
        n = len(row["blocks"][0])
        assert t.blocks[:, seat, :n].tolist() == row["blocks"]
        assert (t.blocks[:, seat, n:] == -1).all()
        assert same(column(t.src_members, i), row["src"])
        assert same(column(t.line_src, i), row["line_src"])
        assert same(column(t.dst_members, i), row["dst"])
        assert same([[w] for w in column(t.windows, i)], row["window"])
        for c in range(t.boundaries.shape[2]):
            assert same(column(t.boundaries, i, c), row["ends"].get(c, [[-1]]))
        for k in range(t.line_at.shape[1]):
            at, where = row["lines"][k] if k < len(row["lines"]) else (0, [[-1]])
            assert same(column(t.line_dst, i, k), where)
            assert int(t.line_at[i, k]) == at
    spans = step.stop - step.start
    total = int(spans.sum())
    assert t.starts[: len(spans) + 1].tolist() == [0, *np.cumsum(spans).tolist()]
    assert t.token_seats[:total].tolist() == np.repeat(t.seats[: len(spans)].numpy(), spans).tolist()
    wanted = [p for a, z in zip(step.start, step.stop, strict=True) for p in range(a, z)]
    assert t.token_positions[:total].tolist() == wanted


def check_padding(t, rows, total):
    """I4, D4: what is padded is absent, in every table."""
    for tensor in (t.src_members, t.dst_members, t.line_src, t.windows):
        assert (tensor[:, rows:] == -1).all()
    assert (t.boundaries[:, rows:] == -1).all() and (t.line_dst[:, rows:] == -1).all()
    assert (t.seats[rows:] == -1).all() and (t.token_seats[total:] == -1).all()
    assert (t.starts[rows:] == total).all() and (t.lengths[rows:] == 0).all()


@pytest.mark.parametrize("name", ORGANIZATIONS)
@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=15)
def test_every_row_finds_what_its_request_holds(name, rng):
    """Any traffic: budgets that cut anywhere, hits, preemptions, abandoned steps."""
    b = bench(
        name, pages=rng.choice([26, 40, 90]), running=4, budget=rng.choice([5, 23, 64]),
        config={"cut_at_boundaries": rng.random() < 0.5}, updates=3,
    )  # fmt: skip
    for n, tokens in enumerate(prompts(5, seed=rng.randrange(9))):
        b.planner.submit(n, tokens, rng.choice([1, 4, 30]))
    abandoned = 0
    while b.planner.waiting or b.planner.running:
        step = b.planner.plan()
        t = b.tables.update(step, rows=min(4, len(step.handles) + rng.choice([0, 2])))
        check(b, step, t)
        check_padding(t, len(step.handles), int((step.stop - step.start).sum()))
        if abandoned < 20 and rng.randrange(8) == 7:
            abandoned += 1
            b.planner.abandon(step)
        else:
            b.commit(step)


def test_what_is_padded_is_absent_again_each_step():
    """D4: first padded rows, then real ones, then padded again; addresses stay for a captured graph."""
    b = bench(running=8, pages=200)
    for n, tokens in enumerate(prompts(3)):
        b.planner.submit(n, tokens, 40)
    addresses, crossed = set(), False
    seen = []
    while len(seen) < 30:
        step, t = b.step(rows=8, tokens=64)
        check_padding(t, len(step.handles), int((step.stop - step.start).sum()))
        if step.decode_rows == len(step.handles):
            crossed |= any(plan.writes for plan in step.plans.values())
            addresses.add(tuple(x.data_ptr() for x in t if isinstance(x, torch.Tensor)))
        b.commit(step)
        seen.append(len(step.handles))
        if len(seen) == 10:
            for n, tokens in enumerate(prompts(5, seed=3)):
                b.planner.submit(("late", n), tokens, 40)
    assert min(seen) <= 3 and max(seen) == 8
    assert crossed and len(addresses) == 1
    none = step._replace(handles=EMPTY, start=EMPTY, stop=EMPTY, in_place=EMPTY == 0, plans={})
    check_padding(b.tables.update(none, rows=8, tokens=64), 0, 0)


@pytest.mark.parametrize("missing", [(WINDOW,), (SSM, CONV, WINDOW), (ATTENTION, WINDOW)])
def test_models_without_a_part_have_no_tables_for_it(missing):
    o = toy_organization("s1", toy_geometry())
    g = o.geometry
    g = (
        g.replace(attention=None)
        if ATTENTION in missing
        else g.replace(recurrent=None)
        if SSM in missing
        else g
    )
    o = replace(o, geometry=g, placements={k: p for k, p in o.placements.items() if k not in missing})
    cache = HybridCache(o, pages={"shared": 40}, policy=CachePolicy(decode="update_shared"), check=3)
    planner, arena = HybridPlanner(cache, HybridConfig(token_budget=64)), Arena(o, {"shared": 40})
    tables = StepTables(arena, cache, rows=4, tokens=64, context=64, check=2)
    for n, tokens in enumerate(prompts(3)):
        planner.submit(n, tokens, 5)
    while planner.running or planner.waiting:
        step = planner.plan()
        t = tables.update(step)
        assert (t.blocks.numel() > 0) == (g.attention is not None)
        assert (t.src_members.numel() > 0) == (g.recurrent is not None)
        assert (t.windows == -1).all()
        planner.commit(step, np.full(len(step.handles), 7))


def test_a_step_is_one_copy():
    b = bench("d0", budget=64)
    for n, tokens in enumerate(prompts(4)):
        b.planner.submit(n, tokens, 20)
    steps = 0
    while b.planner.waiting or b.planner.running:
        step, _ = b.step()
        b.commit(step)
        steps += 1
    assert b.tables.copies == steps


def test_more_changes_than_room_take_further_copies():
    b = bench(budget=128, updates=2)
    b.planner.submit(0, np.arange(100) % 9, 1)
    step, t = b.step()
    assert b.tables.copies == 4  # 7 blocks
    check(b, step, t)


def test_a_request_may_hold_more_than_it_computes():
    b = bench(context=512)
    b.planner.submit(0, np.arange(200) % 9, 8)  # blocks of the whole prompt at once
    step, t = b.step()
    assert int(step.stop[0]) == 32 and int((t.blocks[0, int(t.seats[0])] >= 0).sum()) == 13


def test_seats_of_requests_that_ended_are_taken_again():
    b = bench(running=2)
    for n, tokens in enumerate(prompts(9, length=3)):
        b.planner.submit(n, tokens, 3)
    while b.planner.waiting or b.planner.running:
        step, t = b.step()
        check(b, step, t)
        b.commit(step)
    assert b.tables.blocks.shape[1] == 2


def test_rows_of_replay_decode_read_the_checkpoint_until_their_first_chunk_ends():
    """A hit costs no copy of its state: the running state is only written at the next end of a chunk."""
    b = bench(running=1)
    tokens = prompts(1, length=40)[0]
    for n in range(2):
        b.planner.submit(n, tokens[:33], 40)
        while b.planner.running or b.planner.waiting:
            step, t = b.step()
            if n and step.admitted:
                checkpoint = t.src_members.clone()
                assert step.start[0] == 32
            if n and 32 <= step.start[0] < 48:
                assert torch.equal(t.src_members, checkpoint)
                assert (t.boundaries >= 0).any() == (step.stop[0] == 48)
            if n and step.start[0] == 48:
                assert not torch.equal(t.src_members, checkpoint)
            b.commit(step)


class Spans(NamedTuple):
    """A step of an engine without our planner."""

    handles: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    in_place: np.ndarray
    plans: dict


def extended(b, r, upto):
    got = b.cache.extend_many([r], [upto])
    assert not got.refused
    return Spans(np.array([r.handle]), got.start, got.stop, got.in_place, got.plans)


def started(b, r):
    plan = b.cache.admit(r, 20).plan
    first = Spans(np.array([r.handle]), *(np.array([x]) for x in (0, 20, False)), {0: plan})
    check(b, first, b.tables.update(first))


UNDONE = {
    "abandon": lambda b, r: b.cache.abandon(r),
    "short commit": lambda b, r: b.cache.commit(r, 35),
    "truncate": lambda b, r: (b.cache.commit(r, 40), b.cache.truncate(r, 33)),
    "preempt": lambda b, r: (b.cache.preempt(r), started(b, r)),
    "fork": lambda b, r: (b.cache.commit(r, 40), b.cache.fork(r, "child")),
}


@pytest.mark.parametrize("name", ["s1", "nested"])
@pytest.mark.parametrize("decode", ["replay", "update_shared"])
@pytest.mark.parametrize("what", UNDONE)
def test_what_was_undone_is_named_anew(what, decode, name):
    """The tables hear of no abandon, short commit, truncation or fork: the next plan says everything again."""
    b = bench(name, decode=decode, pages=90)
    r = b.cache.request("r", np.arange(60) % 7)
    started(b, r)
    b.cache.commit(r, 20)
    step = extended(b, r, 40)  # over a boundary: another running state
    check(b, step, b.tables.update(step))
    UNDONE[what](b, r)
    for one in b.cache.requests.values():
        start = one.planned
        if b.cache.rows.flights(one.row):
            b.cache.commit(one, start)
        step = extended(b, one, start + 1)
        check(b, step, b.tables.update(step))
        b.cache.commit(one, start + 1, (1, 1, 1))
        step = extended(b, one, start + 3)
        check(b, step, b.tables.update(step))


def test_running_states_of_another_dtype_are_loaded_and_saved():
    g = toy_geometry(live_state_dtype="fp32")
    b = bench("s2", decode="update_shared", geometry=g, running=1, pages=90)
    tokens = prompts(1, length=40)[0][:40]
    found = []
    for n in range(2):
        b.planner.submit(n, tokens, 3)
        while b.planner.running or b.planner.waiting:
            step, t = b.step()
            found.append((int(step.start[0]), int(step.stop[0]), len(t.loads), len(t.saves)))
            b.commit(step)
    assert found[:2] == [(0, 32, 0, 1), (32, 40, 0, 0)]
    assert found[-3:] == [(32, 40, 1, 0), (40, 41, 0, 0), (41, 42, 0, 0)]


# ------------------------------------------------------------------------------------------------ refusals
def replanned(step, **changes):
    return step._replace(plans={0: step.plans[0]._replace(**changes)})


def test_a_unit_outside_its_pool_is_found_before_it_travels():
    """I5: tables are checked on the host; on a device nobody could."""
    b = bench()
    b.planner.submit(0, prompts(1)[0], 3)
    step = b.planner.plan()
    wrong = replanned(step, attention=step.plans[0].attention + 60)
    with pytest.raises(CorruptionError, match=r"I5: blocks names 6\d of 60 units of s2"):
        b.tables.update(wrong)


def test_two_rows_that_write_one_unit_are_found():
    """I8."""
    b = bench()
    for n, tokens in enumerate(prompts(2)):
        b.planner.submit(n, tokens, 3)
    step = b.planner.plan()
    one, two = step.plans[0], step.plans[1]
    assert isinstance(one, Plan)
    alias = step._replace(plans={0: one, 1: two._replace(destination=one.destination, writes=())})
    with pytest.raises(CorruptionError, match=r"I8: two rows write unit \d+ of dst_members"):
        b.tables.update(alias)
    b.tables.update(step)


def test_what_does_not_fit_is_refused():
    """D5: with the number in the message."""
    b = bench(running=3)
    for n, tokens in enumerate(prompts(3)):
        b.planner.submit(n, tokens, 3)
    step = b.planner.plan()
    narrow = StepTables(b.arena, b.cache, rows=2, tokens=64, context=256)
    with pytest.raises(UsageError, match=r"rows must be in 3..2 \(of the step, of the tables\), got 3"):
        narrow.update(step)
    with pytest.raises(UsageError, match=r"tokens must be in 64..10 \(of the step, of the tables\), got 64"):
        StepTables(b.arena, b.cache, rows=3, tokens=10, context=256).update(step)
    with pytest.raises(UsageError, match=r"rows must be in 3..8 \(of the step, of the tables\), got 2"):
        StepTables(b.arena, b.cache, rows=8, tokens=64, context=256).update(step, rows=2)
    with pytest.raises(UsageError, match=r"stop must be at most 16 \(context of the tables\), got"):
        StepTables(b.arena, b.cache, rows=3, tokens=64, context=16).update(step)
    with pytest.raises(UsageError, match="seats must be at least the running requests, got 2"):
        StepTables(b.arena, b.cache, rows=3, tokens=64, context=256, seats=2).update(step)
    with pytest.raises(UsageError, match="stop must be above start in every row, got an empty row"):
        b.tables.update(step._replace(stop=step.start))
    check(b, step, b.tables.update(step))


def tables_of(o, decode="replay", **sizes):
    counts = {p.name: 20 for p in o.pools}
    cache = HybridCache(o, pages=counts, policy=CachePolicy(decode=decode))
    return StepTables(Arena(o, counts), cache, **{"rows": 1, "tokens": 1, "context": 1} | sizes)


REFUSED = [
    (lambda: tables_of(toy_organization("s2", toy_geometry()), rows=0), "rows must be at least 1, got 0"),
    (
        lambda: tables_of(toy_organization("s2", toy_geometry()), updates=0),
        "updates must be at least 1, got 0",
    ),
    (
        lambda: StepTables(bench("s1").arena, bench("s2").cache, rows=1, tokens=1, context=1),
        "cache must have the arena's organization 's1', got another one",
    ),
    (
        lambda: tables_of(toy_organization("s0", toy_geometry(live_state_dtype="fp32")), "update"),
        "conv must have units of its own where running states have their own dtype, got it within 'ssm' in 's0'",
    ),
    (
        lambda: tables_of(two_pages_of_window()),
        "window must fit one page, got 2 pages in 's2'; a smaller chunk_tokens than 16 helps",
    ),
    (
        lambda: tables_of(
            Organization.named("s2", ModelGeometry.preset("qwen3-next-80b-a3b", chunk_tokens=64))
        ),
        "chunk_tokens must be 16 for the gated delta rule, got 64",
    ),
]


def two_pages_of_window():
    o = toy_organization("s2", toy_geometry())
    return replace(o, placements=dict(o.placements) | {WINDOW: replace(o.placements[WINDOW], pages=2)})


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_wrong_use_is_refused(call, message):
    with pytest.raises((UsageError, UnsupportedError), match=message):
        call()


def test_a_boundary_inside_a_step_needs_states_of_one_dtype():
    g = toy_geometry(live_state_dtype="fp32")
    b = bench("s2", decode="update", geometry=g, config={"cut_at_boundaries": False})
    b.planner.submit(0, np.arange(50), 3)
    step = b.planner.plan()
    with pytest.raises(UnsupportedError, match="got 50 behind 32; cut prompts at boundaries"):
        b.tables.update(step)
