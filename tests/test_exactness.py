"""Recurrent families in chunks: equal bits whatever surrounds a row, wherever its state lies, however its tokens are cut.

fp32 outputs are compared: rounded to bf16, a changed order of summation hides at these sizes. Every drawn history
varies every property against one call for the row alone, and every property has a twin that breaks one rule and must
break the equality.
"""

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import strategies as st

from hybridkv import ops, units
from hybridkv.ops import delta as delta_ops
from hybridkv.reference import delta as delta_reference
from hybridkv.triton import delta as delta_kernels
from hybridkv.triton import ssd as ssd_kernels
from tests.batches import FAULTS, Batch, Row
from tests.census import Found, differing_bits, finds, search, survey
from tests.recurrent import BF16, FP32, ORGANIZATIONS, Delta, Ssd, i32, relative, same

LENGTH = 84  # two chunks of 32 and a tail; five of 16 and a tail
FAMILIES = {"ssd": Ssd(), "delta": Delta()}
IMPLS = ["reference", "triton"]
PROPERTIES = [*FAULTS.values(), "not in place", "split inside a chunk", "decode-made state"]

NEEDS = {  # what a fault needs to show
    "members read in reverse": {"organization": "striped"},
    "a cut rounds, the call does not": {"state": FP32},
}


@functools.cache
def whole(name: str, seed: int, impl: str, state: torch.dtype, organization: str = "members") -> Row:
    """The same tokens in one call, alone."""
    batch = Batch(FAMILIES[name], organization, state=state, impl=impl, order="forward", keep_all=True)
    row = batch.start(LENGTH, seed)
    batch.advance([(row, LENGTH)])
    assert not row.out.isnan().any()
    return row


def differences(row: Row, full: Row, since: int = 0) -> int:
    outputs = (row.out[since : row.position], full.out[since : row.position])
    return differing_bits([outputs, *((v, full.states[at]) for at, v in row.states.items())])


def matches(name: str, seed: int, row: Row, impl: str, state: torch.dtype, since: int = 0) -> bool:
    return differences(row, whole(name, seed, impl, state), since) == 0


@st.composite
def plans(draw: st.DrawFn, chunk: int, *, decodes: bool) -> list[int]:
    """Tokens of a row's calls: decode steps over a chunk's end, or prefill cut at one; and cuts anywhere."""
    stop = draw(st.integers(2 * chunk + 2, min(LENGTH, 3 * chunk)))
    cuts = set(draw(st.lists(st.integers(1, stop - 1), max_size=2)))
    if decodes:
        end, run = chunk * draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2, 2, 3, 5, chunk]))
        cuts |= set(range(end - run, end + 2))
    else:
        cuts |= {chunk, chunk * draw(st.integers(1, 2))}
    return [b - a for a, b in itertools.pairwise([0, *sorted(cuts - {0}), stop])]


def histories(name: str, organizations: Sequence[str] = ORGANIZATIONS) -> st.SearchStrategy[dict]:
    chunk = FAMILIES[name].chunk
    return st.fixed_dictionaries(
        {
            "organization": st.sampled_from(organizations),
            "state": st.sampled_from([BF16, BF16, FP32]),
            "plans": st.tuples(plans(chunk, decodes=True), plans(chunk, decodes=False)),
            "tokens": st.tuples(st.integers(0, 2), st.integers(0, 2)),
            "spare": st.integers(0, 1),
            "seed": st.integers(0, 2**16),
            "order": st.sampled_from(["forward", "reverse", "shuffle"]),
        }
    )


