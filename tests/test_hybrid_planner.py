"""The continuous-batching planner: rules HK-P1 to HK-P8, and the scheduling scenarios of production engines by id."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv import CachePolicy, HybridCache, ModelGeometry, Organization, OutOfMemory, UsageError
from hybridkv.alloc.plan import Refused
from hybridkv.schedule.hybrid import HybridConfig, HybridPlanner
from hybridkv.testing.geometries import ORGANIZATIONS, tiny_organization
from tests.device import Device

FALCON = ModelGeometry.preset("falcon-h1-7b")


def paper_planner(name="s2", *, pages=None, policy=None, check=3, **config):
    o = Organization.named(name, FALCON)
    pages = pages or o.pages(83 * FALCON.uniform_unit.bytes)
    cache = HybridCache(o, pages=pages, policy=policy or CachePolicy(decode="update_shared"), check=check)
    return HybridPlanner(cache, HybridConfig(**config))


def finish(planner, step, token=7):
    return planner.commit(step, np.full(len(step.handles), token))


def drain(planner, limit=10_000, device=None):
    """Run to the end; the steps, as (spans, preempted)."""
    steps = []
    for _ in range(limit):
        step = planner.plan()
        if not len(step.handles):
            assert not planner.waiting and not planner.running, "a request waits though nothing runs"
            return steps
        if device is not None:
            device.run(step)
        names = [planner.cache.at(h).id for h in step.handles.tolist()]
        steps.append(
            (dict(zip(names, zip(step.start.tolist(), step.stop.tolist(), strict=True), strict=True)), step)
        )
        finish(planner, step)
    raise AssertionError("not done")


# ---------------------------------------------------------------------------------------------------- properties
requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # which earlier prompt it shares
        st.integers(0, 9),  # how much of it
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        st.integers(1, 6),  # tokens to generate
        st.sampled_from([None, None, None, 7]),
    ),
    min_size=1,
    max_size=8,
)


def build(name, pages, config, decode="update_shared", headroom=0, placement="every_block"):
    o = tiny_organization(name, block_tokens=2, grid_tokens=4, members=2, slots=2, chunk_tokens=2)
    counts = {p.name: pages for p in o.pools}
    policy = CachePolicy(decode=decode, headroom=headroom, placement=placement)
    return HybridPlanner(HybridCache(o, pages=counts, policy=policy, check=3), HybridConfig(**config))


@settings(max_examples=60)
@given(
    name=st.sampled_from(ORGANIZATIONS),
    pages=st.integers(20, 40),
    drawn=requests,
    budget=st.integers(1, 12),
    cap=st.integers(1, 5),
    cut=st.booleans(),
    reserve=st.booleans(),
    headroom=st.sampled_from(["0", "0.19"]),
    decode=st.sampled_from(["update", "update_shared"]),
    placement=st.sampled_from(["every_block", "end_junction", "interval(8)"]),
)
def test_plans_replayed_on_the_ghost_equal_serial_runs(
    name, pages, drawn, budget, cap, cut, reserve, headroom, decode, placement
):
    """HK-P1, P2, P3, P4, P8 and I1-I8: contents, budgets and completion of random traffic, audited after each call."""
    config = {"token_budget": budget, "max_running": cap, "cut_at_boundaries": cut, "reserve_prompt": reserve}
    planner = build(name, pages, config, decode, headroom, placement)
    prompts, texts = [(0,)], {}
    for i, (base, keep, tail, outputs, salt) in enumerate(drawn):
        tokens = (*prompts[base % len(prompts)][:keep], *tail)
        prompts.append(tokens)
        try:
            planner.submit(i, tokens, outputs, salt)
        except OutOfMemory:
            continue
        texts[i] = tuple(
            (salt, token) for token in (*tokens, *[7] * outputs)
        )  # a state of another tenant is another state
    done = dict.fromkeys(texts, 0)
    for spans, step in drain(planner, device=Device(planner, lambda r: texts[r.id])):
        assert sum(stop - start for start, stop in spans.values()) <= budget
        assert len(spans) == len(step.handles) <= cap
        for i, (_, stop) in spans.items():
            done[i] = max(done[i], stop)
    assert done == {i: len(text) - 1 for i, text in texts.items()}
    assert all(pool.held == 0 for pool in planner.cache.stats().pools.values())


@settings(max_examples=30)
@given(drawn=requests, budget=st.integers(1, 12), pages=st.integers(20, 30))
def test_equal_submissions_give_equal_plans(drawn, budget, pages):
    """HK-P6, I12: a plan is a function of what was submitted and committed."""
    traces = []
    for _ in range(2):
        planner = build("s2", pages, {"token_budget": budget, "max_running": 4})
        for i, (_, _, tail, outputs, salt) in enumerate(drawn):
            planner.submit(f"request {i}", tail, outputs, salt)
        traces.append(
            [(spans, {i: repr(p) for i, p in step.plans.items()}) for spans, step in drain(planner)]
        )
    assert traces[0] == traces[1]


def counts(planner):
    return {name: (p.free, p.cached, p.held, p.by_kind) for name, p in planner.cache.stats().pools.items()}


def test_abandoned_steps_change_nothing():
    """HK-G5: plan and abandon as often as you like; queues, counts and the next plan are as before."""
    planner = paper_planner(token_budget=1000)
    for i in range(4):
        planner.submit(i, np.arange(900) + 10_000 * i, 5)
    finish(planner, planner.plan())
    before, expected = counts(planner), None
    for _ in range(5):
        step = planner.plan()
        described = (
            step.handles.tolist(),
            step.start.tolist(),
            step.stop.tolist(),
            {i: repr(p) for i, p in step.plans.items()},
        )
        expected = expected or described
        assert described == expected
        planner.abandon(step)
        assert counts(planner) == before
        planner.cache.audit()


# ----------------------------------------------------------------------------------------------------- scenarios
def test_a1_chunks_end_where_a_state_must_exist():
    """A1: a prompt of 2,002 in chunks; a resend hits only at a boundary whose state was written."""
    planner = paper_planner(token_budget=364)
    tokens = np.arange(2002)
    planner.submit("first", tokens, 1)
    spans = [s["first"] for s, _ in drain(planner)]
    assert {stop for _, stop in spans} >= {512, 1024, 1536, 2002}
    assert all(start // 512 == (stop - 1) // 512 for start, stop in spans)
    assert planner.cache.match(planner.cache.request("again", tokens)).joint == 1536


def test_a4_snapshots_lie_on_the_grid():
    """A4 asks for states at end-0 and end-32, which are no boundaries: a checkpoint off the grid would change later
    bits (R9), so what is kept is the last boundary of the grid.
    """
    planner = paper_planner(
        token_budget=512, policy=CachePolicy(placement="end_only", decode="update_shared")
    )
    planner.submit("r", np.arange(1000), 1)
    assert [s["r"] for s, _ in drain(planner)] == [(0, 512), (512, 1000)]
    assert [c.position for c in planner.cache.index.checkpoints.values()] == [512]


def test_a5_nothing_is_published_before_the_step_completed():
    """A5, I7: with two steps in flight the next plan finds nothing of the first until it is committed."""
    planner = paper_planner(token_budget=512, in_flight=2, max_running=1)
    tokens = np.arange(1500)
    planner.submit("r", tokens, 2)
    first = planner.plan()
    second = planner.plan()
    assert (first.stop.tolist(), second.start.tolist()) == ([512], [512])
    other = planner.cache.request("other", tokens)
    assert planner.cache.match(other) == (0, 0, 0)
    finish(planner, first)
    assert planner.cache.match(other).joint == 512
    finish(planner, second)
    assert planner.cache.match(other).joint == 1024


def test_a5_a_request_may_skip_a_step():
    """A5: a request that sits out a step goes on where it was."""
    planner = paper_planner(token_budget=2)
    for i in range(3):
        planner.submit(i, [i + 1], 4)
    seen = drain(planner)
    for i in range(3):
        spans = [s[i] for s, _ in seen if i in s]
        assert spans == [(p, p + 1) for p in range(4)]


def test_a6_a_shared_prefix_in_one_step_delays_nobody():
    """A6: two prompts share 1,024 tokens, a third is unrelated, all wait; one plan starts all three, and the second
    does not hit what the first is only planned to write.
    """
    planner = paper_planner(token_budget=4096)
    planner.submit("r1", np.arange(1100), 1)
    planner.submit("r2", np.r_[np.arange(1024), 5000:5100], 1)
    planner.submit("r3", np.arange(9000, 9600), 1)
    step = planner.plan()
    assert [r.id for r in step.admitted] == ["r1", "r2", "r3"]
    assert step.start.tolist() == [0, 0, 0]


def test_a14_chunks_are_cut_on_the_grid_of_the_state():
    """A14: block 16 and grid 1,792 are different grids; D0's chunks end on the state's."""
    planner = paper_planner("d0", token_budget=8192)
    planner.submit("r", np.arange(5000), 1)
    assert [s["r"][1] for s, _ in drain(planner)] == [1792, 3584, 5000]


def test_c9_random_aborts_leave_no_page_behind():
    """C9: 200 requests, chunks of 1 to 512 tokens, aborts at any moment; after a clear everything is free."""
    rng = np.random.default_rng(9)
    planner = paper_planner(check=1, pages={"shared": 120}, max_running=8)
    for i in range(200):
        planner.submit(i, rng.integers(0, 50, rng.integers(1, 3000)), int(rng.integers(1, 20)))
    while planner.waiting or planner.running:
        planner.config = HybridConfig(token_budget=int(rng.integers(1, 513)) + 8, max_running=8)
        step = planner.plan()
        finish(planner, step)
        alive = [*planner.running, *planner.waiting]
        if alive and rng.random() < 0.3:
            planner.finish(alive[rng.integers(len(alive))])
    planner.cache.clear()
    planner.cache.audit()
    assert planner.cache.stats().pools["shared"].free == 120


def test_f1_a_request_that_never_fits_is_refused_at_once():
    """F1: more pages than the pool has, counting the states it reads and writes: refused when submitted, not retried."""
    planner = paper_planner(pages={"shared": 16})
    with pytest.raises(
        OutOfMemory, match=r"request 'r' of 5000 tokens must fit the pools, got 16 pages .* 17 are needed"
    ):
        planner.submit("r", np.arange(4900), 100)
    assert not planner.waiting and "r" not in planner.cache.requests
    planner.submit("fits", np.arange(4500), 100)  # 9 blocks, 2 x 3 members, 1 slab: all 16 pages
    assert drain(planner)


@pytest.mark.parametrize(("attention", "recurrent", "short"), [(400, 1, "recurrent"), (60, 20, "attention")])
def test_f2_one_pool_cannot_help_the_other(attention, recurrent, short):
    """F2: attention pages free and no state left, and the reverse: not admitted, and the refusal names the pool."""
    planner = paper_planner("d0", pages={"attention": attention, "recurrent": recurrent})
    planner.submit("a", np.arange(800), 50)
    planner.submit("b", np.arange(10_000, 10_800), 50)
    step = planner.plan()
    assert [r.id for r in step.admitted] == ["a"]
    assert isinstance(step.blocked, Refused) and step.blocked.pool == short


def test_f3_rejected_drafts_free_nothing_that_is_verified():
    """F3: four drafts planned, none accepted: blocks and states of verified tokens stay."""
    planner = paper_planner(check=3)
    r = planner.submit("r", np.arange(600), 50)
    while r.computed < 600:
        finish(planner, planner.plan())
    cache = planner.cache
    held = cache.stats().pools["shared"].held
    cache.extend(r, r.planned + 5)
    cache.commit(r, r.computed + 1, [7])
    assert (r.computed, r.planned) == (601, 601)
    assert cache.stats().pools["shared"].held == held
    assert r.source.position == 512


def test_preemption_takes_the_youngest_and_loses_no_token():
    """Two requests outgrow the pool while decoding: the younger one waits, resumes from its checkpoints, and finishes."""
    planner = paper_planner(pages={"shared": 18}, token_budget=4096, reserve_prompt=False)
    planner.submit("old", np.arange(1500), 600)
    planner.submit("young", np.arange(50_000, 51_500), 600)
    steps = drain(planner)
    preempted = [r.id for _, step in steps for r in step.preempted]
    assert preempted and set(preempted) == {"young"}
    last = {}
    for spans, _ in steps:
        last |= {i: stop for i, (_, stop) in spans.items()}
    assert last == {"old": 2099, "young": 2099}


def test_headroom_binds_waiting_requests_only_and_is_waived_when_idle():
    """Section 3.1: with f = .5 of 40 pages the second request waits though it would fit; alone, the first is admitted."""
    planner = paper_planner(pages={"shared": 40}, policy=CachePolicy(headroom=0.5, decode="update_shared"))
    planner.submit("first", np.arange(5000), 2)
    planner.submit("second", np.arange(70_000, 75_000), 2)
    step = planner.plan()
    assert [r.id for r in step.admitted] == ["first"]
    assert step.blocked.needed > step.blocked.obtainable >= 20
    finish(planner, step)
    assert {i for spans, _ in drain(planner) for i in spans} == {"first", "second"}


def test_cap_bounds_running_sequences():
    planner = paper_planner(max_running=3)
    for i in range(10):
        planner.submit(i, [1, 2, 3], 4)
    assert max(len(spans) for spans, _ in drain(planner)) == 3


BAD = [
    (lambda p: HybridConfig(token_budget=0), "token_budget must be at least 1, got 0"),
    (lambda p: HybridConfig(max_running=-1), "max_running must be at least 1, got -1"),
    (lambda p: HybridConfig(in_flight=0), "in_flight must be at least 1, got 0"),
    (lambda p: p.submit("new", [1], 0), "max_new_tokens must be at least 1, got 0"),
    (lambda p: p.submit("live", [1], 1), "request_id must be new, got 'live'"),
    (lambda p: p.submit("new", [], 1), "token_ids must hold at least one token, got none"),
    (lambda p: p.submit("new", [-1], 1), "token_ids must be in .0, 2..31., got -1 to -1"),
    (lambda p: p.submit("new", [1.5], 1), "token_ids must be a flat sequence of integers"),
    (lambda p: p.commit(p.plan()), "new_tokens must hold a token for 1 rows, got None"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=range(len(BAD)))
def test_wrong_use_is_refused_and_changes_nothing(call, message):
    planner = paper_planner()
    planner.submit("live", [1, 2], 3)
    waiting = len(planner.waiting)
    with pytest.raises(UsageError, match=message):
        call(planner)
    assert len(planner.waiting) + len(planner.running) == waiting
    planner.cache.audit()


@pytest.mark.parametrize("decode", ["replay", "update_shared"])
@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("name", ORGANIZATIONS)
def test_what_fits_runs_to_its_end(name, cut, decode):
    """F1, I11: in the smallest pools that `fits` accepts a lone request ends, whatever the budget; smaller are refused."""
    o = tiny_organization(
        name, block_tokens=2, grid_tokens=4, members=2, slots=2, chunk_tokens=2, window=True
    )
    policy, tokens = CachePolicy(decode=decode), np.arange(21) % 5

    def pools(pages: int) -> HybridCache:
        return HybridCache(o, pages={p.name: pages for p in o.pools}, policy=policy, check=3)

    smallest = next(pages for pages in range(1, 60) if pools(pages).fits(31) is None)
    with pytest.raises(OutOfMemory, match="must fit the pools"):
        HybridPlanner(pools(smallest - 1)).submit("r", tokens, 10)
    for budget in (1, 3, 9, 64):
        planner = HybridPlanner(pools(smallest), HybridConfig(token_budget=budget, cut_at_boundaries=cut))
        planner.submit("r", tokens, 10)
        steps = 0
        while planner.running or planner.waiting:
            step = planner.plan()
            planner.commit(step, np.zeros(len(step.handles), np.int64))
            steps += 1
            assert steps < 200, "plans for ever"
