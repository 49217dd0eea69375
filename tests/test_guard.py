"""Each repair of the interpreter, and each fault that the guard must find."""

import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interp

from hybridkv.testing.guard import HazardError, MisalignedError, OutOfBoundsError, guard

BF16 = torch.bfloat16


@triton.jit
def _dot(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(x, y))


@triton.jit
def _map(x, y, out, N: tl.constexpr, OP: tl.constexpr):
    o = tl.arange(0, N)
    a = tl.load(x + o)
    if OP == "cast":
        tl.store(out + o, a.to(out.dtype.element_ty))
    elif OP == "product":
        tl.store(out + o, a * tl.load(y + o))
    elif OP == "add":
        tl.store(out + o, a + tl.load(y + o))
    elif OP == "sub":
        tl.store(out + o, a - tl.load(y + o))
    elif OP == "less":
        tl.store(out + o, (a < tl.load(y + o)).to(tl.float32))
    elif OP == "sum":
        tl.store(out, tl.sum(a, 0))
    elif OP == "max":
        tl.store(out, tl.max(a, 0))
    elif OP == "cumsum":
        tl.store(out + o, tl.cumsum(a, 0))


@triton.jit
def _copy(x, y, N: tl.constexpr):
    o = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + o, tl.load(x + o))


@triton.jit
def _masked_copy(x, y, n, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(x + o, mask=o < n), mask=o < n)


@triton.jit
def _by_table(pool, table, out, stride: tl.int64, N: tl.constexpr, TEST: tl.constexpr):
    i = tl.program_id(0)
    entry = tl.load(table + i).to(tl.int64)
    o = tl.arange(0, N)
    if TEST:
        value = tl.load(pool + entry * stride + o, mask=(o < N) & (entry >= 0), other=0.0)
    else:
        value = tl.load(pool + entry * stride + o)
    tl.store(out + i * N + o, value)


@triton.jit
def _wide(y, i, stride: tl.int64):
    tl.store(y, tl.load(i) * stride)


@triton.jit
def _narrow(y, i, stride):
    tl.store(y, tl.load(i) * stride)


@triton.jit
def _shift_in_place(x, N: tl.constexpr):
    o = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(x + o + 1, tl.load(x + o))


@triton.jit
def _same_byte(x):
    tl.store(x, tl.program_id(0))


@triton.jit
def _count(x):
    tl.atomic_add(x, 1.0)


@triton.jit
def _log_order(log, n):
    tl.store(log + tl.atomic_add(n, 1), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1))


@triton.jit
def _positive(x):
    tl.device_assert(tl.load(x) > 0, "must be positive")


# ------------------------------------------------------------------------------------------ repairs
def test_bf16_dot_is_a_product_of_values_and_not_of_bit_patterns():
    a, b, c = torch.randn(32, 64).to(BF16), torch.randn(64, 16).to(BF16), torch.empty(32, 16)
    _dot[(1,)](a, b, c, 32, 16, 64)
    exact = a.double() @ b.double()
    assert (c.double() - exact).norm() / exact.norm() < 1e-6


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_casts_round_to_nearest_even(dtype):
    edges = torch.tensor(
        [float("inf"), -float("inf"), 3.4e38, 0.0, -0.0, 65504.0, 65520.0, 1.00390625, 1.01171875]
    )
    x = torch.cat([torch.randn(4000), torch.randn(4096 - 4000 - edges.numel()) * 1e-39, edges])
    out = torch.empty(4096, dtype=dtype)
    _map[(1,)](x, x, out, 4096, "cast")
    assert torch.equal(out.view(torch.int16), x.to(dtype).view(torch.int16))


def test_cast_keeps_nan():
    out = torch.empty(16, dtype=BF16)
    _map[(1,)](torch.full((16,), float("nan")), out, out, 16, "cast")
    assert out.isnan().all()


@pytest.mark.parametrize("op", ["product", "less", "sum", "max", "cumsum"])
def test_bf16_arithmetic(op):
    x, y = torch.randn(256).to(BF16), torch.randn(256).to(BF16)
    wide = x.float(), y.float()
    want = {
        "product": x * y,
        "less": (x < y).float(),
        "sum": wide[0].sum().to(BF16).reshape(1),
        "max": x.max().reshape(1),
        "cumsum": wide[0].cumsum(0).to(BF16),
    }[op]
    out = torch.empty_like(want)
    _map[(1,)](x, y, out, 256, op)
    torch.testing.assert_close(out, want, rtol=2**-7 if op in ("sum", "cumsum") else 0, atol=0)


def test_int64_annotation_is_honoured_and_int32_overflow_raises():
    y, i = torch.zeros(1, dtype=torch.int64), torch.tensor([70000], dtype=torch.int32)
    _wide[(1,)](y, i, 262144)
    assert y.item() == 70000 * 262144
    with pytest.raises(Exception, match="overflow"):
        _narrow[(1,)](y, i, 262144)


