"""The command line: what it prints, what it writes, and what it says when it is used wrongly."""

import json
import re
import subprocess
import sys

import pytest

from hybridkv.cli import main
from hybridkv.simulate.stats import COLUMNS


def run(capsys, *args):
    code = main([str(a) for a in args])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_plan_prints_a_line_per_organization(capsys, tmp_path):
    code, out, _ = run(
        capsys, "plan", "--model", "granite-4.0-h-micro", "--memory", "24GiB", "--json", tmp_path / "p.json"
    )
    assert code == 0
    rows = json.loads((tmp_path / "p.json").read_text())
    assert [r["organization"] for r in rows] == ["s0", "s1", "s2", "d0", "striped", "nested"]
    assert rows[2]["pages"] == {"shared": 24 * 1024**3 // (4 * 512 * 1024)}
    for row in rows:
        assert re.search(rf"^{row['organization']} .* {row['requests']} ", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 110


def test_plan_of_a_config_file(capsys, tmp_path):
    config = {
        "model_type": "falcon_mamba", "num_hidden_layers": 4, "hidden_size": 64, "state_size": 16, "conv_kernel": 4,
        "intermediate_size": 128, "expand": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = run(capsys, "plan", "--model", tmp_path / "config.json", "--memory", "1GiB")
    assert code == 0
    assert "d0 has one pool for attention and one for recurrent state" in out


def test_replay_writes_rows_plots_and_a_timeline(capsys, tmp_path):
    args = (
        "--requests",
        12,
        "--organizations",
        "s2,d0",
        "--seeds",
        "1-2",
        "--json",
        tmp_path / "r.json",
        "--plot",
        tmp_path,
    )
    code, out, _ = run(capsys, "replay", *args)
    assert code == 0
    rows = json.loads((tmp_path / "r.json").read_text())
    assert [(r["organization"], r["seed"]) for r in rows] == [("s2", 1), ("s2", 2), ("d0", 1), ("d0", 2)]
    assert all(set(row) == set(COLUMNS) for row in rows)
    assert {"s2.png", "d0.png", "comparison.png"} <= {p.name for p in tmp_path.iterdir()}
    assert (tmp_path / "s2.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "s2.trace.json").read_text())["traceEvents"]
    assert sum(e["name"] == "prefill" and "request" in e["args"] for e in events if e["ph"] == "X") == 12
    assert {e["ph"] for e in events} >= {"X", "C", "M"}
    assert max(map(len, out.splitlines())) <= 110
    assert re.search(r"^s2 ", out, re.MULTILINE) and re.search(r"^d0 ", out, re.MULTILINE)


def test_replay_of_a_trace_without_a_clock(capsys, tmp_path):
    row = {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 3]}
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps(row | {"timestamp": 1000 * i}) + "\n" for i in range(4))
    )
    code, out, _ = run(
        capsys,
        "replay",
        tmp_path / "t.jsonl",
        "--cache-only",
        "--organizations",
        "s2",
        "--json",
        tmp_path / "c.json",
    )
    assert code == 0
    rows = json.loads((tmp_path / "c.json").read_text())
    curve = [r["block_hit"] for r in rows if r["table"] == "curve"]
    assert curve == [9 / 12] * 5
    assert [r["joint_hit"] for r in rows if r["table"] == "budget"] == [3 * 1024 / 4400]
    assert "Joint reuse in a boundless cache" in out
    code, out, _ = run(capsys, "replay", tmp_path / "t.jsonl", "--organizations", "s2", "--rate", "2")
    assert code == 0 and "4 requests at 2.00/s" in out


BAD = [
    (["replay", "nowhere.jsonl"], "trace must be a file, got 'nowhere.jsonl'"),
    (["replay", "--model", "falcon-h1-8b"], "falcon-h1-7b"),
    (
        ["replay", "--organizations", "s2,s9"],
        "organization must be one of s0, s1, s2, d0, striped, nested, got 's9'",
    ),
    (["replay", "--organizations", ","], "organizations must name at least one item"),
    (["replay", "--budget", "lots"], "budget must be an amount of memory such as 24GiB, got 'lots'"),
    (["replay", "--budget", "1KiB"], "budget_bytes must be at least"),
    (["replay", "--budget", "b2"], "must fit the pools"),
    (["replay", "--rate", "-1"], "rate must be above 0, got -1.0"),
    (["replay", "--requests", "0"], "requests must be at least 1, got 0"),
    (["replay", "--q", "2"], "q must be in [0, 1], got 2.0"),
    (["replay", "--headroom", "1.0"], "headroom must be in [0, 1), got 1.0"),
    (["replay", "--headroom", "some"], "headroom must be a number in [0, 1), got 'some'"),
    (
        ["replay", "--placement", "sometimes"],
        "placement must be one of every_block, end_only, end_junction, interval(N), got 'sometimes'",
    ),
    (
        ["replay", "--placement", "interval(700)"],
        "interval_tokens must be a multiple of grid_tokens (512), got 700",
    ),
    (["replay", "--seeds", "9-3"], "seeds must be numbers or ranges such as 42000-42011, got '9-3'"),
    (["replay", "--cap", "0"], "max_running must be at least 1, got 0"),
    (["plan", "--memory", "0GiB"], "memory must be an amount of memory such as 24GiB, got '0GiB'"),
    (["plan", "--memory", "24 gigs"], "memory must be an amount of memory"),
    (["plan", "--context", "0"], "context must be at least 1 token, got 0"),
    (["plan", "--tp", "5"], "kv_heads must be a multiple or a divisor of 5 ranks, got 2"),
]


@pytest.mark.parametrize(("args", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_wrong_usage_is_one_line_on_stderr(capsys, args, message):
    code, out, err = run(capsys, *args)
    assert code == 2
    assert message in err
    assert "Traceback" not in err and not out


@pytest.mark.parametrize("command", ["demo", "plan", "replay"])
def test_help_of_every_command(command):
    done = subprocess.run(
        [sys.executable, "-m", "hybridkv", command, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "--model" in done.stdout


def test_no_command_lists_the_commands():
    done = subprocess.run([sys.executable, "-m", "hybridkv"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "COMMAND" in done.stderr


def test_the_command_line_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from hybridkv.cli import main; raise SystemExit(main(['plan']))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
