"""KV write and paged attention: against fp64, and equal bits whatever surrounds a query."""

import functools
import itertools

import pytest
import torch
from hypothesis import strategies as st

from hybridkv import ops
from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.ops import attention as op_module
from hybridkv.reference import attention as reference
from hybridkv.testing.guard import guard
from hybridkv.triton import attention as kernels
from tests.census import Found, differing_bits, finds, search, survey
from tests.paged import Sequences, decode, error, indices, prefill, same

IMPLS = ["reference", "triton"]
LAYOUTS = {
    "token-major 16": ops.KVLayout.token_major(2, 16, 16, 64),
    "head-major 16": ops.KVLayout.head_major(2, 16, 16, 64),
    "token-major 512": ops.KVLayout.token_major(2, 16, 512, 64),
    "blocks of 48": ops.KVLayout.token_major(2, 16, 48, 64),  # divide no tile: an entry is read per token
    "keys beside values": ops.KVLayout(
        2, 16, 16, 80, 16, 32, 80
    ),  # rows of 80 elements, of which 64 are used
}


# ------------------------------------------------------------------------------------------ the KV write
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_write_equals_its_reference_over_the_whole_pool(layout, dtype):
    tokens, table = 7, torch.tensor([[40, -1, 0], [3, 80, -1]], dtype=torch.int32)
    g = torch.Generator().manual_seed(3)
    fused = torch.randn(tokens, 6, 16, generator=g).to(dtype)  # queries, keys, values of a fused projection
    key, value = fused[:, 2:4], fused[:, 4:]
    last = 2 * layout.block_tokens
    positions = indices(0, last - 1, 5, -1, 1, 2, 3)
    rows = indices(0, 1, 1, 0, -1, 0, 0)  # the second lies in block 1 of row 1; the fifth is absent
    positions[5] = layout.block_tokens + 2  # in an absent block
    pool = torch.full((80 * layout.granule + layout.extent + 64,), float("nan"), dtype=dtype)
    got = []
    for impl in IMPLS:
        mine = pool.clone()
        with guard(order="shuffle"):
            ops.write_kv(mine, key, value, table, rows, positions, layout=layout, impl=impl)
        got.append(mine)
    assert same(*got)
    untouched = torch.ones(pool.numel(), dtype=torch.bool)
    for token, entry, offset in ((0, 40, 0), (1, 80, layout.block_tokens - 1), (2, 3, 5), (6, 40, 3)):
        for h in range(2):
            at = entry * layout.granule + offset * layout.token_stride + h * layout.head_stride
            assert same(got[1][at : at + 16], key[token, h])
            assert same(got[1][at + layout.value_offset : at + layout.value_offset + 16], value[token, h])
            untouched[at : at + 16] = untouched[at + layout.value_offset : at + layout.value_offset + 16] = (
                False
            )
    assert got[1][untouched].isnan().all()


# ------------------------------------------------------------------------------------------ against fp64
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("layout", "window"),
    [("token-major 16", 0), ("head-major 16", 70), ("token-major 512", 0), ("blocks of 48", 0)],
)
def test_error_against_fp64(impl, dtype, layout, window):
    lengths, out_dtype = [1, 67, 530], torch.float32 if dtype == torch.float32 else torch.bfloat16
    s = Sequences(lengths, LAYOUTS[layout], dtype=dtype)
    pool, table = s.place([0, 1, 2], seed=1)
    with guard(order="shuffle"):
        newest = decode(pool, table, s, [0, 1, 2], lengths, impl=impl, window=window, out_dtype=out_dtype)
        spans = [(0, 1), (60, 67), (525, 530)]
        chunks = prefill(pool, table, s, [0, 1, 2], spans, impl=impl, window=window, out_dtype=out_dtype)
    exact = torch.stack([s.exact(r, n - 1, window) for r, n in enumerate(lengths)])
    long = torch.stack([s.exact(2, p, window) for p in range(525, 530)])
    for got, want in ((newest, exact), (chunks[2], long)):
        budget = 1e-6 if dtype == torch.float32 else 2 * error(want.to(out_dtype), want)
        assert error(got, want) <= budget


def test_bf16_weights_cost_less_than_the_budget_and_more_than_nothing():
    """The budget can fail: the same sums over keys that were rounded to 4 bits of mantissa exceed it."""
    s = Sequences([300], LAYOUTS["token-major 16"])
    exact = s.exact(0, 299)[None]
    s.key[0] = (s.key[0].view(torch.int16) & -16).view(torch.bfloat16)
    pool, table = s.place([0])
    assert error(decode(pool, table, s, [0], [300], impl="triton"), exact) > 2 * error(
        exact.bfloat16(), exact
    )