def run_history(name: str, impl: str, h: dict, fault: str | None = None) -> Found:
    """Two rows in pieces, now together and now alone, in either order; against each in one call elsewhere."""
    h = h | NEEDS.get(fault, {})
    state, organization = h["state"], h["organization"]
    batch = Batch(
        FAMILIES[name], organization, state=state, seed=h["seed"], impl=impl, order=h["order"], fault=fault
    )
    rows = [(batch.start(LENGTH, n), list(plan)) for n, plan in zip(h["tokens"], h["plans"], strict=True)]
    for call in itertools.count():
        steps = [(row, plan) for row, plan in rows if plan]
        if not steps:
            break
        if (call + h["seed"]) % 2:
            steps.reverse()
        if fault == "a window given to two rows" or (call > 1 and batch.rng.random() < 0.3):
            steps = steps[:1]
        batch.advance([(row, plan.pop(0)) for row, plan in steps], h["spare"])
    plain = "composite" if organization == "members" else "members"
    varied, bits = batch.varied | {"organization"}, 0
    for n, (row, _) in zip(h["tokens"], rows, strict=True):
        full = whole(name, n, impl, state, plain)
        bits += differences(row, full)
        if row.pages != {at: full.pages[at] for at in row.pages}:
            varied.add("page permutation")
    assert fault or batch.untouched()
    return Found(varied | {f"organization: {organization}", f"programs: {h['order']}"}, bits)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_depend_on_the_tokens_before_alone(name, impl):
    count = 20 if impl == "reference" else 5  # about a second each under the interpreter
    census = search(histories(name), functools.partial(run_history, name, impl), count)
    assert set(PROPERTIES) <= set(census.varied)


@pytest.mark.nightly
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_depend_on_the_tokens_before_alone_many(name, impl):
    each = [histories(name, [organization]) for organization in ORGANIZATIONS]
    survey(f"{name}, {impl}", PROPERTIES, each, functools.partial(run_history, name, impl))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_planted_fault_is_found(name, impl, fault):
    assert finds(histories(name), lambda h: run_history(name, impl, h, fault))


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
    full = whole("ssd", 0, "triton", BF16)  # kept for other tests: with the tile as it is
    monkeypatch.setitem(ssd_kernels._ROWS["default"], 2, ssd_kernels._ROWS["default"][2] | {"BK": 16})
    batch = Batch(FAMILIES["ssd"])
    row = batch.start(LENGTH, 0)
    batch.advance([(row, LENGTH)])
    assert not same(row.out, full.out)
    assert relative(row.out, full.out.double()) < 1e-6


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_another_chunk_changes_bits(name, impl, monkeypatch):
    family = FAMILIES[name]._replace(
        chunk=48 - FAMILIES[name].chunk
    )  # 16 where it is 32, and 32 where it is 16
    if name == "delta":
        for module in (units, delta_ops, delta_reference, delta_kernels):
            monkeypatch.setattr(module, "DELTA_CHUNK", family.chunk)
    batch = Batch(family, impl=impl, keep_all=True)
    row = batch.start(LENGTH, 0)
    batch.advance([(row, LENGTH)])
    full = whole(name, 0, impl, BF16)
    assert not same(row.states[64], full.states[64])
    assert relative(row.out, full.out.double()) < 1e-2


@pytest.mark.parametrize("state", [BF16, FP32])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_decode_that_advances_the_state_at_every_token_gives_other_bits(name, impl, state):
    """What engines do: the same function of the same tokens, but other sums, and (bf16) rounded at every token."""
    batch = Batch(FAMILIES[name], state=state, impl=impl)
    family, s, row = batch.family, batch.storage, batch.start(LENGTH, 0)
    batch.advance([(row, family.chunk)])
    op, extra = (
        (ops.state_update, {}) if name == "ssd" else (ops.delta_update, {"scale": family.key_dim**-0.5})
    )
    for n in range(family.chunk, 2 * family.chunk):
        members = i32([row.members.members])
        op(
            s.pool, members, members, **{k: v[n : n + 1] for k, v in row.tokens.items()}, **family.constants(),
            out=row.out[n : n + 1], granule=s.granule(state), heads_per_member=s.heads_per_member, impl=impl, **extra,
        )  # fmt: skip
    full, decoded = whole(name, 0, impl, state), slice(family.chunk, 2 * family.chunk)
    for mine, theirs in (
        (row.out[decoded], full.out[decoded]),
        (s.state(row.members), full.states[2 * family.chunk]),
    ):
        assert not same(mine, theirs)
        assert relative(mine, theirs.double()) < 2e-2


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
    batch.turns = itertools.cycle([True])  # fold in place
    batch.advance([(first, chunk)])
    assert first.members == second.members
    batch.advance([(second, chunk)])
    assert not matches(name, 0, second, impl, BF16, since=chunk)
