"""The simulator: times, windows, workloads, reports, and the quick shape checks."""

import csv
import json

import pytest

from benches.depth_checks import CHECKS
from benches.depth_lab import Lab
from benches.depth_planner import planner_of, timed
from benches.reproduce import page
from hybridkv.cli import main
from hybridkv.errors import UsageError
from hybridkv.schedule.depth import DepthConfig, DepthRequest, Stage
from hybridkv.schedule.latency import LATENCIES
from hybridkv.simulate.depth import compare, simulate
from hybridkv.simulate.depth_workload import (
    HUGINN_DEPTHS,
    OURO_DEPTHS,
    WORKLOADS,
    Arrivals,
    DepthMix,
    default_depths,
    draw_workload,
    read_trace,
)

OURO = LATENCIES["ouro-1.4b"]
QUICK = [check for check in CHECKS if check.quick]


def small(requests=300, workload="alpaca", seed=0, depths=OURO_DEPTHS):
    return draw_workload(WORKLOADS[workload], depths, seed, requests=requests)


def test_a_launch_by_hand():
    """One request, two loops: every term of the latency model once."""
    seen = []
    arrivals = Arrivals((DepthRequest.recorded("r", 100, [2]),), (0.0,))
    run = simulate(arrivals, DepthConfig(mode="refill", width=4, max_loops=4), OURO, seen.append)
    prefill = 19.2 + 100 * (0.06 + 1e-5 * 100)
    loop = OURO.loop.delta + OURO.loop.gamma * 1 + OURO.loop.kappa * 101
    assert [round(1e3 * launch.duration_s, 9) for launch in seen] == [
        round(value, 9) for value in (prefill, 0.05, loop, loop, 0.35 + 0.0008)
    ]
    assert run.span_s == pytest.approx(sum(launch.duration_s for launch in seen))
    assert run.normalized == {"r": pytest.approx(run.span_s / 2)}


def test_padding_is_charged():
    """Nine rows run in a bucket of twelve: three rows of gamma a loop."""
    requests = tuple(DepthRequest.recorded(f"r{i}", 1, [4]) for i in range(9))
    config = DepthConfig(mode="refill", width=16, max_loops=4)
    runs = [
        simulate(Arrivals(requests, (0.0,) * 9), config, OURO, buckets=buckets) for buckets in (True, False)
    ]
    gap = runs[0].whole.time[Stage.RECURRENT] - runs[1].whole.time[Stage.RECURRENT]
    assert gap == pytest.approx(4 * 3 * OURO.loop.gamma / 1e3)
    assert runs[0].whole.padding == pytest.approx(gap + 3 * 0.0008 / 1e3)


def test_simulations_repeat():
    config = DepthConfig(mode="refill", width=64, max_loops=4)
    assert simulate(small(), config, OURO) == simulate(small(), config, OURO)
    assert small(seed=1) != small(seed=2)


def test_modes_emit_the_same_tokens():
    arrivals = small(250)
    rows = compare("ouro-1.4b", arrivals, [("cb", 1), ("norefill", 1), ("refill", 1)], width=32)
    assert {row.tokens for row in rows} == {arrivals.tokens}
    assert [row.k for row in rows] == [None, None, 1]
    speedups = [row.speedup for row in rows]
    assert speedups == sorted(speedups)
    assert speedups[0] == 1
    assert all(0 < row.share_of_bound <= 1 for row in rows)


def test_the_baseline_is_run_but_not_reported_unless_asked_for():
    arrivals = small(60)
    with_cb, without = (
        compare("ouro-1.4b", arrivals, [*extra, ("refill", 1)], width=16) for extra in ([("cb", 1)], [])
    )
    assert with_cb[1:] == without


def test_poisson_arrivals_are_waited_for():
    arrivals = small(60).poisson(5.0, seed=3)
    run = simulate(arrivals, DepthConfig(mode="refill", width=64, max_loops=4), OURO)
    assert run.online
    assert run.span_s >= arrivals.times[-1]
    assert len(run.latency_s) == 60
    busy = simulate(small(60).poisson(500.0, seed=3), DepthConfig(mode="refill", width=64, max_loops=4), OURO)
    assert busy.normalized_latency > run.normalized_latency


def test_workloads_have_their_means():
    for name, workload in WORKLOADS.items():
        drawn = draw_workload(workload, OURO_DEPTHS, 5, requests=3000)
        prompts = sum(r.prompt for r in drawn.requests) / 3000
        assert prompts == pytest.approx(workload.prompt.mean, rel=0.15), name
    tokens = 200_000
    import numpy as np

    rng = np.random.default_rng(1)
    mean = sum(OURO_DEPTHS.draw(rng, tokens)) / tokens
    assert mean == pytest.approx(2.4, abs=0.01)
    assert sum(HUGINN_DEPTHS.draw(rng, tokens)) / tokens == pytest.approx(9.5, abs=0.02)
    assert set(DepthMix(4, (1.0,)).draw(rng, 50)) == {4}
    with pytest.raises(UsageError, match="max_loops must be 4 or 16 for a default exit mix, got 5"):
        default_depths(5)


