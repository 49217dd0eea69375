"""The whole house: planner, cache, tables, arena and ops serve a toy hybrid model, and nothing but tokens decides bits.

I10 end to end: logits of every position are compared bit by bit with those of each request alone, without a cache, in
one prompt: across organizations, orders of layers, budgets that cut prompts anywhere, hits, batch mates, preemptions.
"""

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.arena.tables import StepTables
from hybridkv.schedule.hybrid import HybridConfig
from hybridkv.testing.guard import guard
from hybridkv.testing.toy_hybrid import (
    ORGANIZATIONS,
    VOCABULARY,
    ToyEngine,
    Weights,
    toy_geometry,
    toy_organization,
)

KINDS = ["mamba2", "gated_delta_net"]
NEW = 20
WEIGHTS = {kind: Weights(toy_geometry(kind)) for kind in KINDS}


def texts(seed, count=4):
    """Prompts that share prefixes of different lengths."""
    rng = random.Random(seed)
    base = [rng.randrange(VOCABULARY) for _ in range(80)]
    cuts = [rng.choice([20, 33, 48, 65, 78]) for _ in range(count)]
    return [base[:n] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(4))] for n in cuts]


def engine(kind, name="s2", *, pages=160, impl="reference", decode="replay", **options):
    config = HybridConfig(
        token_budget=options.pop("budget", 256), max_running=options.pop("running", 4),
        cut_at_boundaries=options.pop("cut", True),
    )  # fmt: skip
    o = toy_organization(name, WEIGHTS[kind].g)
    counts = {p.name: pages for p in o.pools}
    return ToyEngine(o, WEIGHTS[kind], pages=counts, config=config, impl=impl, decode=decode, **options)


@functools.cache
def alone(kind, prompt, impl="reference", new=NEW):
    """One request in an empty cache, its prompt in one piece."""
    e = engine(kind, "s0", cut=False, impl=impl)
    e.submit("it", list(prompt), new)
    return e.run()["it"]


def differing(kind, prompts, served, *how):
    """Tokens, and logits in bits: (requests, positions) that differ."""
    tokens = positions = 0
    for n, prompt in enumerate(prompts):
        want = alone(kind, tuple(prompt), *how)
        tokens += served[n].tokens != want.tokens
        positions += sum(not torch.equal(x, want.logits[p]) for p, x in served[n].logits.items())
    return tokens, positions


histories = st.fixed_dictionaries(
    {
        "name": st.sampled_from(ORGANIZATIONS),
        "order": st.sampled_from(["layer_major", "page_major"]),
        "budget": st.sampled_from([3, 17, 64, 200]),
        "running": st.integers(1, 4),
        "cut": st.booleans(),
        "pages": st.sampled_from([30, 40, 160]),
        "pad": st.integers(0, 2),
    }
)


def serve(kind, seed, impl="reference", **history):
    e = engine(kind, impl=impl, **history)
    prompts = texts(seed)
    for n, prompt in enumerate(prompts):
        e.submit(n, prompt, NEW)
    return e, prompts, e.run()


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 3), history=histories)
@settings(max_examples=12)
def test_bits_depend_on_tokens_alone(kind, seed, history):
    _, prompts, served = serve(kind, seed, **history)
    assert differing(kind, prompts, served) == (0, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 20), history=histories)
@settings(max_examples=200)
def test_bits_depend_on_tokens_alone_many(kind, seed, history):
    _, prompts, served = serve(kind, seed, **history)
    assert differing(kind, prompts, served) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["s2", "nested"])
def test_kernels_serve_the_same_way(kind, name):
    """The Triton kernels under the guard: a hit, cuts inside chunks, rows of prompts beside rows that decode."""
    e = engine(kind, name, impl="triton", budget=25, running=2, cut=False)
    prompts = [texts(1)[0][:36], texts(1)[0][:20], [*texts(1)[0][:33], 1, 2]]
    with guard(hazards=False):
        for n, prompt in enumerate(prompts):
            e.submit(n, prompt, 3)
        assert differing(kind, prompts, e.run(), "triton", 3) == (0, 0)
    assert e.hits == {0: 0, 1: 0, 2: 32}


@pytest.mark.parametrize("kind", KINDS)
def test_resent_prompts_continue_from_states_that_decode_made(kind):
    """A second turn hits behind the first prompt, in states that replay decode wrote."""
    e = engine(kind)
    prompt = texts(0)[0][:30]
    e.submit("first", prompt, 40)
    again = prompt + e.run()["first"].tokens[:39] + [5, 6, 7]
    e.submit("second", again, 3)
    second = e.run()["second"]
    assert e.hits["second"] == 64
    want = alone(kind, tuple(again), "reference", 3)
    assert second.tokens == want.tokens
    assert all(torch.equal(x, want.logits[p]) for p, x in second.logits.items())


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_requests_end_the_same(kind):
    e, prompts, served = serve(kind, 2, pages=40, name="s1", running=4)
    assert e.cache.counters["preempted"] > 0
    assert differing(kind, prompts, served) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_running_states_of_another_dtype_are_served(kind):
    """fp32 while it runs, bf16 while it is kept: organizations agree; after a hit only the rounding of the state differs."""
    weights = Weights(toy_geometry(kind, live_state_dtype="fp32"))
    seen = []
    for name in ("s1", "s2"):
        o = toy_organization(name, weights.g)
        config = HybridConfig(token_budget=1, max_running=1)
        e = ToyEngine(o, weights, pages={"shared": 90}, config=config, decode="update_shared")
        for n in range(2):
            e.submit(n, texts(0)[0][:40], 6)
            e.run()
        assert e.hits == {0: 0, 1: 32}
        seen.append(e.served)
    for n in range(2):
        assert seen[0][n].tokens == seen[1][n].tokens
        assert all(torch.equal(row, seen[1][n].logits[at]) for at, row in seen[0][n].logits.items())
    first, second = (seen[0][n].logits[35] for n in range(2))
    assert not torch.equal(first, second)
    assert (first - second).norm() < 0.02 * first.norm()


# ------------------------------------------------------------------------------------- twins that must fail
def exact(**history):
    """Whether traffic with hits ends with the bits of each request alone; poison that was read is not."""
    try:
        _, prompts, served = serve("mamba2", 1, **history)
    except AssertionError:
        return False
    return differing("mamba2", prompts, served) == (0, 0)


def test_state_update_decode_gives_other_bits():
    """What engines do: decode rewrites the state each token. Prompts are fed token by token."""
    e = engine("mamba2", decode="update_shared", budget=1, running=1)
    e.submit(0, texts(0)[0], NEW)
    _, positions = differing("mamba2", [texts(0)[0]], e.run())
    assert positions > 0


def test_reading_the_running_state_before_its_first_chunk_ends_gives_other_bits(monkeypatch):
    """The step tables forget that a row still reads the checkpoint it came from."""
    update = StepTables.update
    monkeypatch.setattr(
        StepTables,
        "update",
        lambda self, step, **k: update(self, step._replace(in_place=step.in_place | True), **k),
    )
    assert not exact(running=1)


def test_reading_another_requests_blocks_gives_other_bits(monkeypatch):
    update = StepTables.update

    def planted(self, step, **k):
        tables = update(self, step, **k)
        tables.seats[:] = tables.seats.flip(0)
        return tables

    monkeypatch.setattr(StepTables, "update", planted)
    assert not exact()
