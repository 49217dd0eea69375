"""Workloads, the step-time law, the simulated engine, statistics; figures of real traces where they are at hand."""

import json

import numpy as np
import pytest

from hybridkv import CachePolicy, ModelGeometry, Organization, OutOfMemory, UsageError
from hybridkv.alloc.builders import BUILDERS
from hybridkv.schedule.hybrid import HybridConfig
from hybridkv.simulate.cache_only import attention_only, block_curve, reuse
from hybridkv.simulate.engine import simulate
from hybridkv.simulate.law import StepLaw, fit_step_law
from hybridkv.simulate.stats import COLUMNS, mean_rows, paired_change, percentile, summarize
from hybridkv.simulate.workload import PaperWorkload, read_trace, rescale
from tests.conftest import load_golden

FALCON = ModelGeometry.preset("falcon-h1-7b")
DERIVED = load_golden("paper_tables")["derived"]
B83 = 83 * FALCON.uniform_unit.bytes


def run(name, arrivals, *, budget=B83, isolate=False, **policy):
    o = Organization.named(name, FALCON)
    policy = CachePolicy(**({"decode": "update_shared"} | policy))
    return simulate(o, o.pages(budget), arrivals, policy=policy, config=HybridConfig(), isolate=isolate)


# --------------------------------------------------------------------------------------------------- step-time law
def test_fits_of_the_step_time_law_come_out():
    golden = DERIVED["step_time_law"]
    columns = dict(zip(golden["columns"], zip(*golden["rows"], strict=True), strict=True))
    cells = [columns[c] for c in ("decode_per_step", "prefill_tokens_per_step", "ms_per_step")]
    six = [i for i, source in enumerate(columns["source"]) if source == "E-6"]
    for chosen, expected in ((six, golden["fit_six_rows_E6"]), (range(len(cells[0])), golden["fit_all_20"])):
        fit = fit_step_law(*([column[i] for i in chosen] for column in cells))
        got = (fit.law.base_ms, fit.law.decode_ms, fit.law.prefill_ms, fit.r2)
        assert got == pytest.approx(
            [expected[k] for k in ("t0", "beta", "rho", "r2")], rel=1e-4
        )  # the rows are rounded


def test_the_law_predicts_every_measured_row_within_three_percent():
    """Shape check 2."""
    law = StepLaw()
    for _, label, decode, prefill, measured in DERIVED["step_time_law"]["rows"]:
        assert 1000 * law.seconds(decode, prefill) == pytest.approx(measured, rel=0.03), label


def test_a_fit_needs_steps_that_differ():
    with pytest.raises(
        UsageError, match="steps must differ in rows and tokens, at least three of them, got 4"
    ):
        fit_step_law([5, 5, 5, 5], [10, 10, 10, 10], [20, 21, 20, 21])


# -------------------------------------------------------------------------------------------------------- workloads
def test_the_papers_generator():
    """Section 4 of the reference: 300 requests, 8 contexts of 3,072 tokens, inputs near 3,365, outputs near 255."""
    arrivals = [a for seed in range(8) for a in PaperWorkload().arrivals(seed)]
    assert np.mean([a.input_tokens for a in arrivals]) == pytest.approx(3365, rel=0.02)
    assert np.mean([a.output_tokens for a in arrivals]) == pytest.approx(250, rel=0.04)
    assert max(a.output_tokens for a in arrivals) <= 1024
    assert len({a.runs[0] for a in PaperWorkload().arrivals(1)}) == 8
    assert PaperWorkload().arrivals(5) == PaperWorkload().arrivals(5) != PaperWorkload().arrivals(6)


def test_q_is_the_fraction_of_requests_with_a_shared_context():
    private = PaperWorkload(q=0).arrivals(1)
    tokens = np.concatenate([a.tokens() for a in private])
    assert len(np.unique(tokens)) == len(tokens)
    half = PaperWorkload(q=0.5, requests=2000).arrivals(1)
    assert np.mean([a.runs[0][0] < 8 * 5392 for a in half]) == pytest.approx(0.5, abs=0.04)


def test_bursts_keep_the_mean_rate():
    times = np.array(
        [a.arrival_s for a in PaperWorkload(rate=1.7, burst_s=(5, 15), requests=3000).arrivals(3)]
    )
    assert (times % 20 < 5).all()
    assert len(times) / times[-1] == pytest.approx(1.7, rel=0.1)


def mooncake(tmp_path, rows, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    return path


ROW = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [3, 4]}


def test_mooncake_rows_become_tokens(tmp_path):
    path = mooncake(tmp_path, [ROW, ROW | {"timestamp": 2500, "input_length": 1024, "hash_ids": [3, 9]}])
    first, second = read_trace(path)
    assert (first.arrival_s, second.arrival_s) == (0, 2.5)
    assert first.tokens().shape == (700,)
    assert (first.tokens()[:512] == second.tokens()[:512]).all()
    assert not np.isin(first.tokens()[512:], second.tokens()).any()


