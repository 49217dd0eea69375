"""One-token state updates (Mamba-2 and gated delta rule): fp64, the twin under the guard, equal bits, bad input."""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from hybridkv import ops
from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.reference import delta as delta_reference
from hybridkv.reference import ssu as ssu_reference
from hybridkv.testing.guard import HazardError, guard
from hybridkv.triton import delta as delta_kernels
from hybridkv.triton import ssu as ssu_kernels
from tests.census import Found, differing_bits, finds, search, survey, unsorted
from tests.recurrent import (
    BF16,
    FP32,
    ORGANIZATIONS,
    Delta,
    Placed,
    Ssd,
    Storage,
    budget,
    check_registered,
    i32,
    relative,
    same,
)

IMPLS = ["reference", "triton"]
ROOT = Path(__file__).parent.parent
FAMILIES = {"ssu": Ssd(heads=5, groups=1, state_dim=32), "delta": Delta()}
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def update(
    name: str, s: Storage, src: list[Placed], dst: list[Placed], inputs: dict, out: Tensor, *, checked: bool = True,
    **kwargs: object,
) -> None:  # fmt: skip
    family = FAMILIES[name]
    members = (i32([p.members for p in src]), i32([p.members for p in dst]))
    shape = {"granule": s.granule(s.dtype), "heads_per_member": s.heads_per_member}
    extra = {} if name == "ssu" else {"scale": family.key_dim**-0.5}
    op = ops.state_update if name == "ssu" else ops.delta_update
    if not checked:  # a planted fault must get past the checks
        op = KERNELS[name, kwargs.pop("impl")]
    op(s.pool, *members, **inputs, **family.constants(), out=out, **shape, **extra, **kwargs)