# ------------------------------------------------------------------------------------------ exactness
@pytest.fixture
def small(monkeypatch):
    """Segments of 64 in tiles of 16: the same code, with edges that small cases reach."""
    for module in (op_module, reference, kernels):
        monkeypatch.setattr(module, "SEGMENT", 64)
    launch = {"default": {16: (16, 4, 3)}}
    monkeypatch.setattr(kernels, "_LAUNCH", {2: launch, 4: launch})


SMALL = ops.KVLayout.token_major(1, 16, 16, 16)
HEAD_MAJOR_SMALL = ops.KVLayout.head_major(1, 16, 64, 48)


FAULTS = {  # what is planted into `two_histories`, and the property that it breaks
    "a block given to two rows": "batch composition",
    "tables not reordered with their rows": "row order",
    "blocks read in reverse": "page permutation",
    "blocks read one granule off": "organization",
    "a later cut forgets the first block": "split",
    "decode forgets the first block": "decode steps",
}
PROPERTIES = list(FAULTS.values())


@st.composite
def histories(draw, layouts=(SMALL, HEAD_MAJOR_SMALL)):
    """Two ways to compute the last positions of one sequence, among others, with everything else drawn."""
    length = draw(st.one_of(st.integers(2, 180), st.sampled_from([63, 64, 65, 128, 129])))
    computed = draw(st.integers(2, min(length, 9)))
    cuts = draw(st.lists(st.integers(length - computed + 1, length - 1), min_size=1, max_size=3, unique=True))
    mates = draw(st.lists(st.integers(1, 90), min_size=1, max_size=2))
    return {
        "length": length,
        "begin": length - computed,
        "cuts": sorted({length - computed, *cuts, length}),
        "decodes": draw(st.booleans()),
        "mates": mates,
        "place": draw(st.integers(1, len(mates))),
        "seed": draw(st.integers(0, 99)),
        "layout": draw(st.sampled_from(layouts)),
        "window": draw(st.sampled_from([0, 0, 1, 20, 100])),
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.float32])),
        "order": draw(st.sampled_from(["reverse", "shuffle"])),
    }


def plant(fault, table, me):
    """Break a table as an allocator or a caller might."""
    table = table.clone()
    if fault == "a block given to two rows":
        table[me, 0] = table[me - 1, 0]
    elif fault == "tables not reordered with their rows":
        table[[me - 1, me]] = table[[me, me - 1]]
    elif fault == "blocks read in reverse":
        table[me] = table[me].flip(0)
    elif fault == "blocks read one granule off":
        table -= (table > 0).int()
    elif "forgets" in (fault or ""):
        table[me, 0] = -1
    return table


def two_histories(impl, h, fault=None):
    """Return fp32 outputs of the same positions, computed plainly in the other layout and as drawn."""
    order = list(range(1, len(h["mates"]) + 1))
    order.insert(h["place"], 0)  # where the sequence stands in the batch
    s = Sequences([h["length"], *h["mates"]], SMALL, dtype=h["dtype"])
    other = HEAD_MAJOR_SMALL if h["layout"] == SMALL else SMALL
    pool, table = s.place([0], layout=other)
    spans = [(h["begin"], h["length"])]
    plain = prefill(pool, table, s, [0], spans, impl=impl, layout=other, window=h["window"])[0]
    pool, table = s.place(order, layout=h["layout"], seed=h["seed"], extra_blocks=3)
    me, parts = h["place"], []
    options = {"impl": impl, "window": h["window"], "layout": h["layout"]}
    planted = plant(fault, table, me)
    cut, late, steps = planted, planted, planted
    if "forgets" in (fault or ""):
        cut, late, steps = (
            table,
            planted if "cut" in fault else table,
            planted if "decode" in fault else table,
        )
    with guard(order=h["order"]):
        for begin, end in itertools.pairwise(h["cuts"]):
            seen = cut if begin == h["begin"] else late
            if h["decodes"] and end - begin == 1:
                lengths = [end if r == 0 else s.lengths[r] for r in order]
                parts.append(decode(pool, seen, s, order, lengths, **options)[me : me + 1])
            else:
                spans = [(begin, end) if r == 0 else (max(0, s.lengths[r] - 2), s.lengths[r]) for r in order]
                parts.append(prefill(pool, seen, s, order, spans, **options)[me])
        newest = decode(pool, steps, s, order, [s.lengths[r] for r in order], **options)[me]
    return plain, torch.cat(parts), newest


