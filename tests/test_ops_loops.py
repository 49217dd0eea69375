"""Last-exited KV of looped models: the fill is a move, and reading by depth gives the bits that filling gives."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv import ops
from hybridkv.errors import UsageError
from hybridkv.testing.guard import guard
from tests.census import Found, differing_bits, search, survey
from tests.paged import indices, same

IMPLS = ["reference", "triton"]
LAYOUT = ops.KVLayout.token_major(2, 16, 16, 64)
PLANES = 3


class Looped:
    """Sequences whose tokens were written up to the plane they exited at, in shuffled blocks of a poisoned pool."""

    def __init__(self, lengths, exits, layout=LAYOUT, dtype=torch.bfloat16, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.lengths, self.layout, self.dtype = lengths, layout, dtype
        self.exits = torch.full((len(lengths), max(lengths)), -1, dtype=torch.int32)
        blocks = [-(-n // layout.block_tokens) for n in lengths]
        step = -(-layout.extent // layout.granule)
        count = PLANES * sum(blocks) + 2
        places = (torch.randperm(count, generator=g) * step).tolist()
        self.pool = torch.full((count * step * layout.granule,), float("nan"), dtype=dtype)
        self.table = torch.full((len(lengths), PLANES, max(blocks)), -1, dtype=torch.int32)
        for i, n in enumerate(lengths):
            self.exits[i, :n] = indices(*exits[i])
            for plane in range(PLANES):
                self.table[i, plane, : blocks[i]] = indices(*(places.pop() for _ in range(blocks[i])))
                at = torch.arange(n, dtype=torch.int32)[self.exits[i, :n] >= plane]
                key, value = (torch.randn(len(at), 2, 16, generator=g).to(dtype) for _ in "kv")
                rows = torch.zeros_like(at)
                ops.write_kv(self.pool, key, value, self.table[i, plane][None], rows, at, layout=layout)
        self.query = torch.randn(len(lengths), 6, 16, generator=g).to(dtype)

    def tokens(self):
        rows = [i for i, n in enumerate(self.lengths) for _ in range(n)]
        return indices(*rows), indices(*(p for n in self.lengths for p in range(n)))

    def filled(self, impl, order="forward"):
        pool = self.pool.clone()
        with guard(order=order):
            ops.fill_exited(pool, self.table, *self.tokens(), self.exits, layout=self.layout, impl=impl)
        return pool

    def attend(self, pool, depths, impl, *, by_exit):
        """Decode the newest position of every sequence at its depth."""
        n = len(self.lengths)
        out = torch.full(self.query.shape, float("nan"))
        if by_exit:
            where = {"exits": self.exits, "depths": indices(*depths)}
            table, rows = self.table, indices(*range(n))
        else:
            where, table = {}, self.table.flatten(0, 1)
            rows = indices(*(i * PLANES + d for i, d in enumerate(depths)))
        workspace = torch.empty(ops.decode_workspace(n, 6, table, self.layout))
        with guard(order="shuffle"):
            ops.decode_attention(
                pool, self.query, table, rows, indices(*self.lengths), out, workspace,
                layout=self.layout, impl=impl, **where,
            )  # fmt: skip
        return out


PROPERTIES = ["batch composition", "tokens exited below the plane that is read"]


@st.composite
def looped(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=2, max_size=3))
    exits = [draw(st.lists(st.integers(0, PLANES - 1), min_size=n, max_size=n)) for n in lengths]
    depths = [draw(st.integers(0, PLANES - 1)) for _ in lengths]
    exits[0][0], depths[0] = 0, max(1, depths[0])
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    return Looped(lengths, exits, dtype=dtype, seed=draw(st.integers(0, 9))), depths


def read_and_fill(impl, case):
    s, depths = case
    by_exit = s.attend(s.pool, depths, impl, by_exit=True)
    assert not by_exit.isnan().any()
    below = any(0 <= e < d for exits, d in zip(s.exits.tolist(), depths, strict=True) for e in exits)
    varied = {"batch composition"} | ({"tokens exited below the plane that is read"} if below else set())
    return Found(varied, differing_bits([(by_exit, s.attend(s.filled(impl), depths, impl, by_exit=False))]))


@pytest.mark.parametrize("impl", IMPLS)
def test_reading_by_depth_equals_reading_what_was_filled(impl):
    search(looped(), functools.partial(read_and_fill, impl), 20)


@pytest.mark.nightly
@pytest.mark.parametrize("impl", IMPLS)
def test_reading_by_depth_equals_reading_what_was_filled_many(impl):
    survey(f"loop fill, {impl}", PROPERTIES, [looped()], functools.partial(read_and_fill, impl))


@given(looped())
@settings(max_examples=25)
def test_the_fill_is_a_move_and_equals_its_reference_over_the_whole_pool(case):
    s, _ = case
    want = s.filled("reference")
    assert same(s.filled("triton", order="shuffle"), want)
    for i, n in enumerate(s.lengths):
        for p in range(n):
            exited = int(s.exits[i, p])
            lines = []
            for plane in range(PLANES):
                at = int(s.table[i, plane, p // 16]) * 64 + p % 16 * 32
                lines.append(torch.cat([want[at : at + 32], want[at + 512 : at + 544]]))
            assert not torch.stack(lines).isnan().any()
            assert all(same(line, lines[exited]) for line in lines[exited + 1 :])


def test_prefill_reads_by_depth_too():
    s = Looped([40], [[p % PLANES for p in range(40)]])
    query = torch.randn(3, 6, 16).to(s.dtype)
    start, n = indices(0, 3), indices(40)
    for impl in IMPLS:
        a, b = torch.empty(3, 6, 16), torch.empty(3, 6, 16)
        options = {"layout": LAYOUT, "max_query": 3, "impl": impl}
        with guard():
            ops.prefill_attention(
                s.pool, query, start, s.table, indices(0), n, a, exits=s.exits, depths=indices(1), **options
            )
            ops.prefill_attention(s.filled(impl), query, start, s.table[:, 1], indices(0), n, b, **options)
        assert same(a, b)


@pytest.mark.parametrize("impl", IMPLS)
def test_control_without_the_fill_or_with_another_plane_the_bits_differ(impl):
    s = Looped([40], [[0] * 20 + [2] * 20])
    want = s.attend(s.pool, [2], impl, by_exit=True)
    assert s.attend(s.pool, [2], impl, by_exit=False).isnan().any()
    s.exits[0, 20:] = 1  # planted: tokens that reached plane 2 are read at plane 1
    assert not same(s.attend(s.pool, [2], impl, by_exit=True), want)


@pytest.mark.parametrize("impl", IMPLS)
def test_absent_tokens_are_skipped(impl):
    s = Looped([20], [[0] * 20])
    s.table[0, 2, 1] = -1
    before = s.pool.clone()
    rows, positions = indices(-1, 0, 0, 0), indices(3, -1, 5, 17)
    s.exits[0, 5] = -1  # has not exited
    with guard():
        ops.fill_exited(s.pool, s.table, rows, positions, s.exits, layout=LAYOUT, impl=impl)
    changed = (s.pool.view(torch.int16) != before.view(torch.int16)).nonzero().flatten()
    at = int(s.table[0, 1, 1]) * 64 + 32
    assert changed.tolist() == [*range(at, at + 32), *range(at + 512, at + 544)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": torch.zeros(1, 3, dtype=torch.int32)}, "table.shape must be \\[any, any, any\\]"),
        ({"exits": torch.full((1, 20), PLANES, dtype=torch.int32)}, "exits must be below 3, got 3"),
        ({"positions": indices(32)}, "positions must be below 20, got 32"),
        ({"rows": indices(1)}, "rows must be below 1, got 1"),
        ({"table": torch.zeros(1, 3, 2, dtype=torch.int32)}, "table .* must be at least 1 entries apart"),
        ({"table": indices(0, 0, 32, 64, 96, 128).view(3, 2).view(1, 3, 2) * 0 + indices(0, 9, 0)[None, :, None]},
         "table .* must be disjoint from the planes that tokens exited at"),
    ],
)  # fmt: skip
def test_bad_input_is_named(change, message):
    s = Looped([20], [[0] * 20])
    args = {"pool": s.pool, "table": s.table, "rows": indices(0), "positions": indices(3), "exits": s.exits}
    ops.fill_exited(**args, layout=LAYOUT)
    with pytest.raises(UsageError, match=message):
        ops.fill_exited(**args | change, layout=LAYOUT)


def test_fill_passes_opcheck():
    s = Looped([20], [[0] * 20])
    for impl in IMPLS:
        torch.library.opcheck(
            torch.ops.hybridkv.fill_exited.default,
            (s.pool.nan_to_num(), s.table, indices(0, 0), indices(3, 4), s.exits),
            {"layout": list(LAYOUT), "impl": impl},
        )