def test_csv_traces_share_nothing(tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,20,10\n2023-11-16 18:17:04.4799600,30,8"
    )
    a, b = read_trace(azure)
    assert (a.arrival_s, b.arrival_s) == (0, 0.5)
    assert not np.isin(a.tokens(), b.tokens()).any()
    servegen = tmp_path / "servegen.csv"
    servegen.write_bytes(b"arrival_s,client_id,input_tokens,output_tokens\r\n0.0,12,11,6\r\n1.5,1,13,7\r\n")
    assert [(x.input_tokens, x.output_tokens, x.arrival_s) for x in read_trace(servegen)] == [
        (11, 6, 0),
        (13, 7, 1.5),
    ]
    assert [x.arrival_s for x in rescale(read_trace(servegen), 0.25)] == [0, 4]


BAD_ROWS = [
    (["{broken\n"], "trace.jsonl:1 must be a JSON object, got '{broken"),
    ([json.dumps(ROW)[:30]], "trace.jsonl:1 must be a JSON object"),
    ([ROW, '{"timestamp": 5, "input_len'], "trace.jsonl:2 must be a JSON object"),
    (["[1, 2]\n"], "trace.jsonl:1 must be a JSON object, got '.1, 2."),
    ([ROW | {"timestamp": -1}], "timestamp of trace.jsonl:1 must be an integer of at least 0, got -1"),
    ([ROW | {"timestamp": "now"}], "timestamp of trace.jsonl:1 must be an integer of at least 0, got 'now'"),
    ([ROW | {"input_length": 0}], "input_length of trace.jsonl:1 must be an integer of at least 1, got 0"),
    (
        [ROW | {"output_length": 1.5}],
        "output_length of trace.jsonl:1 must be an integer of at least 1, got 1.5",
    ),
    (
        [{k: v for k, v in ROW.items() if k != "output_length"}],
        "output_length of trace.jsonl:1 must be .* got None",
    ),
    (
        [ROW | {"hash_ids": [3]}],
        "hash_ids of trace.jsonl:1 must be 2 integers of at least 0, one per 512 tokens, got .3.",
    ),
    ([ROW | {"hash_ids": [3, "x"]}], "hash_ids of trace.jsonl:1 must be 2 integers"),
    ([ROW | {"hash_ids": None}], "hash_ids of trace.jsonl:1 must be 2 integers"),
    ([ROW | {"timestamp": 9000}, ROW], "arrivals must be sorted, got 0.0 behind 9.0 in trace.jsonl"),
    ([], "trace must hold at least one request, got none"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_malformed_and_truncated_traces_are_refused(tmp_path, rows, message):
    with pytest.raises(UsageError, match=message):
        read_trace(mooncake(tmp_path, rows))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "columns of t.csv must be TIMESTAMP, ContextTokens, GeneratedTokens or arrival_s"),
        ("arrival_s,input_tokens,output_tokens\nx,1,1\n", "arrival_s of t.csv:2 must be a time, got 'x'"),
        (
            "arrival_s,input_tokens,output_tokens\n0,0,1\n",
            "input_tokens of t.csv:2 must be a whole number of at least 1, got '0'",
        ),
        (
            "arrival_s,input_tokens,output_tokens\n0,5\n",
            "output_tokens of t.csv:2 must be a whole number of at least 1, got None",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n", "TIMESTAMP of t.csv:2 must be a time"),
        ("", "columns of t.csv must be"),
    ],
    ids=range(6),
)
def test_malformed_csv_is_refused(tmp_path, text, message):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_trace(path)


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(UsageError, match="trace must be a file, got"):
        read_trace(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": 1.5}, "q must be in .0, 1., got 1.5"),
        ({"rate": 0}, "rate must be above 0, got 0"),
        ({"requests": 0}, "requests must be at least 1, got 0"),
        ({"output_mean": -3}, "output_mean must be above 0, got -3"),
    ],
    ids=str,
)
def test_wrong_workloads_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        PaperWorkload(**options)


# ----------------------------------------------------------------------------------------------------------- engine
SMALL = PaperWorkload(requests=40, rate=6.0)


@pytest.mark.parametrize("name", BUILDERS)
def test_every_request_runs_to_its_end(name):
    arrivals = SMALL.arrivals(1)
    done = run(name, arrivals)
    row = summarize(done, name, 1)
    assert set(row) == set(COLUMNS)
    assert row["requests"] == 40
    assert all(
        a.arrival_s <= t.admitted_s < t.first_token_s <= t.finished_s
        for a, t in zip(arrivals, done.trips, strict=True)
    )
    computed = row["prefill_tokens"] + row["avoided_tokens"]
    assert computed >= sum(a.input_tokens for a in arrivals)
    recomputed = sum(a.output_tokens - 1 for a in arrivals) - done.decode_rows
    assert (
        0 <= recomputed <= row["preemptions"]
    )  # the newest token of a preempted request comes with its prompt
    assert all(pool.held == 0 for pool in done.final.pools.values())


