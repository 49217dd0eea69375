"""The histories that a GPU repeats, at small shapes under the interpreter; each can fail."""

import pytest
import torch

from benches import gpu
from hybridkv.testing import exact
from hybridkv.testing.guard import guard

SMALL = exact.Sizes(
    kv_heads=1,
    group=2,
    head_dim=16,
    context=60,
    state=(3, 16, 16),
    delta=(1, 16, 3, 16),
    chunk=16,
    chunks=2,
    steps=5,
)
CPU = torch.device("cpu")


def test_attention_histories_agree():
    with guard(hazards=False):
        found = exact.attention(CPU, SMALL)
    assert len(found) == 6
    assert all(found.values()), found


def test_recurrent_histories_agree():
    for family in (exact.ssd_family(CPU, SMALL), exact.delta_family(CPU, SMALL)):
        with guard(hazards=False):
            found = exact.recurrent(family, SMALL.steps)
        assert len(found) == 5
        assert all(found.values()), found


def test_served_histories_agree():
    found = exact.served(CPU, "reference")
    assert len(found) == 14
    assert all(found.values()), found


def test_a_history_of_other_tokens_does_not_agree():
    family = exact.ssd_family(CPU, SMALL)
    out, states = exact.history(family, [32], 3, 0)
    assert not out.isnan().any()
    family.tokens["x"][0, 0, 0] += 1
    other, moved = exact.history(family, [32], 3, 0)
    assert not exact.same(out, other)
    assert not exact.same(states, moved)


@pytest.mark.parametrize("family", [gpu.moves, gpu.attention, gpu.fill, gpu.recurrent])
def test_every_case_of_the_gpu_script_is_a_call_that_the_ops_accept(family, monkeypatch):
    for name, value in {"SETS": 1, "PAGES": 4, "BATCH": 2, "CONTEXT": 20}.items():
        monkeypatch.setattr(gpu, name, value)
    for case in family(CPU):
        case.calls[0]()
        assert case.bytes > 0


def test_the_gpu_script_skips_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 0
    assert "no GPU" in capsys.readouterr().out