@pytest.mark.parametrize(
    ("op", "a", "b"), [("add", 2**31 - 2, 1), ("sub", 2 - 2**31, 2), ("product", 2**15, -(2**16))]
)
def test_int32_may_reach_its_limits_and_no_further(op, a, b):
    x, y, out = (torch.tensor([v], dtype=torch.int32) for v in (a, b, 0))
    _map[(1,)](x, y, out, 1, op)
    assert out.item() == {"add": a + b, "sub": a - b, "product": a * b}[op]
    y += 1 if op != "product" else -1
    with pytest.raises(Exception, match="int32 overflow detected"):
        _map[(1,)](x, y, out, 1, op)


def test_device_assert_raises():
    with pytest.raises(Exception, match="must be positive"):
        _positive[(1,)](torch.tensor([-1.0]))


def test_scalar_comparison_in_a_mask():
    pool, out = torch.randn(4, 16), torch.empty(3, 16)
    with guard():
        _by_table[(3,)](pool, torch.tensor([2, -1, 0], dtype=torch.int32), out, 16, 16, TEST=True)
    assert torch.equal(out, torch.stack([pool[2], torch.zeros(16), pool[0]]))


# ------------------------------------------------------------------------------------------ bounds
def test_lanes_past_the_end_are_found():
    with guard(), pytest.raises(OutOfBoundsError, match="load of 4 B: 28 of 128 lanes outside x"):
        _copy[(1,)](torch.randn(100), torch.empty(128), 128)
    with guard(), pytest.raises(OutOfBoundsError, match="store of 4 B: 28 of 128 lanes outside y"):
        _copy[(1,)](torch.randn(128), torch.empty(100), 128)


def test_masked_lanes_may_point_anywhere():
    x, y = torch.randn(100), torch.zeros(100)
    with guard():
        _masked_copy[(1,)](x, y, 100, 128)
    assert torch.equal(x, y)


def test_a_pointer_stays_in_its_own_tensor_even_where_another_argument_lies_behind_it():
    both = torch.randn(128)
    with guard(), pytest.raises(OutOfBoundsError, match="outside x"):
        _copy[(1,)](both[:64], both[64:], 128)


def test_views_are_bounds_of_their_own():
    view = torch.randn(4, 64)[1, :32]
    with guard(views=False):
        _copy[(1,)](view, torch.empty(64), 64)
    with guard(), pytest.raises(OutOfBoundsError):
        _copy[(1,)](view, torch.empty(64), 64)


def test_a_negative_entry_must_be_tested_before_an_address_is_formed():
    with guard(), pytest.raises(OutOfBoundsError):
        _by_table[(1,)](
            torch.randn(4, 16), torch.tensor([-1], dtype=torch.int32), torch.empty(16), 16, 16, TEST=False
        )


def test_misaligned_lanes_are_found():
    odd = torch.frombuffer(bytearray(65), dtype=torch.float32, offset=1)
    with (
        guard(),
        pytest.raises(MisalignedError, match="load of 4 B at an address that is not a multiple of 4"),
    ):
        _copy[(1,)](odd, torch.empty(16), 16)


# ------------------------------------------------------------------------------------------ hazards, order
def test_a_store_that_another_program_loads_is_a_hazard():
    with guard(), pytest.raises(HazardError, match="program"):
        _shift_in_place[(4,)](torch.randn(65), 16)


def test_two_stores_to_one_byte_are_a_hazard():
    with guard(), pytest.raises(HazardError, match="program 1 stores a byte that program 0 stored"):
        _same_byte[(2,)](torch.zeros(1, dtype=torch.int32))


def test_one_program_in_place_is_not_a_hazard_nor_are_atomics():
    x, n = torch.randn(64), torch.zeros(1)
    with guard():
        _copy[(4,)](x, x, 16)
        _count[(3,)](n)
    assert n.item() == 3


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffle"])
def test_programs_run_once_each_in_the_chosen_order(order):
    log, n = torch.full((12,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with guard(order=order, hazards=False):
        _log_order[(4, 3)](log, n)
    forward = list(range(12))
    assert sorted(log.tolist()) == forward
    assert (log.tolist() == forward) == (order == "forward")
    assert (log.tolist() == forward[::-1]) == (order == "reverse")


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="order must be"), guard(order="random"):
        pass


def test_the_interpreter_is_as_before_after_the_block():
    before = interp.InterpreterBuilder.create_masked_load, interp.GridExecutor.__call__, interp._implicit_cvt
    with guard():
        assert interp.GridExecutor.__call__ is not before[1]
    assert before == (
        interp.InterpreterBuilder.create_masked_load,
        interp.GridExecutor.__call__,
        interp._implicit_cvt,
    )


def test_storage_beyond_2_31_bytes_is_tracked_without_a_map_of_all_of_it():
    pool = torch.empty(3 << 30, dtype=torch.uint8)[: 3 << 30]  # lazily: 3 GiB of addresses, two touched pages
    table = torch.tensor([(3 << 26) - 1], dtype=torch.int32)
    pool[-16:] = 7
    out = torch.empty(16, dtype=torch.uint8)
    with guard():
        _by_table[(1,)](pool, table, out, 16, 16, TEST=False)
    assert (out == 7).all()
