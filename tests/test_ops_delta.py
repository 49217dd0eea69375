"""The gated delta rule in chunks: the twin under the guard, fp64, the error over a long run, bad input."""

import pytest
import torch

from hybridkv import ops
from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.testing.guard import guard
from hybridkv.units import delta_window
from tests.batches import Batch
from tests.recurrent import (
    ABSENT,
    BF16,
    FP32,
    Delta,
    Storage,
    budget,
    check_registered,
    i32,
    relative,
    same,
)

IMPLS = ["reference", "triton"]
Tensor = torch.Tensor
FP16 = torch.float16


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def recurrence(
    f: Delta, tokens: dict[str, Tensor], constants: dict[str, Tensor], store: torch.dtype | None = None
) -> tuple[Tensor, dict[int, Tensor]]:
    """Token by token in fp64, and the state after each; `store` rounds it every time."""
    t, c = ({k: v.double() for k, v in d.items()} for d in (tokens, constants))
    S, ys, states = torch.zeros(f.heads, f.key_dim, f.value_dim, dtype=torch.float64), [], {}
    q, k = (t[n].repeat_interleave(f.heads // f.key_heads, 1) for n in "qk")
    decay, beta = torch.exp(c["A"] * torch.nn.functional.softplus(t["a"] + c["bias"])), torch.sigmoid(t["b"])
    for n in range(len(k)):
        S = S * decay[n][:, None, None]
        v = beta[n][:, None] * (t["v"][n] - (S * k[n][..., None]).sum(1))
        S = S + k[n][..., None] * v[:, None]
        ys.append((S * q[n][..., None]).sum(1) * f.key_dim**-0.5)
        S = S if store is None else S.to(store).double()
        states[n + 1] = S
    return torch.stack(ys), states


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("state", [BF16, FP32])
def test_a_mixed_batch_equals_its_twin(dtype, state):
    """Decode, a row that ends one chunk and fills the next window, no tokens, whole chunks; absent, kept, in place."""
    f = Delta(key_heads=1, heads=2, dtype=dtype)
    s = Storage("members", f.heads, f.head_elements, 24, state, units=60)
    counts, positions, ends = [1, 40, 0, 23, 2], [5, 7, 3, 16, 1], 3
    src = [s.take(), s.take(), s.take(), s.nothing(), s.take()]
    for placed in (*src[:3], src[4]):
        s.put(placed, torch.randn(f.heads * f.head_elements) / 4)
    where = [[s.take() for _ in range(ends)] for _ in counts]
    where[1] = [s.nothing(), src[1], where[1][1]]
    starts = i32([0, *torch.tensor(counts).cumsum(0)])
    w, step = delta_window(f.key_heads, f.key_dim, f.heads, f.value_dim, dtype.itemsize), 16 // dtype.itemsize
    windows = torch.full((5 * w.size,), float("nan"), dtype=dtype)
    for n, position in enumerate(positions):
        unit, known, old = windows[n * w.size : (n + 1) * w.size], position % 16, f.tokens(16, n + 50)
        for at, part in ((0, old["k"]), (w.second, old["v"]), (w.third, old["a"])):
            unit[at : at + part[:known].numel()] = part[:known].flatten()
    entries = i32([n * w.size // step for n in range(4)] + [ABSENT])
    total, bits = int(starts[-1]), []
    raw, kept = s.raw.clone(), windows.clone()
    tokens = f.tokens(total, 0)
    for impl in IMPLS:
        s.raw.copy_(raw)
        windows.copy_(kept)
        out = f.output(total)
        with guard(order="shuffle"):
            ops.delta_rule(
                s.pool, i32([p.members for p in src]), i32([[p.members for p in r] for r in where]), windows, entries,
                starts, i32(positions), **tokens, **f.constants(), out=out, granule=s.granule(state),
                heads_per_member=s.heads_per_member, window_granule=step, scale=f.key_dim**-0.5, max_tokens=40,
                impl=impl,
            )  # fmt: skip
        bits.append((out, s.pool.clone(), windows.clone()))
    (y0, p0, w0), (y1, p1, w1) = bits
    assert y0[total - 2 :].isnan().all()
    assert y1[total - 2 :].isnan().all()
    assert relative(y1[: total - 2], y0[: total - 2].double()) < 1e-3
    for a, b in ((p1, p0), (w1, w0)):
        assert torch.equal(a.isnan(), b.isnan())
        here = ~a.isnan()
        assert relative(a[here], b[here].double()) < 1e-3  # a rounding may tip over
    for n, (count, position) in enumerate(zip(counts, positions, strict=True)):
        done = (position + count) // 16 - position // 16
        for placed in where[n][0 if n == 4 else done :]:
            assert s.state(placed).isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("organization", ["members", "striped"])
def test_prefill_against_fp64(impl, organization):
    f = Delta()
    batch = Batch(f, organization, impl=impl)
    row = batch.start(75, 5)
    batch.advance([(row, 75)])
    y, states = recurrence(f, row.tokens, f.constants())
    # Values solved from rounded ones, weights and states: three roundings of independent operands under the output's.
    assert relative(row.out, y) <= budget(y, BF16)
    for at, state in row.states.items():
        assert relative(state.view(states[at].shape), states[at]) <= budget(states[at], BF16)
    assert batch.untouched()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_prefill_in_other_dtypes_against_fp64(impl, dtype):
    f = Delta(dtype=dtype)
    batch = Batch(f, state=FP32, impl=impl)
    row = batch.start(70, 6)
    batch.advance([(row, 70)])
    y, states = recurrence(f, row.tokens, f.constants())
    assert relative(row.out, y) <= (1e-6 if dtype == FP32 else budget(y, dtype))
    last = states[64]
    assert relative(row.states[64].view(last.shape), last) <= (1e-6 if dtype == FP32 else 1e-3)


def test_one_key_head_of_qwen3_next():
    """128 x 128 for two value heads, all tiles as on a GPU."""
    f = Delta(key_heads=1, heads=2, key_dim=128, value_dim=128)
    rows = []
    for impl in IMPLS:
        batch = Batch(f, "composite", impl=impl, units=8)
        row = batch.start(40, 1)
        for n in (17, 1, 22):
            batch.advance([(row, n)])
        rows.append(row)
    y, states = recurrence(f, rows[0].tokens, f.constants())
    for row in rows:
        assert relative(row.out, y) <= budget(y, BF16)
        assert relative(row.states[32].view(states[32].shape), states[32]) <= budget(states[32], BF16)


def test_error_over_2048_tokens(capsys):
    """Relative L2 per head over a range of memories, then the mean, against a state rounded at every token."""
    f = Delta(key_heads=3, heads=9, key_dim=32, value_dim=32)
    decay = torch.tensor([1e-3, 1e-2, 1e-1])
    constants = {
        "A": -torch.tensor([1.0, 4.0, 16.0]).repeat_interleave(3) / 4,
        "bias": torch.log(torch.expm1(decay)).repeat(3),
    }
    tokens = f.tokens(2048, 0)
    tokens["a"] = (tokens["a"].float() / 2).to(BF16)
    size, ends = f.heads * f.head_elements, 2048 // 16
    pool, out = torch.zeros(size, dtype=BF16), torch.empty(2048, 9, 32, dtype=BF16)
    where = torch.full((1, ends, 1), ABSENT, dtype=torch.int32)
    where[0, -1] = 0
    ops.delta_rule(
        pool, i32([[ABSENT]]), where, torch.full((f.window_size,), float("nan"), dtype=BF16), i32([0]), i32([0, 2048]),
        i32([0]), **tokens, **constants, out=out, granule=8, heads_per_member=9, window_granule=8,
        scale=f.key_dim**-0.5, max_tokens=2048,
    )  # fmt: skip
    y, states = recurrence(f, tokens, constants)
    rounded, kept = recurrence(f, tokens, constants, BF16)

    def error(a: Tensor, state: Tensor) -> tuple[float, float]:
        heads = (a.double() - y).norm(dim=(0, 2)) / y.norm(dim=(0, 2))
        last = (state.double().view(states[2048].shape) - states[2048]).norm(dim=(1, 2)) / states[2048].norm(
            dim=(1, 2)
        )
        return heads.mean().item(), last.mean().item()

    chunked, every, once = (
        error(out, pool),
        error(rounded.to(BF16), kept[2048]),
        error(y.to(BF16), states[2048].to(BF16)),
    )
    with capsys.disabled():
        print("\nrelative error over 2,048 tokens, mean over heads: output, final state")
        for name, (a, b) in (
            ("exact, rounded once", once),
            ("chunks of 16", chunked),
            ("bf16 state, every token", every),
        ):
            print(f"  {name:26s}{a:.2e}  {b:.2e}")
    assert chunked[0] < every[0]
    assert chunked[1] < every[1]


def test_entries_beyond_2_31_elements():
    """E3 (sglang #20389): members and windows far out."""
    f = Delta(key_heads=1, heads=1)
    size, entry = f.head_elements, 2**31 // 8 + 5
    big, small = torch.empty(2**31 + 2**16, dtype=BF16), torch.zeros(2**16, dtype=BF16)
    state, tokens, results, step = torch.randn(size).to(BF16), f.tokens(20, 0), [], size // 8
    for pool, at in ((big, entry), (small, 0)):
        pool[at * 8 : at * 8 + size] = state
        out = f.output(20)
        ops.delta_rule(
            pool, i32([[at]]), i32([[[at + step], [ABSENT]]]), pool, i32([at + 2 * step]), i32([0, 20]), i32([32]),
            **tokens, **f.constants(), out=out, granule=8, heads_per_member=1, window_granule=8, scale=1.0,
            max_tokens=20, impl="triton",
        )  # fmt: skip
        known = 4 * f.key_dim
        results.append(
            (out, pool[(at + step) * 8 :][:size].clone(), pool[(at + 2 * step) * 8 :][:known].clone())
        )
    assert all(same(a, b) for a, b in zip(*results, strict=True))


# ------------------------------------------------------------------------------------------- bad input
F = Delta()


def arguments() -> dict:
    return {
        "pool": torch.zeros(2**15, dtype=BF16), "src_members": i32([[0]]), "boundaries": i32([[[512], [1024]]]),
        "window_pool": torch.zeros(4096, dtype=BF16), "windows": i32([0]), "starts": i32([0, 20]),
        "positions": i32([0]), **F.tokens(20, 0), **F.constants(), "out": F.output(20), "granule": 8,
        "heads_per_member": 3, "window_granule": 8, "scale": 1.0, "max_tokens": 20,
    }  # fmt: skip


def call(**changes: object) -> None:
    ops.delta_rule(**arguments() | changes)


BAD = [
    ({"boundaries": i32([[[512]]])}, UsageError, r"boundaries.shape\[1\] must be at least 2, got 1"),
    ({"boundaries": i32([[[512], [4000]]])}, UsageError, "boundaries must be below"),
    ({"boundaries": i32([[[512], [600]]])}, UsageError, "boundaries must be at least 192 entries apart"),
    ({"boundaries": i32([[[100], [1024]]])}, UsageError, "boundaries must be disjoint from src_members"),
    ({"window_pool": torch.zeros(4096)}, UsageError, "window_pool.dtype must be torch.bfloat16"),
    ({"windows": i32([400])}, UsageError, "windows must be below"),
    ({"starts": i32([0, 30])}, UsageError, "starts must be rising from 0 to at most 20"),
    ({"positions": i32([-1])}, UsageError, "positions must be at least 0, got -1"),
    ({"positions": i32([0, 0])}, UsageError, r"positions.shape must be \[1\]"),
    ({"max_tokens": 16, "boundaries": i32([[[512]]])}, UsageError, "max_tokens must be at least 20, got 16"),
    ({"k": torch.zeros(20, 2, 32, dtype=BF16), "q": torch.zeros(20, 2, 32, dtype=BF16)}, UnsupportedError,
     r"k.shape\[1\] must be a divisor of 3 value heads, got 2"),
    ({"q": torch.zeros(20, 1, 32)}, UsageError, "q.dtype must be"),
    ({"v": torch.zeros(20, 3, 24, dtype=BF16)}, UnsupportedError, r"v.shape\[2\] must be a power of two"),
    ({"v": torch.zeros(20, 3, 512, dtype=BF16)}, UnsupportedError, r"v.shape\[2\] must be a power of two"),
    ({"a": torch.zeros(20, 3)}, UsageError, "a.dtype must be torch.bfloat16"),
    ({"A": torch.zeros(3, dtype=BF16)}, UsageError, "A.dtype must be torch.float32"),
    ({"out": torch.zeros(20, 3, 32)}, UsageError, "out.shape must be"),
    ({"k": torch.zeros(20, 36, dtype=BF16)[:, None, :32]}, UsageError, r"k.stride\(0\) must be a multiple of 8, got 36"),
    ({"out": torch.zeros(20, 3, 16, device="meta")}, UsageError, "out.device must be cpu, got meta"),
    ({"heads_per_member": 2}, UsageError, r"src_members.shape\[1\] must be 2 for 3 heads, got 1"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_input_is_refused_before_a_launch(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize("impl", IMPLS)
def test_good_and_empty_batches(impl):
    call(impl=impl)
    call(starts=i32([0, 0]), max_tokens=0, impl=impl)
    none = i32([])
    call(
        src_members=none.view(0, 1), boundaries=none.view(0, 2, 1), windows=none, starts=i32([0]), positions=none,
        impl=impl,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # opcheck's own deprecations
def test_the_op_is_registered_as_it_is():
    check_registered(ops.delta_rule, arguments())
