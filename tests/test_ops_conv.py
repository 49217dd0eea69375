"""Causal convolution on lines: against fp64, against its twin under the guard, short pieces, exact bits, bad input."""

import functools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import strategies as st

from hybridkv import ops
from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.testing.guard import HazardError, guard
from hybridkv.triton import conv as kernels
from tests.census import Found, finds, search, survey, unsorted
from tests.lines import DIM, FAULTS, Run, entries, layer, storage
from tests.recurrent import (
    ABSENT,
    BF16,
    FP32,
    ORGANIZATIONS,
    Placed,
    Storage,
    budget,
    check_registered,
    i32,
    relative,
    same,
)

IMPLS = ["reference", "triton"]
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def exact(taps: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    width, tokens = len(weight), len(taps) - len(weight) + 1
    total = sum(taps[w : w + tokens].double() * weight[w].double() for w in range(width))
    return torch.nn.functional.silu(total if bias is None else total + bias.double())


def filled(s: Storage, width: int = 4) -> Placed:
    placed = s.take()
    s.put_line(placed, torch.randn((width - 1) * DIM, generator=torch.Generator().manual_seed(len(s.free))))
    return placed


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("organization", ORGANIZATIONS)
def test_update_equals_its_twin_and_fp64(organization, width):
    s = storage(organization, width)
    src = [filled(s, width), filled(s, width), filled(s, width), s.nothing()]
    dst = [src[0], s.take(), s.nothing(), s.take()]
    x = torch.randn(4, DIM + 16).to(BF16)[:, :DIM]  # rows further apart than they are long
    p = layer(width)
    raw, got = s.raw.clone(), []
    for impl in IMPLS:
        s.raw.copy_(raw)
        out = torch.full((4, DIM), float("nan"), dtype=BF16)
        with guard(order="shuffle"):
            ops.conv_update(
                s.lines[s.line_offset :], entries(src), entries(dst), x, **p, out=out, granule=8, impl=impl
            )
        got.append((out, s.raw.clone()))
    assert same(got[0][1], got[1][1])
    taps = [torch.cat([s.line(src[b]).view(-1, DIM), x[b : b + 1]]) for b in (1, 2)]
    assert same(s.line(dst[1]).view(-1, DIM), taps[0][1:])
    ref = exact(taps[0], **p)
    for out, _ in got:
        assert relative(out[1], ref[0]) <= budget(ref, BF16)
        assert out[2].isnan().all()  # inactive: untouched, documented (D2)
    zeros = exact(torch.cat([torch.zeros(width - 1, DIM, dtype=BF16), x[3:]]), **p)[0]
    assert relative(got[1][0][3], zeros) <= budget(zeros, BF16)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("organization", ["members", "striped"])
@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float16])
def test_prefill_equals_its_twin_and_fp64(organization, width, dtype):
    s = storage(organization, width)
    if dtype == FP32:
        s.raw = torch.cat([s.raw, s.raw])  # the same entries, twice the bytes behind each
    lines = s.raw.view(dtype)[s.line_offset :]
    granule = 8
    starts, at = i32([0, 3, 3, 12, 14]), i32([[3, 0], [0, 0], [9, 5], [2, 1]])
    src = [s.take(), s.take(), s.take(), s.nothing()]
    dst = [[src[0], s.take()], [s.take(), s.nothing()], [s.take(), s.take()], [s.nothing(), s.take()]]
    for placed in src[:3]:
        for n, entry in enumerate(placed.line):
            part = -(-(width - 1) * DIM // (len(placed.line) * 8)) * 8
            lines[entry * granule : entry * granule + part] = torch.randn(part).to(dtype) * (n + 1)
    x, p = torch.randn(14, DIM).to(dtype), layer(width, dtype=dtype)
    before, got = s.raw.clone(), []
    for impl in IMPLS:
        s.raw.copy_(before)
        out = torch.full((14, DIM), float("nan"), dtype=dtype)
        with guard(order="shuffle"):
            ops.conv_prefill(
                lines, entries(src), i32([[p.line for p in d] for d in dst]), at, starts, x, **p, out=out,
                granule=granule, max_tokens=9, impl=impl,
            )  # fmt: skip
        got.append((out, s.raw.clone()))
    assert same(got[0][1], got[1][1])
    ref = exact(torch.cat([torch.zeros(width - 1, DIM, dtype=dtype), x[12:]]), **p)
    for out, _ in got:
        assert relative(out[12:], ref) <= max(budget(ref, dtype), 1e-6)
        assert relative(out, got[0][0].double()) <= max(budget(ref, dtype), 1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("tokens", range(9))
def test_short_pieces_leave_a_shared_line_alone(impl, tokens):
    """A7 and A11 (state-spaces/mamba #1027, vllm #56196): T in 0 .. W and beyond, then one more token."""
    s, p = storage("members"), layer(4)
    shared, mine = filled(s), s.take()
    kept = s.line(shared)
    x = torch.randn(tokens + 1, DIM).to(BF16)
    out = torch.full((tokens + 1, DIM), float("nan"))
    ops.conv_prefill(
        s.lines, entries([shared]), i32([[mine.line]]), i32([[tokens]]), i32([0, tokens]), x, **p, out=out,
        granule=8, max_tokens=tokens, impl=impl,
    )  # fmt: skip
    taps = torch.cat([kept.view(3, DIM), x])
    assert same(s.line(shared), kept)
    assert same(s.line(mine).view(3, DIM), taps[tokens : tokens + 3])
    ops.conv_update(
        s.lines, entries([mine]), entries([mine]), x[tokens:], **p, out=out[tokens:], granule=8, impl=impl
    )
    whole = torch.empty(tokens + 1, DIM)
    ops.conv_prefill(
        s.lines, entries([shared]), i32([[mine.line]]), i32([[tokens + 1]]), i32([0, tokens + 1]), x, **p, out=whole,
        granule=8, max_tokens=tokens + 1, impl=impl,
    )  # fmt: skip
    assert same(out, whole)


def test_every_tap_is_read_before_any_is_written():
    """A12 (TensorRT-LLM #17522): 4,096 channels in place, many times over, in any program order."""
    dim, results = 4096, []
    g = torch.Generator().manual_seed(0)
    line, x = torch.randn(3 * dim, generator=g).to(BF16), torch.randn(1, dim, generator=g).to(BF16)
    for n in range(20):
        lines, out = line.clone(), torch.empty(1, dim)
        with guard(order="shuffle", seed=n):
            ops.conv_update(
                lines, i32([[0]]), i32([[0]]), x, **layer(4, dim), out=out, granule=8, impl="triton"
            )
        results.append((lines, out))
    assert all(same(a, results[0][0]) and same(b, results[0][1]) for a, b in results)
    assert same(results[0][0].view(3, dim)[:2], line.view(3, dim)[1:])


# ------------------------------------------------------------------------------------------ equal bits
PROPERTIES = [*FAULTS.values(), "not in place"]


@st.composite
def histories(draw: st.DrawFn, organizations: Sequence[str] = ORGANIZATIONS) -> dict:
    """Calls of two or three rows: some prefill with pieces of any length, some decode steps, at least one of each."""
    count, kind = draw(st.integers(2, 3)), st.sampled_from(["prefill", "decode"])
    kinds = draw(st.permutations(["prefill", "decode", *draw(st.lists(kind, max_size=3))]))
    pieces = st.lists(st.integers(0, 9), min_size=count, max_size=count).map(
        lambda p: p if any(p) else [1, *p[1:]]
    )
    orders = [draw(st.permutations(range(count))) for _ in kinds[1:]]
    return {
        "organization": draw(st.sampled_from(organizations)),
        "width": draw(st.sampled_from([2, 3, 4])),
        "kinds": kinds,
        "calls": [draw(pieces) if kind == "prefill" else [1] * count for kind in kinds],
        "rows": [draw(unsorted(range(count))), *orders],
        "seed": draw(st.integers(0, 2**16)),
        "order": draw(st.sampled_from(["forward", "reverse", "shuffle"])),
    }


def run_history(impl: str, h: dict, fault: str | None = None) -> Found:
    run = Run(impl, h, fault)
    for kind, rows, counts in zip(h["kinds"], h["rows"], h["calls"], strict=True):
        run.call(kind, rows, [counts[b] for b in rows])
    run.compare(storage("composite" if run.s.organization == "members" else "members", h["width"]))
    return Found(run.varied, run.bits)


@pytest.mark.parametrize("impl", IMPLS)
def test_bits_depend_on_the_tokens_before_alone(impl):
    census = search(histories(), functools.partial(run_history, impl), 30)
    assert set(PROPERTIES) <= set(census.varied)


@pytest.mark.nightly
@pytest.mark.parametrize("impl", IMPLS)
def test_bits_depend_on_the_tokens_before_alone_many(impl):
    each = [histories([name]) for name in ORGANIZATIONS]
    survey(f"conv_prefill and conv_update, {impl}", PROPERTIES, each, functools.partial(run_history, impl))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_planted_fault_is_found(impl, fault):
    assert finds(histories(), lambda h: run_history(impl, h, fault))


def test_a_line_that_another_row_reads_is_a_hazard():
    """The twin of the property: aliasing, planted below the checks."""
    s, p = storage("members"), layer(4)
    a, b, c = filled(s), filled(s), s.take()
    x, out = torch.randn(2, DIM).to(BF16), torch.empty(2, DIM)
    with guard(), pytest.raises(HazardError):
        kernels.conv_update(s.lines, entries([a, b]), entries([b, c]), x, **p, out=out, granule=8)


def test_products_in_bf16_change_bits():
    """The twin of the arithmetic: what vLLM and SGLang multiply, bf16 by bf16, is outside the budget of fp32."""
    x, p = torch.randn(64, DIM).to(BF16), layer(4)
    taps = torch.cat([torch.zeros(3, DIM, dtype=BF16), x])
    ref = exact(taps, **p)
    out = torch.empty(64, DIM)
    lines = torch.zeros(3 * DIM, dtype=BF16)
    ops.conv_prefill(
        lines, i32([[ABSENT]]), i32([[[ABSENT]]]), i32([[0]]), i32([0, 64]), x, **p, out=out, granule=8, max_tokens=64,
        impl="triton",
    )  # fmt: skip
    rounded = sum((taps[w : w + 64] * p["weight"][w]).float() for w in range(4)) + p["bias"]
    assert relative(out, ref) < 1e-6 < relative(torch.nn.functional.silu(rounded), ref)


# -------------------------------------------------------------------------------------- large addresses
def test_addresses_beyond_2_31_elements():
    """E1 and E3 (vllm #40905, #41617, sglang #20389): lines far out, and tokens far apart."""
    big = torch.empty(2**31 + 4096, dtype=BF16)  # lazy: only what is touched costs memory
    entry = 2**31 // 8 + 7
    line = torch.randn(3 * DIM).to(BF16)
    big[entry * 8 : entry * 8 + 3 * DIM] = line
    x = big.as_strided((3, DIM), (2**30, 1), 512)
    x.copy_(torch.randn(3, DIM).to(BF16))
    out, p = torch.empty(3, DIM), layer(4)
    ops.conv_prefill(
        big, i32([[entry]]), i32([[[entry + 64]]]), i32([[2]]), i32([0, 3]), x, **p, out=out, granule=8, max_tokens=3,
        impl="triton",
    )  # fmt: skip
    taps = torch.cat([line.view(3, DIM), x])
    ref = exact(taps, **p)
    assert relative(out, ref) < 1e-6
    assert same(big[(entry + 64) * 8 : (entry + 64) * 8 + 3 * DIM].view(3, DIM), taps[2:5])


# ------------------------------------------------------------------------------------------- bad input
def arguments() -> dict:
    s = torch.zeros(4096, dtype=BF16)
    return {
        "lines": s, "line_src": i32([[0]]), "line_dst": i32([[64]]), "x": torch.zeros(1, DIM, dtype=BF16),
        "weight": torch.zeros(4, DIM), "bias": None, "out": torch.zeros(1, DIM), "granule": 8,
    }  # fmt: skip


def call(**changes: object) -> None:
    ops.conv_update(**arguments() | changes)


def prefill_arguments() -> dict:
    return {
        "lines": torch.zeros(4096, dtype=BF16), "line_src": i32([[0], [20]]), "line_dst": i32([[[64]], [[ABSENT]]]),
        "line_at": i32([[2], [0]]), "starts": i32([0, 2, 3]), "x": torch.zeros(3, DIM, dtype=BF16),
        "weight": torch.zeros(4, DIM), "bias": None, "out": torch.zeros(3, DIM), "granule": 8, "max_tokens": 2,
    }  # fmt: skip


def call_prefill(**changes: object) -> None:
    ops.conv_prefill(**prefill_arguments() | changes)


BAD = [
    ({"x": torch.zeros(1, DIM, dtype=torch.float64)}, UsageError, "x.dtype must be"),
    ({"x": torch.zeros(1, DIM)}, UsageError, "lines.dtype must be torch.float32, got torch.bfloat16"),
    ({"x": torch.zeros(DIM, dtype=BF16)}, UsageError, r"x.shape must be \[any, any\], got \[48\]"),
    ({"x": torch.zeros(1, 2 * DIM, dtype=BF16)[:, ::2]}, UsageError, r"x.stride\(-1\) must be 1, got 2"),
    ({"weight": torch.zeros(5, DIM)}, UnsupportedError, r"weight.shape\[0\] must be one of \(2, 3, 4\), got 5"),
    ({"weight": torch.zeros(1, DIM)}, UnsupportedError, r"weight.shape\[0\]"),
    ({"weight": torch.zeros(4, 40)}, UsageError, r"weight.shape must be \[any, 48\]"),
    ({"weight": torch.zeros(4, 2 * DIM)[:, :DIM]}, UsageError, "weight must be contiguous"),
    ({"bias": torch.zeros(3)}, UsageError, r"bias.shape must be \[48\], got \[3\]"),
    ({"out": torch.zeros(2, DIM)}, UsageError, r"out.shape must be \[1, 48\]"),
    ({"out": torch.zeros(1, DIM, device="meta")}, UsageError, "out.device must be cpu, got meta"),
    ({"line_src": torch.zeros(1, 1, dtype=torch.int64)}, UsageError, "line_src.dtype must be torch.int32"),
    ({"line_src": i32([[0], [0]])}, UsageError, r"line_src.shape must be \[1, 1\], got \[2, 1\]"),
    ({"line_dst": i32([[64, 65]])}, UsageError, r"line_dst.shape must be \[1, 1\]"),
    ({"line_src": i32([[500]])}, UsageError, "line_src must be below 495, got 500"),
    ({"line_dst": i32([[500]])}, UsageError, "line_dst must be below 495, got 500"),
    ({"line_dst": i32([[5]])}, UsageError, "line_dst must be disjoint from line_src"),
    ({"granule": 4}, UsageError, "granule must be a positive multiple of 16 bytes, got 8 bytes"),
    ({"lines": torch.zeros(4097, dtype=BF16)[1:]}, UsageError, r"lines.data_ptr\(\) must be a multiple of 16"),
    ({"x": torch.zeros(1, 12, dtype=BF16), "weight": torch.zeros(4, 12)}, UnsupportedError,
     r"x.shape\[1\] must be a multiple of 16 bytes, got 12"),
    ({"impl": "cuda"}, UsageError, "impl must be one of reference, triton, got 'cuda'"),
]  # fmt: skip
BAD_PREFILL = [
    ({"x": torch.zeros(3, 52, dtype=BF16)[:, :DIM]}, UsageError, r"x.stride\(0\) must be a multiple of 8, got 52"),
    ({"out": torch.zeros(3, 52)[:, :DIM]}, UsageError, r"out.stride\(0\) must be a multiple of 8, got 52"),
    ({"starts": i32([0, 2])}, UsageError, r"starts.shape must be \[3\], got \[2\]"),
    ({"starts": i32([0, 2, 4])}, UsageError, "starts must be rising from 0 to at most 3"),
    ({"starts": i32([0, 2, 1])}, UsageError, "starts must be rising"),
    ({"max_tokens": 1}, UsageError, "max_tokens must be at least 2, got 1"),
    ({"max_tokens": -1}, UsageError, "max_tokens must be at least 0, got -1"),
    ({"line_at": i32([[3], [0]])}, UsageError, "line_at must be between 0 and the row's tokens"),
    ({"line_dst": i32([[[64]], [[70]]])}, UsageError, "line_dst must be at least 18 entries apart"),
    ({"line_at": i32([[2]])}, UsageError, r"line_at.shape must be \[2, 1\]"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_update_is_refused_before_a_launch(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"), BAD_PREFILL, ids=[str(n) for n in range(len(BAD_PREFILL))]
)
def test_bad_prefill_is_refused_before_a_launch(changes, error, message):
    with pytest.raises(error, match=message):
        call_prefill(**changes)


@pytest.mark.parametrize("impl", IMPLS)
def test_empty_batches(impl):
    empty = {"x": torch.zeros(0, DIM, dtype=BF16), "out": torch.zeros(0, DIM), "impl": impl}
    call(line_src=i32([]).view(0, 1), line_dst=i32([]).view(0, 1), **empty)
    call_prefill(starts=i32([0, 0, 0]), line_at=i32([[0], [0]]), max_tokens=0, **empty)


def test_good_input_is_accepted():
    call()
    call_prefill()


@pytest.mark.filterwarnings("ignore")  # opcheck's own deprecations
def test_the_ops_are_registered_as_they_are():
    check_registered(ops.conv_update, arguments())
    check_registered(ops.conv_prefill, prefill_arguments())