def run_history(impl, h, fault=None):
    plain, drawn, newest = two_histories(impl, h, fault)
    varied = {*PROPERTIES, f"blocks of {h['layout'].block_tokens} tokens", f"window: {h['window'] > 0}"}
    return Found(varied, differing_bits([(plain, drawn), (plain[-1], newest)]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.usefixtures("small")
def test_bits_depend_on_the_prefix_alone(impl):
    search(histories(), functools.partial(run_history, impl), 25)


@pytest.mark.nightly
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.usefixtures("small")
def test_bits_depend_on_the_prefix_alone_many(impl):
    each = [histories([layout]) for layout in (SMALL, HEAD_MAJOR_SMALL)]
    survey(f"attention, {impl}", PROPERTIES, each, functools.partial(run_history, impl))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.usefixtures("small")
def test_a_planted_fault_is_found(impl, fault):
    assert finds(histories(), lambda h: run_history(impl, h, fault))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", ["token-major 16", "token-major 512"])
def test_bits_at_full_size(impl, layout):
    """Real segments and tiles, over two of their edges, decode against prefill at any cut."""
    s = Sequences([1030, 40], LAYOUTS[layout])
    pool, table = s.place([1, 0], seed=5)
    apart, near = [(30, 40), (1020, 1030)], [(39, 40), (1023, 1030)]
    with guard(order="shuffle"):
        whole = prefill(pool, table, s, [1, 0], apart, impl=impl)
        assert same(prefill(pool, table, s, [1, 0], near, impl=impl)[1], whole[1][3:])
        for length in (1024, 1025, 1030):
            assert same(decode(pool, table, s, [1, 0], [40, length], impl=impl)[1], whole[1][length - 1021])


def control_history():
    return {
        "length": 150, "begin": 144, "cuts": [144, 150], "decodes": True, "mates": [], "place": 0, "seed": 1,
        "layout": SMALL, "window": 0, "dtype": torch.bfloat16, "order": "reverse",
    }  # fmt: skip


@pytest.mark.parametrize("what", ["tile", "segment"])
@pytest.mark.usefixtures("small")
def test_controls_other_groupings_change_fp32_bits_and_mostly_not_bf16(what, monkeypatch):
    s = Sequences([150], SMALL)
    pool, table = s.place([0])
    before = decode(pool, table, s, [0], [150], impl="triton")
    if what == "tile":
        monkeypatch.setattr(kernels, "_LAUNCH", {2: {"default": {16: (32, 4, 3)}}})
    else:
        for module in (op_module, kernels):
            monkeypatch.setattr(module, "SEGMENT", 128)
    after = decode(pool, table, s, [0], [150], impl="triton")
    assert not same(before, after)
    assert error(before, after.double()) < 1e-2


@pytest.mark.usefixtures("small")
def test_control_a_tile_that_decode_and_prefill_do_not_share_is_found(monkeypatch):
    whole = control_history()
    plain, drawn, _ = two_histories("triton", whole)
    assert same(plain, drawn)
    launch, calls = kernels._launch, []

    def other_tile(*args):
        constexprs, options = launch(*args)
        calls.append(1)
        return constexprs | {"TILE": 16 if len(calls) == 1 else 32}, options

    monkeypatch.setattr(kernels, "_launch", other_tile)
    plain, drawn, newest = two_histories("triton", whole)
    assert not same(plain, drawn)
    assert not same(plain[-1], newest)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.usefixtures("small")
def test_control_a_block_that_two_sequences_share_and_one_writes_is_found(impl):
    s = Sequences([40, 40], SMALL)
    pool, table = s.place([0, 1])
    clean = decode(pool, table, s, [0, 1], [40, 40], impl=impl)
    table[1, 0] = table[0, 0]  # planted: the second sequence writes into the first one's block
    ops.write_kv(pool, s.key[1][:1], s.value[1][:1], table, indices(1), indices(0), layout=SMALL, impl=impl)
    assert not same(clean[0], decode(pool, table, s, [0, 1], [40, 40], impl=impl)[0])


# ------------------------------------------------------------------------------------------ absence
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.usefixtures("small")
def test_absent_rows_leave_their_output_alone(impl):
    s = Sequences([40, 70, 20], SMALL)
    pool, table = s.place([0, 1, 2])
    with guard():
        out = decode(pool, table, s, [0, 1, 2], [40, 70, 20], impl=impl, names=indices(0, -1, 2))
        cut = prefill(
            pool, table, s, [0, 1, 2], [(38, 40), (66, 70), (19, 20)], impl=impl, names=indices(-1, 1, 2)
        )
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()
    assert cut[0].isnan().all()
    assert not torch.cat(cut[1:]).isnan().any()
    empty = indices(0, 0, 0)
    blank = torch.full((3, 3, 16), float("nan"))
    workspace = torch.empty(ops.decode_workspace(3, 3, table, SMALL))
    query = torch.stack([q[0] for q in s.query])
    with guard():
        ops.decode_attention(
            pool, query, table, indices(0, 1, 2), empty, blank, workspace, layout=SMALL, impl=impl
        )
    assert blank.isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.usefixtures("small")
def test_absent_blocks_are_not_seen_and_what_lies_before_a_window_is_not_read(impl):
    s = Sequences([100], SMALL)
    pool, table = s.place([0])
    windowed = decode(pool, table, s, [0], [100], impl=impl, window=20)
    gone = table.clone()
    gone[0, :5] = -1  # positions 0..79; the window begins at 80
    with guard():
        assert same(decode(pool, gone, s, [0], [100], impl=impl, window=20), windowed)
        pool[int(table[0, 4]) * 16 :][: SMALL.extent] = float("nan")  # freed and reused by another
        assert same(decode(pool, table, s, [0], [100], impl=impl, window=20), windowed)
        want = s.exact(0, 99, window=20)[None]
        assert error(decode(pool, gone, s, [0], [100], impl=impl), want) < 2 * error(want.bfloat16(), want)
        nothing = torch.full_like(table, -1)
        assert (decode(pool, nothing, s, [0], [100], impl=impl) == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_blocks_beyond_2_31_elements(impl):
    s = Sequences([20], SMALL)
    pool, table = s.place([0])
    far = torch.empty((1 << 31) + (1 << 16), dtype=torch.bfloat16)  # lazily: a few touched pages
    moved = table + (1 << 31) // 16
    far[1 << 31 :][: pool.numel()] = pool
    with guard():
        want = decode(pool, table, s, [0], [20], impl=impl)
        assert same(decode(far, moved[:, :2].contiguous(), s, [0], [20], impl=impl), want)
        ops.write_kv(
            far, s.key[0][:1], s.value[0][:1], moved, indices(0), indices(19), layout=SMALL, impl=impl
        )
    at = int(moved[0, 1]) * 16 + 3 * 16
    assert same(far[at : at + 16], s.key[0][0, 0])


# ------------------------------------------------------------------------------------------ refusals
def good():
    s = Sequences([40, 20], SMALL)
    pool, table = s.place([0, 1])
    query = torch.stack([q[0] for q in s.query])
    return {
        "pool": pool, "query": query, "table": table, "rows": indices(0, 1), "lengths": indices(40, 20),
        "out": torch.empty(2, 3, 16), "workspace": torch.empty(1000), "layout": SMALL,
    }  # fmt: skip


WIDE = torch.zeros(2, 17, 16, dtype=torch.bfloat16)
BAD = [
    ({"query": torch.zeros(2, 3, 16)}, UsageError, "query.dtype must be torch.bfloat16, got torch.float32"),
    ({"query": torch.zeros(2, 3, 32, dtype=torch.bfloat16)}, UsageError, "query.shape must be"),
    (
        {"query": WIDE[:, :3].transpose(0, 1).contiguous().transpose(0, 1)},
        UsageError,
        "query.stride\\(1\\) must be 16",
    ),
    (
        {"query": WIDE, "out": torch.empty(2, 17, 16)},
        UnsupportedError,
        "query.shape\\[1\\] must be at most 16 per KV",
    ),
    ({"out": torch.empty(2, 3, 16, dtype=torch.float64)}, UsageError, "out.dtype must be"),
    ({"out": torch.empty(3, 3, 16)}, UsageError, "out.shape must be \\[2, 3, 16\\], got \\[3, 3, 16\\]"),
    ({"rows": indices(0)}, UsageError, "lengths.shape must be \\[1\\]"),
    ({"rows": indices(0, 2)}, UsageError, "rows must be below 2, got 2"),
    ({"rows": torch.zeros(2, dtype=torch.int64)}, UsageError, "rows.dtype must be torch.int32"),
    ({"lengths": indices(40, 65)}, UsageError, "lengths must be below 65, got 65"),
    ({"table": indices(0, 1)}, UsageError, "table.shape must be \\[any, any\\], got \\[2\\]"),
    ({"table": torch.full((2, 4), 9999, dtype=torch.int32)}, UsageError, "table must be below"),
    (
        {"table": torch.zeros(2, 4, dtype=torch.int32, device="meta")},
        UsageError,
        "table.device must be cpu, got meta",
    ),
    ({"workspace": torch.empty(10)}, UsageError, "workspace.shape\\[0\\] must be at least 108, got 10"),
    ({"window": -1}, UsageError, "window must be at least 0, got -1"),
    ({"layout": SMALL._replace(head_dim=24)}, UnsupportedError, "layout.head_dim must be one of .*, got 24"),
    ({"layout": SMALL._replace(granule=4)}, UsageError, "granule must be a positive multiple of 16 bytes"),
    (
        {"layout": SMALL._replace(value_offset=257)},
        UsageError,
        "layout.value_offset must be a multiple of 16 bytes",
    ),
    ({"exits": indices([0])}, UsageError, "depths must be given with exits"),
]


@pytest.mark.parametrize(("change", "kind", "message"), BAD)
def test_bad_input_is_named_before_a_launch(change, kind, message):
    ops.decode_attention(**good())
    bad = good() | change
    before = bad["out"].clone()
    with pytest.raises(kind, match=message):
        ops.decode_attention(**bad)
    assert same(bad["out"], before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start": indices(0, 2)}, "query_start.shape must be \\[3\\], got \\[2\\]"),
        ({"query_start": indices(0, 2, 1)}, "query_start must be ascending within 0..2"),
        ({"query_start": indices(0, 1, 3)}, "query_start must be ascending within 0..2"),
        ({"max_query": 0}, "query_start \\(as queries of a sequence\\) must be below 1, got 1"),
        (
            {"query_start": indices(0, 2, 2), "lengths": indices(1, 20), "max_query": 2},
            "lengths must be at least the q",
        ),
    ],
)
def test_bad_prefill_input_is_named(change, message):
    fine = {k: v for k, v in good().items() if k != "workspace"} | {
        "query_start": indices(0, 1, 2),
        "max_query": 1,
    }
    ops.prefill_attention(**fine)
    with pytest.raises(UsageError, match=message):
        ops.prefill_attention(**fine | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, 2, 16, dtype=torch.bfloat16)}, "key.shape must be \\[2, 1, 16\\]"),
        ({"value": torch.zeros(2, 1, 16)}, "value.dtype must be torch.bfloat16"),
        ({"positions": indices(0, 64)}, "positions must be below 64, got 64"),
        ({"rows": indices(0, 2)}, "rows must be below 2, got 2"),
        ({"rows": indices(0, 0), "positions": indices(3, 3)}, "positions .* apart from each other"),
    ],
)
def test_bad_write_input_is_named(change, message):
    g, new = good(), torch.zeros(2, 1, 16, dtype=torch.bfloat16)
    fine = {k: g[k] for k in ("pool", "table", "rows", "layout")}
    fine |= {"key": new, "value": new, "positions": indices(0, 1)}
    ops.write_kv(**fine)
    with pytest.raises(UsageError, match=message):
        ops.write_kv(**fine | change)


