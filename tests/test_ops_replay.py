"""SSD as prefill and replay decode: the twin under the guard, fp64, the error over a long run, rollback, bad input."""

import pytest
import torch

from hybridkv import ops
from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.testing.guard import guard
from hybridkv.units import ssd_window
from tests.batches import Batch
from tests.recurrent import (
    ABSENT,
    BF16,
    FP32,
    Ssd,
    Storage,
    budget,
    check_registered,
    i32,
    relative,
    same,
)
from tests.test_exactness import whole

IMPLS = ["reference", "triton"]
Tensor = torch.Tensor
FP16 = torch.float16


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def exact(
    f: Ssd, tokens: dict[str, Tensor], constants: dict[str, Tensor]
) -> tuple[Tensor, dict[int, Tensor]]:
    """The recurrence in fp64, and its state after every token."""
    t, c = ({k: v.double() for k, v in d.items()} for d in (tokens, constants))
    S, ys, states = torch.zeros(f.heads, f.head_dim, f.state_dim, dtype=torch.float64), [], {}
    B, C = (t[k].repeat_interleave(f.heads // f.groups, 1) for k in "BC")
    dt = torch.nn.functional.softplus(t["dt"] + c["bias"])
    for n in range(len(dt)):
        S = (
            S * torch.exp(c["A"] * dt[n])[:, None, None]
            + (dt[n][:, None] * t["x"][n])[..., None] * B[n][:, None]
        )
        ys.append((S @ C[n][..., None])[..., 0] + c["D"][:, None] * t["x"][n])
        states[n + 1] = S
    return torch.stack(ys), states


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("state", [BF16, FP32])
def test_a_mixed_batch_equals_its_twin(dtype, state):
    """Decode, a row that ends one chunk and fills the next window, no tokens, whole chunks; absent, kept, in place."""
    f = Ssd(heads=2, groups=1, state_dim=32, chunk=16, dtype=dtype)
    s = Storage("members", f.heads, f.head_elements, 24, state, units=60)
    counts, positions, ends = [1, 40, 0, 23, 2], [5, 7, 3, 16, 1], 3
    src = [s.take(), s.take(), s.take(), s.nothing(), s.take()]
    for placed in (*src[:3], src[4]):
        s.put(placed, torch.randn(f.heads * f.head_elements))
    where = [[s.take() for _ in range(ends)] for _ in counts]
    where[1] = [s.nothing(), src[1], where[1][1]]
    starts = i32([0, *torch.tensor(counts).cumsum(0)])
    w, step = (
        ssd_window(f.chunk, f.heads, f.head_dim, f.groups, f.state_dim, dtype.itemsize),
        16 // dtype.itemsize,
    )
    windows = torch.full((5 * w.size,), float("nan"), dtype=dtype)
    for n, position in enumerate(positions):
        unit, known = windows[n * w.size : (n + 1) * w.size], position % f.chunk
        for at, width in ((0, f.heads * f.head_dim), (w.second, f.groups * f.state_dim), (w.third, f.heads)):
            unit[at : at + known * width] = torch.randn(known * width).to(dtype)
    entries = i32([n * w.size // step for n in range(4)] + [ABSENT])
    total, bits = int(starts[-1]), []
    raw, kept = s.raw.clone(), windows.clone()
    tokens = f.tokens(total, 0)
    for impl in IMPLS:
        s.raw.copy_(raw)
        windows.copy_(kept)
        out = f.output(total)
        scratch = torch.full((5, ends, f.heads, f.head_dim, f.state_dim), float("nan"), dtype=state)
        with guard(order="shuffle"):
            ops.ssd(
                s.pool, i32([p.members for p in src]), i32([[p.members for p in r] for r in where]), scratch,
                windows, entries, starts, i32(positions), **tokens, **f.constants(), out=out,
                granule=s.granule(state), heads_per_member=s.heads_per_member, window_granule=step, chunk=f.chunk,
                max_tokens=40, impl=impl,
            )  # fmt: skip
        bits.append((out, s.pool.clone(), windows.clone()))
    (y0, p0, w0), (y1, p1, w1) = bits
    live = slice(0, total - 2)  # the last row has no window
    assert y0[total - 2 :].isnan().all()
    assert y1[total - 2 :].isnan().all()
    # An operand's rounding may tip over, never more than all of them would cost.
    rounding = (
        relative(y0[live].to(dtype), y0[live].double()) if dtype != FP32 else {BF16: 1e-5, FP32: 1e-6}[state]
    )
    assert relative(y1[live], y0[live].double()) <= rounding
    assert torch.equal(p0.isnan(), p1.isnan())
    here = ~p0.isnan()
    assert relative(p1[here], p0[here].double()) < (
        1e-3 if state == BF16 else 1e-5
    )  # a rounding may tip over
    assert same(w0, w1)  # an append is a move
    for n, (count, position) in enumerate(zip(counts, positions, strict=True)):
        done = (position + count) // f.chunk - position // f.chunk
        for placed in where[n][0 if n == 4 else done :]:
            assert s.state(placed).isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("organization", ["members", "striped"])
def test_prefill_against_fp64(impl, organization):
    f = Ssd()
    batch = Batch(f, organization, impl=impl)
    row = batch.start(84, 5)
    batch.advance([(row, 84)])
    y, states = exact(f, row.tokens, f.constants())
    assert relative(row.out, y) <= budget(y, BF16)
    for at, state in row.states.items():
        assert relative(state.view(states[at].shape), states[at]) <= budget(states[at], BF16)
    assert batch.untouched()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_prefill_in_other_dtypes_against_fp64(impl, dtype):
    f = Ssd(dtype=dtype)
    batch = Batch(f, state=FP32, impl=impl)
    row = batch.start(70, 6)
    batch.advance([(row, 70)])
    y, states = exact(f, row.tokens, f.constants())
    assert relative(row.out, y) <= (1e-6 if dtype == FP32 else budget(y, dtype))
    assert relative(row.states[64].view(states[64].shape), states[64]) <= (1e-6 if dtype == FP32 else 1e-3)


def test_a_chunk_of_64_at_full_head_size():
    """One head of Falcon-H1-7B: 128 x 256, L = 64, all tiles as on a GPU."""
    f = Ssd(heads=1, head_dim=128, state_dim=256, groups=1, chunk=64)
    rows = []
    for impl in IMPLS:
        batch = Batch(f, "composite", impl=impl, units=6)
        row = batch.start(70, 1)
        batch.advance([(row, 66)])
        batch.advance([(row, 1)])
        batch.advance([(row, 3)])
        rows.append(row)
    y, states = exact(f, rows[0].tokens, f.constants())
    for row in rows:
        assert relative(row.out, y) <= budget(y, BF16)
        assert relative(row.states[64].view(states[64].shape), states[64]) <= budget(states[64], BF16)
    assert relative(rows[1].out, rows[0].out.double()) < 1e-5


# ------------------------------------------------------------------------------------------ a long run
def replay_2048(
    f: Ssd, constants: dict[str, Tensor], tokens: dict[str, Tensor], decoded: int
) -> tuple[Tensor, Tensor]:
    """Prefill, then the last `decoded` tokens one by one."""
    size, ends = f.heads * f.head_elements, 2048 // f.chunk
    pool, out = torch.zeros(2 * size, dtype=BF16), torch.empty(2048, f.heads, f.head_dim, dtype=BF16)
    window = torch.full((f.window_size,), float("nan"), dtype=BF16)
    for lo, hi in [(0, 2048 - decoded), *((n, n + 1) for n in range(2048 - decoded, 2048))]:
        where = torch.full((1, ends if hi - lo > 1 else 1, 1), ABSENT, dtype=torch.int32)
        done = hi // f.chunk - lo // f.chunk
        where[0, max(0, done - 1)] = 0
        shape = (1, ends, f.heads, f.head_dim, f.state_dim)
        scratch = torch.empty(shape, dtype=BF16) if hi - lo > 1 else None
        ops.ssd(
            pool, i32([[0 if lo >= f.chunk else ABSENT]]), where, scratch, window, i32([0]), i32([0, hi - lo]), i32([lo]),
            **{k: v[lo:hi] for k, v in tokens.items()}, **constants, out=out[lo:hi], granule=8,
            heads_per_member=f.heads, window_granule=8, chunk=f.chunk, max_tokens=hi - lo,
        )  # fmt: skip
    return out, pool[:size].clone()


def update_2048(
    f: Ssd, constants: dict[str, Tensor], tokens: dict[str, Tensor], state: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Token by token through the state update."""
    pool, out = (
        torch.zeros(f.heads * f.head_elements, dtype=state),
        torch.empty(2048, f.heads, f.head_dim, dtype=BF16),
    )
    for n in range(2048):
        ops.state_update(
            pool, i32([[0]]), i32([[0]]), **{k: v[n : n + 1] for k, v in tokens.items()}, **constants,
            out=out[n : n + 1], granule=8, heads_per_member=f.heads,
        )  # fmt: skip
    return out, pool


def test_error_over_2048_tokens(capsys):
    """Nine heads over Mamba-2's range: A in -1, -4, -16, dt in 1e-3, 1e-2, 1e-1. Relative L2 per head, then the mean."""
    f = Ssd(heads=9, head_dim=16, state_dim=64, groups=1, chunk=64)
    dt = torch.tensor([1e-3, 1e-2, 1e-1])
    constants = {
        "A": -torch.tensor([1.0, 4.0, 16.0]).repeat_interleave(3),
        "D": torch.zeros(9),
        "bias": torch.log(torch.expm1(dt)).repeat(3),
    }
    tokens = f.tokens(2048, 0)
    tokens["dt"] = (tokens["dt"].float() / 2).to(BF16)
    y, states = exact(f, tokens, constants)

    def error(out: Tensor, state: Tensor) -> tuple[float, float]:
        heads = (out.double() - y).norm(dim=(0, 2)) / y.norm(dim=(0, 2))
        last = states[2048]
        kept = (state.double().view(last.shape) - last).norm(dim=(1, 2)) / last.norm(dim=(1, 2))
        return heads.mean().item(), kept.mean().item()

    decoded = replay_2048(f, constants, tokens, 130)  # over two chunk ends
    prefilled = replay_2048(f, constants, tokens, 0)
    assert all(same(a, b) for a, b in zip(decoded, prefilled, strict=True))
    replay = error(*decoded)
    update = error(*update_2048(f, constants, tokens, BF16))
    rounded = error(y.to(BF16), states[2048].to(BF16))
    with capsys.disabled():
        print("\nrelative error over 2,048 tokens, mean over heads: output, final state")
        for name, (out, state) in (
            ("exact, rounded once", rounded),
            ("replay decode, L = 64", replay),
            ("bf16 state, every token", update),
        ):
            print(f"  {name:26s}{out:.2e}  {state:.2e}")
        print(f"  replay / update           {replay[0] / update[0]:.2f}      {replay[1] / update[1]:.2f}")
    assert replay[0] <= update[0] / 3
    assert replay[1] <= update[1] / 3


# ------------------------------------------------------------------------------------------- speculation
@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("start", [10, 28])
def test_rollback_of_drafts(start, accepted):
    """F4 (vllm #39273): four drafts, `accepted` of them right; the row goes on as if the others had never been.

    From 28 the drafts end the chunk. Drafts that went past it would overwrite the window that a rollback needs.
    """
    batch = Batch(Ssd())
    row = batch.start(84, 0)
    batch.advance([(row, start)])
    right, before = row.tokens, (row.members, dict(row.states))
    row.tokens = {k: v.clone() for k, v in right.items()}
    for v in row.tokens.values():
        v[start + accepted : start + 4] += 1
    row.shared = True  # the state before the drafts must outlive a chunk's end that they cross
    batch.advance([(row, 4)])
    row.position, row.tokens = start + accepted, right
    if start + accepted < 32:
        row.members, row.states = before
    for n in (1, 1, 30):
        batch.advance([(row, n)])
    full = whole("ssd", 0, "triton", BF16)
    assert same(row.out[: row.position], full.out[: row.position])
    assert same(row.states[32], full.states[32])


def test_entries_and_tokens_beyond_2_31_elements():
    """E2 and E3 (state-spaces/mamba #1015, sglang #20389): members, windows, and tokens far apart."""
    f = Ssd(heads=1, groups=1, chunk=16)
    size, entry, far = f.head_elements, 2**31 // 8 + 5, 2**30
    big = torch.empty(2**31 + 2**17, dtype=BF16)
    state, w = torch.randn(size).to(BF16), f.window_size
    tokens, results = f.tokens(20, 0), []
    spread = dict(tokens)
    spread["x"] = torch.empty(19 * (far // 8) + 16, dtype=BF16).as_strided((20, 1, 16), (far // 8, 16, 1))
    spread["x"].copy_(tokens["x"])
    for pool, at, inputs in ((big, entry, spread), (torch.zeros(2**17, dtype=BF16), 0, tokens)):
        step = -(-size // 8)
        pool[at * 8 : at * 8 + size] = state
        out = f.output(20)
        scratch = torch.empty(1, 2, 1, f.head_dim, f.state_dim, dtype=BF16)
        ops.ssd(
            pool, i32([[at]]), i32([[[at + step], [ABSENT]]]), scratch, pool, i32([at + 2 * step]), i32([0, 20]),
            i32([32]), **inputs, **f.constants(), out=out, granule=8, heads_per_member=1, window_granule=8, chunk=16,
            max_tokens=20, impl="triton",
        )  # fmt: skip
        results.append(
            (
                out,
                pool[(at + step) * 8 : (at + step) * 8 + size].clone(),
                pool[(at + 2 * step) * 8 :][: w // 8],
            )
        )
    assert all(same(a, b) for a, b in zip(*results, strict=True))


# ------------------------------------------------------------------------------------------- bad input
F = Ssd(heads=2, groups=1, chunk=16)


def arguments() -> dict:
    return {
        "pool": torch.zeros(2**15, dtype=BF16), "src_members": i32([[0]]), "boundaries": i32([[[512], [1024]]]),
        "scratch": torch.zeros(1, 2, 2, 16, 64, dtype=BF16), "window_pool": torch.zeros(4096, dtype=BF16),
        "windows": i32([0]), "starts": i32([0, 20]), "positions": i32([0]), **F.tokens(20, 0), **F.constants(),
        "out": F.output(20), "granule": 8, "heads_per_member": 2, "window_granule": 8, "chunk": 16, "max_tokens": 20,
    }  # fmt: skip


def call(**changes: object) -> None:
    ops.ssd(**arguments() | changes)


BAD = [
    ({"chunk": 24}, UnsupportedError, "chunk must be 16, 32, 64 or 128, got 24"),
    ({"chunk": 256}, UnsupportedError, "chunk must be"),
    ({"boundaries": i32([[[512]]])}, UsageError, r"boundaries.shape\[1\] must be at least 2, got 1"),
    ({"boundaries": i32([[512, 1024]])}, UsageError, "boundaries.shape must be"),
    ({"boundaries": i32([[[512], [4000]]])}, UsageError, "boundaries must be below 3841, got 4000"),
    ({"boundaries": i32([[[512], [600]]])}, UsageError, "boundaries must be at least 256 entries apart"),
    ({"boundaries": i32([[[100], [1024]]])}, UsageError, "boundaries must be disjoint from src_members"),
    ({"scratch": None}, UsageError, "scratch must be a tensor for more than one token, got None"),
    ({"scratch": torch.zeros(1, 1, 2, 16, 64, dtype=BF16)}, UsageError, r"scratch.shape\[1\] must be at least 2"),
    ({"scratch": torch.zeros(1, 2, 2, 16, 64)}, UsageError, "scratch.dtype must be torch.bfloat16"),
    ({"scratch": torch.zeros(1, 2, 2, 16, 128, dtype=BF16)[..., :64]}, UsageError, "scratch must be contiguous"),
    ({"window_pool": torch.zeros(4096)}, UsageError, "window_pool.dtype must be torch.bfloat16"),
    ({"window_granule": 4}, UsageError, "granule must be a positive multiple of 16 bytes"),
    ({"windows": i32([0, 1])}, UsageError, r"windows.shape must be \[1\]"),
    ({"windows": i32([400])}, UsageError, "windows must be below"),
    ({"starts": i32([0])}, UsageError, r"starts.shape must be \[2\]"),
    ({"starts": i32([0, 30])}, UsageError, "starts must be rising from 0 to at most 20"),
    ({"positions": i32([-1])}, UsageError, "positions must be at least 0, got -1"),
    ({"positions": i32([0]).long()}, UsageError, "positions.dtype must be torch.int32"),
    ({"max_tokens": 2, "boundaries": i32([[[512]]])}, UsageError, "max_tokens must be at least 20, got 2"),
    ({"x": F.tokens(20, 0)["x"][:19]}, UsageError, "B.shape must be"),
    ({"out": torch.zeros(20, 2, 32)}, UsageError, "out.shape must be"),
    ({"out": torch.zeros(20, 36)[:, :32].unflatten(1, (2, 16))}, UsageError, r"out.stride\(0\) must be a multiple of 8, got 36"),
    ({"heads_per_member": 1}, UsageError, r"src_members.shape\[1\] must be 2 for 2 heads, got 1"),
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
        src_members=none.view(0, 1), boundaries=none.view(0, 2, 1), scratch=torch.zeros(0, 2, 2, 16, 64, dtype=BF16),
        windows=none, starts=i32([0]), positions=none, impl=impl,
    )  # fmt: skip


def test_a_window_shared_by_two_rows_is_refused():
    double = {k: torch.cat([v, v]) for k, v in F.tokens(10, 0).items()}
    with pytest.raises(UsageError, match=r"windows must be at least \d+ entries apart"):
        call(
            src_members=i32([[0], [ABSENT]]), boundaries=i32([[[512], [1024]], [[1536], [2048]]]), windows=i32([0, 0]),
            scratch=torch.zeros(2, 2, 2, 16, 64, dtype=BF16), starts=i32([0, 10, 20]), positions=i32([0, 0]), **double,
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # opcheck's own deprecations
def test_the_op_is_registered_as_it_is():
    check_registered(ops.ssd, arguments())
