"""Recurrent families: equal bits whatever surrounds a row, wherever its state lies, however its tokens are cut.

fp32 outputs are compared: rounded to bf16, a changed order of summation hides at these sizes. Every property has a twin
that breaks one rule and must break the equality.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.triton import ssd as ssd_kernels
from tests.recurrent import BF16, FP32, ORGANIZATIONS, Batch, Delta, Row, Ssd, relative, same

LENGTH = 84  # two chunks of 32 and a tail; five of 16 and a tail
FAMILIES = {"ssd": Ssd(), "delta": Delta()}
IMPLS = ["reference", "triton"]


@functools.cache
def whole(name: str, seed: int, impl: str, state: torch.dtype) -> Row:
    """The same tokens in one call, alone."""
    batch = Batch(FAMILIES[name], state=state, impl=impl, order="forward")
    batch.rng.random = lambda: 0.0  # keep every boundary, nothing is there to end in place
    row = batch.start(LENGTH, seed)
    batch.advance([(row, LENGTH)])
    assert not row.out.isnan().any()
    return row


def matches(name: str, seed: int, row: Row, impl: str, state: torch.dtype, since: int = 0) -> bool:
    full = whole(name, seed, impl, state)
    outputs = same(row.out[since : row.position], full.out[since : row.position])
    return outputs and all(same(v, full.states[at]) for at, v in row.states.items())


# Every row's tokens in pieces: decode steps, pieces around a chunk's end, and whole chunks.
cuts = st.lists(st.sampled_from([1, 1, 1, 2, 5, 15, 16, 17, 31, 32, 33, 50]), min_size=1, max_size=4)
histories = st.fixed_dictionaries(
    {
        "organization": st.sampled_from(ORGANIZATIONS),
        "state": st.sampled_from([BF16, BF16, FP32]),
        "rows": st.lists(cuts, min_size=1, max_size=2),
        "spare": st.integers(0, 1),
        "seed": st.integers(0, 2**16),
        "order": st.sampled_from(["forward", "reverse", "shuffle"]),
        "head": st.sampled_from([0, 0, 7, 31, 48]),
    }
)


def run_history(name: str, impl: str, h: dict) -> None:
    batch = Batch(
        FAMILIES[name], h["organization"], state=h["state"], seed=h["seed"], impl=impl, order=h["order"]
    )
    rows = [(batch.start(LENGTH, n), n, list(pieces)) for n, pieces in enumerate(h["rows"])]
    if h["head"]:  # rows of a call at different phases
        batch.advance([(rows[0][0], h["head"])])
    while True:
        steps = [(row, min(pieces.pop(0), LENGTH - row.position)) for row, _, pieces in rows if pieces]
        steps = [(row, n) for row, n in steps if n]
        if not steps:
            break
        batch.rng.shuffle(steps)
        batch.advance(steps, h["spare"])
    for row, seed, _ in rows:
        assert matches(name, seed, row, impl, h["state"])
    assert batch.untouched()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
@given(h=histories)
@settings(max_examples=20)
def test_bits_depend_on_the_tokens_before_alone(name, impl, h):
    run_history(name, impl, h)


@pytest.mark.nightly
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
@given(h=histories)
@settings(max_examples=250)
def test_bits_depend_on_the_tokens_before_alone_many(name, impl, h):
    run_history(name, impl, h)


def decode_from(name: str, impl: str, start: int, organization: str, state: torch.dtype) -> tuple[Batch, Row]:
    """Prefill to `start`, then replay decode to two tokens past the chunk's end."""
    batch = Batch(FAMILIES[name], organization, state=state, seed=start, impl=impl)
    row = batch.start(LENGTH, 0)
    if start:
        batch.advance([(row, start)])
    for _ in range(batch.family.chunk - start % batch.family.chunk + 2):
        batch.advance([(row, 1)])
    return batch, row


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("start", "organization"), [(0, "composite"), (21, "striped"), (52, "nested")])
def test_states_made_by_decode_are_those_of_the_prompt(name, impl, start, organization):
    batch, row = decode_from(name, impl, start, organization, BF16)
    made = [at for at in row.states if at > start]
    assert made
    assert matches(name, 0, row, impl, BF16)
    assert batch.untouched()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_shared_checkpoint_is_read_in_place_until_a_row_folds(name, impl):
    batch = Batch(FAMILIES[name], "members", impl=impl)
    chunk = batch.family.chunk
    first = batch.start(LENGTH, 0)
    batch.advance([(first, chunk + 3)])
    kept, checkpoint = batch.storage.state(first.members), first.members
    second = batch.resume(first)
    while second.position < 2 * chunk + 2:
        batch.advance([(first, 1), (second, 1)] if first.position < LENGTH else [(second, 1)])
    assert second.members != checkpoint != first.members
    assert same(batch.storage.state(checkpoint), kept)
    assert matches(name, 0, first, impl, BF16)
    assert matches(name, 0, second, impl, BF16, since=chunk)


# ---------------------------------------------------------------------------------- twins that must fail
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_without_rounding_the_carry_a_cut_changes_bits(name, impl):
    """What engines do: fp32 within a call, bf16 between calls."""
    family = FAMILIES[name]
    at = family.chunk
    batch = Batch(family, state=FP32, impl=impl)
    row = batch.start(LENGTH, 0)
    batch.advance([(row, at)])
    batch.storage.put(row.members, batch.storage.state(row.members).to(BF16))
    batch.advance([(row, LENGTH - at)])
    full = whole(name, 0, impl, FP32)
    assert same(row.out[:at], full.out[:at])
    assert not same(row.out[at:], full.out[at:])


def test_another_tile_of_a_summed_axis_changes_bits(monkeypatch):
    monkeypatch.setitem(ssd_kernels._ROWS["default"], 2, ssd_kernels._ROWS["default"][2] | {"BK": 16})
    batch = Batch(FAMILIES["ssd"])
    row = batch.start(LENGTH, 0)
    batch.advance([(row, LENGTH)])
    full = whole("ssd", 0, "triton", BF16)
    assert not same(row.out, full.out)
    assert relative(row.out, full.out.double()) < 1e-6


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_tokens_elsewhere_in_a_chunk_give_other_bits(name, impl):
    """Position decides the arithmetic: behind tokens that write nothing, the result is the same number, not the same bits."""
    batch = Batch(FAMILIES[name], impl=impl)
    shift = batch.family.chunk // 2
    row = batch.start(LENGTH, 0)
    row.tokens = {k: v.roll(shift, 0) for k, v in row.tokens.items()}
    row.tokens["x" if name == "ssd" else "v"][:shift] = 0.0
    batch.advance([(row, LENGTH)])
    full = whole(name, 0, impl, BF16).out[: LENGTH - shift]
    assert not same(row.out[shift:], full)
    assert relative(row.out[shift:], full.double()) < 1e-2


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_folding_into_a_shared_checkpoint_changes_bits(name, impl):
    batch = Batch(FAMILIES[name], "members", impl=impl)
    chunk = batch.family.chunk
    first = batch.start(LENGTH, 0)
    batch.advance([(first, chunk)])
    second = batch.resume(first)
    first.shared = False
    batch.rng.random = lambda: 0.0  # fold in place
    batch.advance([(first, chunk)])
    assert first.members == second.members
    batch.advance([(second, chunk)])
    assert not matches(name, 0, second, impl, BF16, since=chunk)