FILES = {
    "mooncake.jsonl": '{"timestamp": 3000, "input_length": 7, "output_length": 3, "hash_ids": [1]}\n{"timestamp": 4500, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n',
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.0000000,7,3\n2023-11-16 18:17:04.5000000,9,1",
    "servegen.csv": "arrival_s,client_id,input_tokens,output_tokens\r\n1.0,4,7,3\r\n2.5,4,9,1\r\n",
    "arxiv.csv": "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n7.0,3.0,10,2.3\n9.0,1.0,10,9\n",
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_trace_files(name, tmp_path):
    path = tmp_path / name
    path.write_text(FILES[name], newline="")
    read = read_trace(path, OURO_DEPTHS, 0)
    assert [(r.prompt, r.decode_tokens) for r in read.requests] == [(7, 2), (9, 0)]
    assert read.times == ((0.0, 0.0) if name == "arxiv.csv" else (0.0, 1.5))
    assert len(read_trace(path, OURO_DEPTHS, 0, requests=1).requests) == 1


def test_public_traces(traces):
    for path in sorted(traces.glob("*.*")):
        if path.suffix in {".csv", ".jsonl"}:
            read = read_trace(path, OURO_DEPTHS, 0, requests=50)
            assert len(read.requests) == 50
            assert all(r.prompt >= 1 for r in read.requests)


def test_files_that_are_no_traces(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match=r"must have one of the columns .*, got \['a', 'b'\]"):
        read_trace(tmp_path / "x.csv", OURO_DEPTHS, 0)
    with pytest.raises(UsageError, match="workload must be alpaca, sharegpt, arxiv or a trace file, got"):
        read_trace(tmp_path / "missing.csv", OURO_DEPTHS, 0)


def run_command(*arguments):
    return main(["depth", *map(str, arguments)])


def test_command_writes_rows_plots_and_schedules(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    common = ("--workload", "alpaca", "--requests", 200, "--width", 16)
    code = run_command(
        *common, "--k", "1,4", "--seeds", "0,1", "--json", tmp_path / "out.json", "--plot", tmp_path / "plots",
        "--trace", tmp_path / "t.csv",
    )  # fmt: skip
    assert code == 0
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(row["mode"], row["k"], row["seed"]) for row in rows] == [
        (mode, k, seed)
        for seed in (0, 1)
        for mode, k in (("cb", None), ("norefill", None), ("refill", 1), ("refill", 4))
    ]
    wanted = "mode k seed requests tokens span_s throughput speedup bound share_of_bound recurrent_batch coda_batch boundary_share"
    assert set(wanted.split()) <= set(rows[0])
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"speedup.png", "batches.png"}
    with (tmp_path / "t-refill-k4.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == ["launch", "stage", "B", "detail", "Q_R", "Q_C", "Q_P"]
    assert [line["launch"] for line in lines] == [str(n) for n in range(1, len(lines) + 1)]
    assert (lines[2]["stage"], lines[2]["detail"], lines[2]["Q_P"]) == ("recurrent", "1:16", "184")
    assert "refill" in capsys.readouterr().out


def test_command_online_and_timeline(tmp_path):
    pytest.importorskip("matplotlib")
    code = run_command(
        "--model", "huginn-3.5b", "--workload", "alpaca", "--requests", 40, "--rate", "2,8", "--modes", "cb,refill", "--k", 4,
        "--trace", tmp_path / "t.json", "--plot", tmp_path, "--json", tmp_path / "rows.json",
    )  # fmt: skip
    assert code == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"cb", "refill-k4"}
    assert {e["name"].split()[0] for e in events if e["ph"] == "X"} == {
        "prefill",
        "prelude",
        "recurrent",
        "coda",
        "decode",
    }
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["rate"] for row in rows] == [2.0, 2.0, 8.0, 8.0]
    assert all(row["normalized_latency_s"] > 0 for row in rows)
    assert (tmp_path / "latency.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "nope"), "workload must be alpaca, sharegpt, arxiv or a trace file, got 'nope'"),
        (("--modes", "fill"), "modes must be among cb, norefill, refill, got 'fill'"),
        (("--k", "one"), "k must be integers separated by commas, got 'one'"),
        (("--k", ","), "k must name at least one item, got ','"),
        (("--rate", "fast"), "rate must be a positive number or 'trace', got 'fast'"),
        (("--rate", "-1"), "rate must be a positive number or 'trace', got '-1'"),
        (("--rate", "trace"), "rate must be a number for a workload without arrival times, got 'trace'"),
        (("--width", "8", "--k", "16"), "min_coda must be at most the width 8, got 16"),
        (("--k", "0"), "min_coda must be a positive integer, got 0"),
    ],
)
def test_command_errors(arguments, message, capsys):
    assert run_command("--workload", "alpaca", "--requests", 5, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("check", QUICK, ids=lambda check: str(check.number))
def test_quick_shape_checks(check):
    seen = list(check.measure(Lab()))
    assert seen
    assert [s for s in seen if not s.holds] == []


def test_the_thirty_checks_are_there():
    assert sorted(check.number for check in CHECKS) == list(range(1, 31))
    text = page([(check, list(check.measure(Lab()))) for check in QUICK])
    assert text.startswith(f"{len(QUICK)} of {len(QUICK)} hold.")


def test_a_missed_check_is_listed():
    check = QUICK[0]
    seen = [s._replace(value=s.high + 1) for s in check.measure(Lab())]
    text = page([(check, seen)])
    assert f"0 of 1 hold. Missed: {check.number}." in text
    assert "**missed**" in text


def test_planner_bench_sees_every_stage():
    assert {"prelude", "recurrent", "coda"} <= set(timed(planner_of(8, "refill"), 8))