def exact(name: str, states: Tensor, inputs: dict) -> tuple[Tensor, Tensor]:
    """The recurrence in fp64."""
    f, c = FAMILIES[name], {k: v.double() for k, v in FAMILIES[name].constants().items()}
    t = {k: v.double() for k, v in inputs.items()}
    if name == "ssu":
        S = states.double().view(-1, f.heads, f.head_dim, f.state_dim)
        dt = torch.nn.functional.softplus(t["dt"] + c["bias"])
        B, C = (t[k].repeat_interleave(f.heads // f.groups, 1) for k in "BC")
        S = S * torch.exp(c["A"] * dt)[..., None, None] + (dt[..., None] * t["x"])[..., None] * B[:, :, None]
        return (S @ C[..., None])[..., 0] + c["D"][:, None] * t["x"], S
    S = states.double().view(-1, f.heads, f.key_dim, f.value_dim)
    q, k = (t[n].repeat_interleave(f.heads // f.key_heads, 1) for n in "qk")
    S = S * torch.exp(c["A"] * torch.nn.functional.softplus(t["a"] + c["bias"]))[..., None, None]
    v = torch.sigmoid(t["b"])[..., None] * (t["v"] - torch.einsum("bhkv,bhk->bhv", S, k))
    S = S + k[..., None] * v[:, :, None]
    return torch.einsum("bhkv,bhk->bhv", S, q) * f.key_dim**-0.5, S


@pytest.mark.parametrize("state", [BF16, FP32])
@pytest.mark.parametrize("organization", ORGANIZATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_update_equals_its_twin_and_fp64(name, organization, state):
    f = FAMILIES[name]
    s = Storage(organization, f.heads, f.head_elements, 24, state)
    src = [s.take(), s.take(), s.take(), s.nothing()]
    dst = [src[0], s.take(), s.nothing(), s.take()]
    before = torch.zeros(4, f.heads * f.head_elements, dtype=state)
    for b, placed in enumerate(src[:3]):
        before[b] = torch.randn(f.heads * f.head_elements).to(state)
        s.put(placed, before[b])
    inputs, raw = f.tokens(4, 1), s.raw.clone()
    y, S = exact(name, before, inputs)
    live, bits = [0, 1, 3], []
    for impl in IMPLS:
        s.raw.copy_(raw)
        out = f.output(4).to(BF16)
        with guard(order="shuffle"):
            update(name, s, src, dst, inputs, out, impl=impl)
        assert relative(out[live], y[live]) <= budget(y[live], BF16)
        assert out[2].isnan().all()
        got = torch.stack([s.state(dst[b]) for b in live]).view(S[live].shape)
        assert relative(got, S[live]) <= (budget(S[live], BF16) if state == BF16 else 1e-6)
        assert same(s.state(src[1]), before[1])
        for b in live:  # what is left must be as it was: poison, sources
            s.put(dst[b], torch.zeros_like(before[0]))
        bits.append(s.raw.clone())
    assert same(*bits)
    for b in live:
        s.put(dst[b], torch.full_like(before[0], float("nan")))
    for b in (1, 2):
        s.put(src[b], torch.full_like(before[0], float("nan")))
    assert s.pool.isnan().all()


# ------------------------------------------------------------------------------------------ equal bits
FAULTS = {  # what is planted into `run_steps`, and the property that it breaks
    "a page given to two rows": "batch composition",
    "destinations not reordered with their rows": "row order",
    "members read in reverse": "page permutation",
    "members read 16 bytes further": "organization",
    "a step taken again": "in place",
}
PROPERTIES = [*FAULTS.values(), "not in place"]
KERNELS = {
    ("ssu", "reference"): ssu_reference.state_update, ("ssu", "triton"): ssu_kernels.state_update,
    ("delta", "reference"): delta_reference.delta_update, ("delta", "triton"): delta_kernels.delta_update,
}  # fmt: skip
ROWS, STEPS = 6, 3


def cases(organizations: Sequence[str] = ORGANIZATIONS) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries(
        {
            "organization": st.sampled_from(organizations),
            "state": st.sampled_from([BF16, FP32]),
            "rows": st.lists(st.integers(0, ROWS - 1), min_size=2, max_size=4, unique=True).flatmap(unsorted),
            "steps": st.integers(2, STEPS),
            "spare": st.integers(0, 2),
            "absent": st.booleans(),  # the first row has no state yet
            "seed": st.integers(0, 2**16),
            "order": st.sampled_from(["forward", "reverse", "shuffle"]),
        }
    )


def states(name: str, dtype: torch.dtype) -> Tensor:
    size = FAMILIES[name].heads * FAMILIES[name].head_elements
    return torch.randn(ROWS, size, generator=torch.Generator().manual_seed(4)).to(dtype)


@functools.cache
def alone(
    name: str, impl: str, row: int, state: torch.dtype, absent: bool, organization: str
) -> list[tuple[Tensor, ...]]:
    """Output and state of one row after each step, by itself, always elsewhere."""
    f = FAMILIES[name]
    s = Storage(organization, f.heads, f.head_elements, 24, state)
    now, found, inputs = s.nothing() if absent else s.take(), [], f.tokens(ROWS * STEPS, 3)
    if not absent:
        s.put(now, states(name, state)[row])
    for step in range(STEPS):
        then, out, at = s.take(), f.output(1), row * STEPS + step
        with guard(hazards=False):
            update(name, s, [now], [then], {k: v[at : at + 1] for k, v in inputs.items()}, out, impl=impl)
        now = then
        found.append((out, s.state(now), torch.tensor(s.pages(now))))
    return found


def run_steps(name: str, impl: str, c: dict, fault: str | None = None) -> Found:
    """Steps of rows together, in place and elsewhere by turns, against each row alone in other pages."""
    f, inputs, where = FAMILIES[name], FAMILIES[name].tokens(ROWS * STEPS, 3), c["organization"]
    if fault == "members read in reverse":
        where = "striped"
    s = Storage(where, f.heads, f.head_elements, 24, c["state"], units=64, seed=c["seed"])
    rows, varied, bits = c["rows"], {"organization", f"organization: {where}"}, 0
    absent = [c["absent"] and n == 0 for n in range(len(rows))]
    now = [s.nothing() if gone else s.take() for gone in absent]
    for placed, r in zip(now, rows, strict=True):
        if placed.members[0] >= 0:
            s.put(placed, states(name, c["state"])[r])
    plain = "composite" if where == "members" else "members"
    full = [alone(name, impl, r, c["state"], gone, plain) for r, gone in zip(rows, absent, strict=True)]
    for step in range(c["steps"]):
        keep = [p.members[0] >= 0 and (n + step + c["seed"]) % 2 == 0 for n, p in enumerate(now)]
        then = [p if k else s.take() for p, k in zip(now, keep, strict=True)]
        if fault == "a page given to two rows" and not keep[0]:
            then[0] = now[1]
        places: list[int | None] = list(range(len(rows)))
        for _ in range(c["spare"]):
            places.insert(s.rng.randint(0, len(places)), None)
        src, dst = ([s.nothing() if n is None else entries[n] for n in places] for entries in (now, then))
        if fault == "destinations not reordered with their rows":
            dst = [then[n] if n is not None else s.nothing() for n in reversed(places)]
        if fault == "members read in reverse":
            src = [Placed(p.members[::-1], p.line) for p in src]
        if fault == "members read 16 bytes further":
            src = [Placed([e + (e >= 0) for e in p.members], p.line) for p in src]
        out = f.output(len(places))
        at = [rows[n or 0] * STEPS + step for n in places]
        taken = {k: v[at].contiguous() for k, v in inputs.items()}
        with guard(order=c["order"], hazards=False):
            for _ in range(1 + (fault == "a step taken again")):
                update(name, s, src, dst, taken, out, impl=impl, checked=fault is None)
        assert all(out[i].isnan().all() for i, n in enumerate(places) if n is None)
        here, now = [i for i, n in enumerate(places) if n is not None], then
        pairs = [(out[here], torch.cat([row[step][0] for row in full]))]
        pairs += [(s.state(p), row[step][1]) for p, row in zip(now, full, strict=True)]
        bits += differing_bits(pairs)
        varied |= {"in place" if k else "not in place" for k in keep}
        if [s.pages(p) for p in now] != [row[step][2].tolist() for row in full]:
            varied.add("page permutation")
    if len(rows) > 1:
        varied |= {"batch composition"} | ({"row order"} if rows != sorted(rows) else set())
    return Found(varied, bits)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_depend_on_the_row_alone(name, impl):
    census = search(cases(), functools.partial(run_steps, name, impl), 20)
    assert set(PROPERTIES) <= set(census.varied)


@pytest.mark.nightly
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_depend_on_the_row_alone_many(name, impl):
    op = "state_update" if name == "ssu" else "delta_update"
    each = [cases([organization]) for organization in ORGANIZATIONS]
    survey(f"{op}, {impl}", PROPERTIES, each, functools.partial(run_steps, name, impl))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_planted_fault_is_found(name, impl, fault):
    assert finds(cases(), lambda c: run_steps(name, impl, c, fault))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_that_another_row_reads_is_a_hazard(name):
    """The twin of the property: aliasing, planted below the checks."""
    f = FAMILIES[name]
    s = Storage("members", f.heads, f.head_elements, 24)
    a, b, c = s.take(), s.take(), s.take()
    for placed in (a, b):
        s.put(placed, torch.zeros(f.heads * f.head_elements))
    module = ssu_kernels if name == "ssu" else delta_kernels
    launcher = getattr(module, "state_update" if name == "ssu" else "delta_update")
    extra = {} if name == "ssu" else {"scale": 1.0}
    with guard(), pytest.raises(HazardError):
        launcher(
            s.pool, i32([a.members, b.members]), i32([b.members, c.members]), **f.tokens(2, 0), **f.constants(),
            out=f.output(2), granule=8, heads_per_member=s.heads_per_member, **extra,
        )  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_rounded_elsewhere_changes_bits(name, impl):
    """The twin of the rounding: two steps in fp32, rounded once, are not two steps rounded twice."""
    wide, narrow = (alone(name, impl, 0, t, absent=True, organization="members")[1][1] for t in (FP32, BF16))
    assert not same(wide.to(BF16), narrow)


@pytest.mark.parametrize("name", FAMILIES)
def test_entries_beyond_2_31_elements(name):
    f = FAMILIES[name]
    size, entry = f.heads * f.head_elements, 2**31 // 8 + 5
    big, small = torch.empty(2**31 + 2**16, dtype=BF16), torch.zeros(4 * size, dtype=BF16)
    state = torch.randn(size).to(BF16)
    big[entry * 8 : entry * 8 + size] = small[:size] = state
    inputs, outs, states = f.tokens(1, 0), [], []
    step = -(-size // 8)
    for pool, src, dst in ((big, entry, entry + step), (small, 0, step)):
        outs.append(f.output(1))
        extra = {} if name == "ssu" else {"scale": 1.0}
        op = ops.state_update if name == "ssu" else ops.delta_update
        op(pool, i32([[src]]), i32([[dst]]), **inputs, **f.constants(), out=outs[-1], granule=8,
           heads_per_member=f.heads, impl="triton", **extra)  # fmt: skip
        states.append(pool[dst * 8 : dst * 8 + size].clone())
    assert same(*outs)
    assert same(*states)


# ------------------------------------------------------------------------------------------- bad input
def arguments(name: str) -> dict:
    f = FAMILIES[name]
    args = {
        "pool": torch.zeros(2**15, dtype=BF16), "src_members": i32([[0, 600]]), "dst_members": i32([[1200, 1800]]),
        **f.tokens(1, 0), **f.constants(), "out": f.output(1), "granule": 8, "heads_per_member": (f.heads + 1) // 2,
    }  # fmt: skip
    if name == "delta":
        args["scale"] = 1.0
    return args


def call(name: str, **changes: object) -> None:
    op = ops.state_update if name == "ssu" else ops.delta_update
    op(**arguments(name) | changes)


BAD = [
    ("ssu", {"pool": torch.zeros(2**15, dtype=torch.float16)}, UsageError, "pool.dtype must be"),
    ("ssu", {"pool": torch.zeros(8, 8, dtype=BF16)}, UsageError, r"pool.shape must be \[any\]"),
    ("ssu", {"granule": 0}, UsageError, "granule must be a positive multiple of 16 bytes"),
    ("ssu", {"heads_per_member": 2}, UsageError, r"src_members.shape\[1\] must be 3 for 5 heads, got 2"),
    ("ssu", {"heads_per_member": 0}, UsageError, "heads_per_member must be positive, got 0"),
    ("ssu", {"x": torch.zeros(1, 5, 24, dtype=BF16)}, UnsupportedError, r"x.shape\[2\] must be a power of two"),
    ("ssu", {"x": torch.zeros(1, 5, 8, dtype=BF16)}, UnsupportedError, r"x.shape\[2\] must be a power of two"),
    ("ssu", {"x": torch.zeros(1, 5, 32, dtype=BF16)[..., :16]}, UsageError, r"x.stride\(1\) must be 16, got 32"),
    ("ssu", {"B": torch.zeros(1, 2, 32, dtype=BF16)}, UnsupportedError, r"B.shape\[1\] must be a divisor of 5 heads"),
    ("ssu", {"B": torch.zeros(1, 1, 512, dtype=BF16)}, UnsupportedError, r"B.shape\[2\] must be a power of two"),
    ("ssu", {"C": torch.zeros(1, 1, 16, dtype=BF16)}, UsageError, r"C.shape must be \[1, 1, 32\]"),
    ("ssu", {"C": torch.zeros(1, 1, 32)}, UsageError, "C.dtype must be torch.bfloat16"),
    ("ssu", {"dt": torch.zeros(1, 4, dtype=BF16)}, UsageError, r"dt.shape must be \[1, 5\]"),
    ("ssu", {"A": torch.zeros(5, dtype=BF16)}, UsageError, "A.dtype must be torch.float32"),
    ("ssu", {"D": torch.zeros(5, device="meta")}, UsageError, "D.device must be cpu, got meta"),
    ("ssu", {"out": torch.zeros(2, 5, 16)}, UsageError, "out.shape must be"),
    ("ssu", {"dst_members": i32([[1200]])}, UsageError, r"dst_members.shape must be \[1, 2\]"),
    ("ssu", {"dst_members": i32([[1200, 1800], [1, 2]])}, UsageError, "dst_members.shape"),
    ("ssu", {"src_members": i32([[0, 5000]])}, UsageError, "src_members must be below 3905, got 5000"),
    ("ssu", {"dst_members": i32([[1200, 5000]])}, UsageError, "dst_members must be below 3905, got 5000"),
    ("ssu", {"dst_members": i32([[1200, 1201]])}, UsageError, "dst_members must be at least 192 entries apart"),
    ("ssu", {"dst_members": i32([[600, 0]])}, UsageError, "dst_members must be disjoint from src_members"),
    ("delta", {"q": torch.zeros(1, 1, 32)}, UsageError, "q.dtype must be torch.bfloat16"),
    ("delta", {"k": torch.zeros(1, 1, 48, dtype=BF16)}, UsageError, "q.shape must be"),
    ("delta", {"k": torch.zeros(1, 1, 48, dtype=BF16), "q": torch.zeros(1, 1, 48, dtype=BF16)}, UnsupportedError,
     r"k.shape\[2\] must be a power of two from 16 to 256, got 48"),
    ("delta", {"v": torch.zeros(1, 3, 8, dtype=BF16)}, UnsupportedError, r"v.shape\[2\] must be a power of two"),
    ("delta", {"a": torch.zeros(1, 2, dtype=BF16)}, UsageError, r"a.shape must be \[1, 3\]"),
    ("delta", {"b": torch.zeros(1, 3)}, UsageError, "b.dtype must be"),
    ("delta", {"bias": torch.zeros(2)}, UsageError, r"bias.shape must be \[3\]"),
    ("delta", {"out": torch.zeros(1, 3, 32)}, UsageError, "out.shape must be"),
    ("delta", {"dst_members": i32([[600, 0]])}, UsageError, "dst_members must be disjoint from src_members"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "error", "message"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_input_is_refused_before_a_launch(name, changes, error, message):
    with pytest.raises(error, match=message):
        call(name, **changes)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("impl", IMPLS)
def test_good_and_empty_batches(name, impl):
    call(name, impl=impl)
    f = FAMILIES[name]
    none = torch.zeros(0, 2, dtype=torch.int32)
    call(name, **f.tokens(0, 0), src_members=none, dst_members=none, out=f.output(0), impl=impl)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore")  # opcheck's own deprecations
def test_the_op_is_registered_as_it_is(name):
    check_registered(ops.state_update if name == "ssu" else ops.delta_update, arguments(name))
