"""The GPU script without a GPU: what fails is a row and does not end the run, and nothing begins after the time is up."""

import json

import pytest
import torch

from benches import gpu
from hybridkv.testing import exact

CPU = torch.device("cpu")


@pytest.fixture
def stand_ins(monkeypatch):
    """Cases that do nothing and are called once; no clock, no device. Real cases: `test_exact_helpers`."""

    def idle(_):
        yield gpu.Case("idle", [lambda: None], 4e9)

    for name in ("moves", "attention", "fill", "recurrent"):
        monkeypatch.setattr(gpu, name, idle)

    def call(calls):
        for each in calls:
            each()
        return 1e-6

    monkeypatch.setattr(gpu, "seconds_per_call", call)
    monkeypatch.setattr(gpu, "seconds_from_python", call)
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda _: 4e12)
    monkeypatch.setattr(gpu, "machine", lambda _: ("none", 50 << 20))
    monkeypatch.setattr(gpu, "compiled", lambda *_: None)
    monkeypatch.setattr(exact, "attention", lambda *_: {"cut": True})
    monkeypatch.setattr(exact, "served", lambda *_: {"s2": True})
    monkeypatch.setattr(exact, "recurrent", lambda *_: {"cut": True, "again": False})


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_failure_is_a_row_and_the_run_goes_on(tmp_path, monkeypatch, stand_ins, capsys):
    def fails(_):
        yield gpu.Case("good", [lambda: None], 1e6)
        yield gpu.Case("bad", [lambda: 1 / 0], 1e6)
        raise RuntimeError("no memory")

    monkeypatch.setattr(gpu, "moves", fails)
    report = gpu.Report(tmp_path / "rows.jsonl", 600)
    gpu.run(report, CPU, exact.Sizes(delta=(1, 16, 1, 16), state=(1, 16, 16), chunks=1))
    found = rows(tmp_path / "rows.jsonl")
    broken = [r for r in found if "error" in r or r.get("equal") is False]
    assert [r.get("part", r.get("kernel")) for r in broken] == ["ssd", "delta_rule", "bad", "fails"]
    assert report.broken == 4
    speeds = {r["kernel"]: r for r in found if "us" in r}
    assert speeds["good"] == {
        "kernel": "good", "us": 1.0, "launched_us": 1.0, "bytes": 1e6, "share_of_copy": 0.25, "cached": True,
    }  # fmt: skip
    assert speeds["idle"]["cached"] is False  # too large for the cache
    assert "BITS DIFFER" in capsys.readouterr().out


def test_nothing_begins_after_the_time_is_up(tmp_path, stand_ins):
    report = gpu.Report(tmp_path / "rows.jsonl", -1)
    gpu.run(report, CPU, exact.Sizes())
    found = rows(tmp_path / "rows.jsonl")
    assert [r["part"] for r in found if "error" in r] == [
        "attention", "ssd", "delta_rule", "served", "idle", "idle", "idle", "idle", "compiled",
    ]  # fmt: skip
    assert {r["error"] for r in found if "error" in r} == {"no time left"}


def test_the_interpreter_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 2
    assert "TRITON_INTERPRET must be unset" in capsys.readouterr().err
