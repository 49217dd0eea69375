"""Copy, zero, gather, scatter: the kernel equals the reference over the whole pool, poison included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridkv import ops
from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.ops._register import register
from hybridkv.testing.guard import guard

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]


def raw(*shape, dtype=torch.bfloat16, seed=0):
    """Any bytes at all, NaN patterns included."""
    g = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (size,), generator=g, dtype=torch.uint8).view(dtype).view(shape)


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def table(*entries):
    return torch.tensor(entries, dtype=torch.int32)


def both(op, mutated, *args, order="shuffle", **kwargs):
    """Run an op by its reference and by its kernel on copies; return what each left in args[mutated]."""
    out = []
    for impl in ("reference", "triton"):
        mine = [a.clone() if i == mutated else a for i, a in enumerate(args)]
        with guard(order=order):
            op(*mine, impl=impl, **kwargs)
        out.append(mine[mutated])
    assert not same(out[0], args[mutated]), "the case changes nothing"
    assert same(out[0], out[1])
    return out[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_equals_its_reference_and_leaves_the_rest_alone(dtype):
    granule, unit = 32, 72  # units of more than two granules, whose rest belongs to nobody
    pool = raw(32 * 30, dtype=dtype)
    source, destination = table(0, -1, 5, 12, 27, -1), table(9, 18, -1, 12, 3, -1)
    got = both(ops.copy_units, 0, pool, source, destination, granule=granule, unit=unit)
    want = pool.clone()
    want[9 * 32 : 9 * 32 + 72] = pool[:72]
    want[18 * 32 : 18 * 32 + 72] = 0
    want[3 * 32 : 3 * 32 + 72] = pool[27 * 32 : 27 * 32 + 72]
    assert same(got, want)


@given(st.data())
def test_copy_of_any_tables(data):
    units, granule = 12, 16
    per_unit = data.draw(st.integers(1, 3))
    unit = per_unit * granule - data.draw(st.sampled_from([0, 8]))
    places = data.draw(st.permutations(range(0, units * per_unit, per_unit)))
    n = data.draw(st.integers(0, units // 2))
    absent = st.lists(st.booleans(), min_size=n, max_size=n)
    read = [-1 if gone else e for gone, e in zip(data.draw(absent), places[:n], strict=True)]
    write = [-1 if gone else e for gone, e in zip(data.draw(absent), places[units - n :], strict=True)]
    pool = raw(units * per_unit * granule, seed=n)
    want = pool.clone()
    for r, w in zip(read, write, strict=True):
        if w >= 0:
            want[w * granule : w * granule + unit] = 0 if r < 0 else pool[r * granule : r * granule + unit]
    for impl in ("reference", "triton"):
        got = pool.clone()
        with guard(order="reverse"):
            ops.copy_units(got, table(*read), table(*write), granule=granule, unit=unit, impl=impl)
        assert same(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_equals_its_reference(dtype):
    pool = raw(16 * 40, dtype=dtype)
    got = both(ops.zero_units, 0, pool, table(3, -1, 20), granule=16, unit=40)
    want = pool.clone()
    want[48:88] = want[320:360] = 0
    assert same(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 80, 65])
def test_gather_and_scatter_are_inverse_moves(dtype, size):
    pool, unit = raw(64 * 16, dtype=dtype), 32  # three members of 32, the last used in part
    members = table([0, 7, 30], [44, -1, 12])
    wide = torch.zeros(2, 128, dtype=dtype)
    dense = both(ops.gather_units, 2, pool, members, wide[:, :size], granule=16, unit=unit)
    flat = [pool[e * 16 : e * 16 + 32] if e >= 0 else torch.zeros(32, dtype=dtype) for e in members.flatten()]
    assert same(dense, torch.cat(flat).view(2, 96)[:, :size])
    moved = table([8, 2, 20], [50, -1, 60])
    got = both(ops.scatter_units, 0, pool, moved, dense, granule=16, unit=unit)
    back = torch.zeros(2, size, dtype=dtype)
    ops.gather_units(got, moved, back, granule=16, unit=unit, impl="triton")
    assert same(back, dense)
    for row, entries in enumerate(moved.tolist()):
        for member, entry in enumerate(entries):
            used = min(32, size - 32 * member)
            if entry >= 0:
                assert same(
                    got[entry * 16 + used : entry * 16 + 32], pool[entry * 16 + used : entry * 16 + 32]
                ), row


def test_units_larger_than_a_program():
    pool = raw(3 * 20000)
    got = both(ops.copy_units, 0, pool, table(2), table(0), granule=20000, unit=20000)
    assert same(got[:20000], pool[40000:])
    assert same(got[20000:], pool[20000:])


def test_entries_beyond_2_31_elements():
    pool = torch.empty((1 << 31) + (1 << 20), dtype=torch.bfloat16)  # lazily: four touched pages
    high = (1 << 31) // 16 + 3
    pool[high * 16 : high * 16 + 16] = raw(16)
    for impl in ("reference", "triton"):
        with guard():
            ops.copy_units(pool, table(high), table(high + 5), granule=16, unit=16, impl=impl)
            ops.copy_units(pool, table(high + 5), table(0), granule=16, unit=16, impl=impl)
        assert same(pool[:16], raw(16))
        assert same(pool[(high + 5) * 16 : (high + 6) * 16], raw(16))
        ops.zero_units(pool, table(0, high + 5), granule=16, unit=16)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_empty_tables_do_nothing(impl):
    pool = raw(64)
    before, none = pool.clone(), torch.empty(0, dtype=torch.int32)
    ops.copy_units(pool, none, none, granule=16, unit=16, impl=impl)
    ops.zero_units(pool, none, granule=16, unit=16, impl=impl)
    ops.scatter_units(
        pool, none.view(0, 2), torch.empty(0, 20, dtype=pool.dtype), granule=16, unit=16, impl=impl
    )
    assert same(pool, before)


POOL = torch.zeros(256, dtype=torch.bfloat16)
BAD = [
    ({"pool": POOL.view(16, 16)}, "pool.shape must be"),
    ({"pool": POOL.to(torch.complex64)}, "pool.dtype must be"),
    ({"pool": POOL[::2]}, "pool.stride\\(-1\\) must be 1, got 2"),
    ({"pool": torch.zeros(257, dtype=torch.bfloat16)[1:]}, "pool.data_ptr\\(\\) must be a multiple of 16"),
    ({"granule": 4}, "granule must be a positive multiple of 16 bytes, got 8 bytes"),
    ({"granule": 0}, "granule must be"),
    ({"unit": 0}, "unit must be positive, got 0"),
    ({"source": torch.zeros(2, dtype=torch.int64)}, "source.dtype must be torch.int32, got torch.int64"),
    ({"source": torch.zeros(2, dtype=torch.int32, device="meta")}, "source.device must be cpu, got meta"),
    ({"destination": table(1, 2, 3)}, "destination.shape must be \\[2\\], got \\[3\\]"),
    ({"source": table(0, 16)}, "source must be below 16, got 16"),
    ({"destination": table(16, 1)}, "destination must be below 16, got 16"),
    ({"unit": 17, "destination": table(15, 1)}, "destination must be below 15, got 15"),
    (
        {"destination": table(3, 3)},
        "destination must be at least 1 entries apart from each other, got 3 and 3",
    ),
    ({"unit": 20, "destination": table(3, 4)}, "destination must be at least 2 entries apart"),
    (
        {"source": table(0, 5), "destination": table(5, 9)},
        "destination must be disjoint from source, got 5 against 5",
    ),
    ({"source": table(5, 5), "destination": table(5, 9)}, "only a unit's own source"),
    (
        {"unit": 20, "source": table(0, 4), "destination": table(5, 9)},
        "destination must be disjoint from source",
    ),
    ({"impl": "cuda"}, "impl must be one of reference, triton, got 'cuda'"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_named_before_anything_moves(change, message):
    good = {"pool": POOL, "source": table(0, 1), "destination": table(2, 3), "granule": 16, "unit": 16}
    ops.copy_units(**good)
    with pytest.raises(UsageError, match=message):
        ops.copy_units(**good | change)


def test_bad_dense_rows_are_named():
    for shape, message in (
        ((2, 32), "out.shape"),
        ((1, 33), "out.shape\\[1\\] must be between 17 and 32, got 33"),
    ):
        with pytest.raises(UsageError, match=message):
            ops.gather_units(POOL, table([0, 1]), torch.zeros(shape, dtype=POOL.dtype), granule=16, unit=16)
    with pytest.raises(UsageError, match=r"values.dtype must be torch.bfloat16, got torch.float32"):
        ops.scatter_units(POOL, table([0, 1]), torch.zeros(1, 32), granule=16, unit=16)
    with pytest.raises(UsageError, match="table must be at least"):
        ops.scatter_units(POOL, table([0, 0]), torch.zeros(1, 32, dtype=POOL.dtype), granule=16, unit=16)


def test_triton_without_its_interpreter_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UnsupportedError, match="impl must be 'reference' for tensors on a CPU"):
        ops.zero_units(POOL, table(0), granule=16, unit=16, impl="triton")


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_ops_work_under_compile_and_pass_opcheck(impl):
    args = (table(0, -1), table(2, 3))
    torch.library.opcheck(
        torch.ops.hybridkv.copy_units.default, (raw(256), *args), {"granule": 16, "unit": 16, "impl": impl}
    )
    members = table([0, 1], [2, -1])
    dense = raw(2, 32, seed=1)
    for name in ("gather_units", "scatter_units"):
        op = getattr(torch.ops.hybridkv, name).default
        torch.library.opcheck(op, (raw(256), members, dense), {"granule": 16, "unit": 16, "impl": impl})

    def step(pool):
        ops.copy_units(pool, *args, granule=16, unit=16, impl=impl)
        ops.zero_units(pool, args[0], granule=16, unit=16, impl=impl)
        return pool.view(torch.int16).sum()

    eager, traced = raw(256), raw(256)
    total = step(eager)
    assert torch.compile(step, fullgraph=True, backend="aot_eager")(traced) == total
    assert same(eager, traced)


def test_compiled_code_still_refuses_what_is_out_of_range():
    def step(pool, where):
        ops.zero_units(pool, where, granule=16, unit=16)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    compiled(raw(256), table(1))
    with pytest.raises(UsageError, match="destination must be below 16, got 99"):
        compiled(raw(256), table(99))


def test_a_reference_without_annotations_cannot_be_registered():
    with pytest.raises(AttributeError):
        register("moves", "no_such_op", mutates=[])