# ------------------------------------------------------------------------------------------ torch
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.filterwarnings("ignore")  # opcheck's own deprecations
def test_ops_pass_opcheck_and_run_compiled(impl):
    g = good()
    tensors = tuple(g[k] for k in ("pool", "query", "table", "rows", "lengths", "out", "workspace"))
    numbers = {"layout": list(SMALL), "scale": 0.25, "window": 0, "impl": impl}
    torch.library.opcheck(torch.ops.hybridkv.decode_attention.default, (*tensors, None, None), numbers)
    new = torch.zeros(2, 1, 16, dtype=torch.bfloat16)
    torch.library.opcheck(
        torch.ops.hybridkv.write_kv.default,
        (g["pool"], new, new, g["table"], g["rows"], indices(0, 1)),
        {"layout": list(SMALL), "impl": impl},
    )

    def step(out):
        ops.write_kv(g["pool"], new, new, g["table"], g["rows"], indices(0, 1), layout=SMALL, impl=impl)
        ops.decode_attention(**g | {"out": out}, impl=impl)
        ops.prefill_attention(
            g["pool"], g["query"], indices(0, 1, 2), g["table"], g["rows"], g["lengths"], out + 0,
            layout=SMALL, max_query=1, impl=impl,
        )  # fmt: skip
        return out.sum()

    eager, traced = torch.empty(2, 3, 16), torch.empty(2, 3, 16)
    step(eager)
    torch.compile(step, fullgraph=True, backend="aot_eager")(traced)
    assert same(eager, traced)
