"""The timeline is plain JSON in the event format that Perfetto reads."""

import json

from hybridkv.simulate.chrome import ChromeTrace


def test_every_kind_of_event(tmp_path):
    trace = ChromeTrace()
    trace.span("loop 3", "refill/recurrent", 0.001, 0.0005, {"B": 64})
    trace.span("coda", "refill/coda", 0.0015, 0.0001)
    trace.span("wave", "norefill/recurrent", 0.0, 0.5)
    trace.counter("queues", 0.001, {"Q_R": 60, "Q_C": 4}, track="refill/queues")
    trace.flow("exit", 7, ("refill/recurrent", 0.0012), ("refill/coda", 0.0015))
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert (spans["loop 3"]["ts"], spans["loop 3"]["dur"], spans["loop 3"]["args"]) == (
        1000.0,
        500.0,
        {"B": 64},
    )
    assert spans["loop 3"]["pid"] == spans["coda"]["pid"] != spans["wave"]["pid"]
    assert len({(e["pid"], e["tid"]) for e in spans.values()}) == 3
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"recurrent", "coda", "queues"}
    start, end = (next(e for e in events if e["ph"] == phase) for phase in "sf")
    assert start["id"] == end["id"] == 7
    assert (start["tid"], end["tid"]) == (spans["loop 3"]["tid"], spans["coda"]["tid"])
    assert next(e for e in events if e["ph"] == "C")["args"] == {"Q_R": 60, "Q_C": 4}


def test_equal_runs_give_equal_bytes(tmp_path):
    for name in "ab":
        trace = ChromeTrace()
        for launch in range(100):
            trace.span("step", f"track {launch % 3}", launch / 3, 1 / 7)
        trace.write(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