def test_equal_runs_are_equal():
    """I12."""
    rows = [summarize(run("s2", SMALL.arrivals(2)), "s2", 2) for _ in range(2)]
    assert rows[0] == rows[1]


def test_isolated_requests_share_nothing():
    """Section 3.5: ISOLATE makes reuse across requests impossible."""
    arrivals = SMALL.arrivals(1)
    assert max(t.cached_tokens for t in run("s2", arrivals, isolate=True).trips if not t.preemptions) == 0
    assert max(t.cached_tokens for t in run("s2", arrivals).trips) == 3072


def test_the_more_a_budget_holds_the_deeper_the_hits():
    depth = {
        b: summarize(run("s2", SMALL.arrivals(3), budget=b * FALCON.uniform_unit.bytes), "s2", 3)[
            "joint_mean"
        ]
        for b in (30, 108)
    }
    assert depth[30] < depth[108]


def test_a_request_that_never_fits_stops_the_replay():
    arrivals = PaperWorkload(requests=2, shared_tokens=60_000).arrivals(1)
    with pytest.raises(OutOfMemory, match=r"request 0 of .* tokens must fit the pools"):
        run("s0", arrivals)


def test_statistics():
    assert percentile(np.arange(1, 101), 99) == 99
    rows = [
        {"organization": o, "seed": s, **dict.fromkeys(COLUMNS[2:], v)}
        for o, s, v in (("a", 1, 2), ("a", 2, 4), ("b", 1, 3), ("b", 2, 5))
    ]
    assert [r["throughput"] for r in mean_rows(rows)] == [3, 4]
    assert paired_change(rows, "b", "a") == [50, 25]


# ------------------------------------------------------------------------------------------------------- cache only
def test_reuse_of_a_small_trace(tmp_path):
    """Two prompts share two blocks of three; the second finds them, its own last block is partial."""
    rows = [
        {"timestamp": 0, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 3]},
        {"timestamp": 1, "input_length": 1100, "output_length": 1, "hash_ids": [1, 2, 4]},
    ]
    arrivals = read_trace(mooncake(tmp_path, rows))
    o = Organization.named("s2", FALCON)
    every = reuse(o, arrivals)
    assert (every.attention_tokens, every.joint_tokens, every.input_tokens) == (1024, 1024, 2636)
    end = reuse(o, arrivals, placement="end_only")
    assert (end.attention_tokens, end.joint_tokens, end.checkpoints) == (1024, 1024, 1)
    assert reuse(Organization.named("d0", FALCON), arrivals).joint_tokens == 0
    assert block_curve(FALCON, arrivals, [1e6])[1e6] == 2 / 6
    assert attention_only(FALCON).footprint(attention=3, checkpoints=0) == 3 * 512 * 1024


def test_a_curve_needs_hash_ids():
    with pytest.raises(UsageError, match="arrivals must carry hash ids"):
        block_curve(FALCON, SMALL.arrivals(1), [1e6])


@pytest.mark.nightly
@pytest.mark.parametrize("file", DERIVED["real_trace_reuse"]["files"])
def test_reuse_of_the_public_traces(traces, file):
    """Must show 2 and shape checks 25, 26: the curve and the joint-hit table, within one point."""
    arrivals = read_trace(traces / file)
    curve = {float(k[:-1]) * 1e6: v for k, v in DERIVED["lru_block_hit"][file].items() if k.endswith("M")}
    for size, hit in block_curve(FALCON, arrivals, list(curve)).items():
        assert hit == pytest.approx(curve[size], abs=0.01)
    golden = DERIVED["real_trace_reuse"]["files"][file]
    names = {
        "every_block": "every_512",
        "interval(2048)": "every_2048_plus_end",
        "end_only": "end_only",
        "end_junction": "end_plus_junction",
    }
    for placement, name in names.items():
        found = reuse(Organization.named("s2", FALCON), arrivals, placement=placement)
        assert found.attention_hit == pytest.approx(golden["attention_token_hit"], abs=0.01)
        assert found.joint_share == pytest.approx(golden["joint_share"][name], abs=0.01)
        assert found.checkpoints == pytest.approx(golden["checkpoints"][name], rel=0.005)
    coarse = reuse(Organization.named("d0", FALCON), arrivals)
    assert coarse.joint_share == pytest.approx(golden["joint_share"]["grid_1792"], abs=0.01)


def test_reuse_of_a_public_trace_in_part(traces):
    """The first 1,500 requests of the default trace: what an index by hand finds."""
    arrivals = read_trace(traces / "mooncake_conversation_le8192.jsonl", limit=1500)
    seen, hits = set(), 0
    for a in arrivals:
        full = a.hash_ids[: (a.input_tokens - 1) // 512]
        depth = next((i for i, block in enumerate(full) if block not in seen), len(full))
        hits += 512 * depth
        seen.update(a.hash_ids[: a.input_tokens // 512])
    found = reuse(Organization.named("s2", FALCON), arrivals)
    assert found.attention_tokens == found.joint_tokens == hits > 0
