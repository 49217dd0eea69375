"""Checkpoints as files: what is saved loads into any organization and continues bit by bit; what differs is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridkv import ModelGeometry, UnsupportedError, UsageError
from hybridkv.alloc.plan import Refused
from hybridkv.arena import dump, payload
from hybridkv.geometry import AttentionSpec, RecurrentSpec
from hybridkv.testing.toy_hybrid import ORGANIZATIONS, toy_geometry, toy_organization
from tests.test_served import NEW, alone, engine, texts

PROMPT = (*texts(0)[0][:20], *range(30), 7, 8)  # 52 tokens: a boundary at 32


def served(kind="mamba2", name="s2", **options):
    e = engine(kind, name, **options)
    e.submit("first", list(PROMPT), NEW)
    e.run()
    return e


def saved(tmp_path, **options):
    e = served(**options)
    r = e.cache.request("again", list(PROMPT))
    path = tmp_path / "checkpoint.safetensors"
    assert dump.save(path, e.arena, e.cache, r) == 32
    assert not e.cache.leases
    return path, e, r


@pytest.mark.parametrize("target", ORGANIZATIONS)
@pytest.mark.parametrize("source", ["s2", "nested"])
def test_a_dump_loads_into_every_organization_and_continues_bit_by_bit(tmp_path, source, target):
    """I10: bits depend on tokens, not on where they were."""
    path, *_ = saved(tmp_path, name=source)
    e = engine("mamba2", target, order="page_major")
    loader = e.cache.request("loader", list(PROMPT))
    answer = dump.load(path, e.arena, e.cache, loader)
    assert (answer.cached, loader.computed) == (0, 32)
    e.cache.release(loader)
    e.submit("it", list(PROMPT), NEW)
    got, want = e.run()["it"], alone("mamba2", PROMPT)
    assert e.hits["it"] == 32
    assert got.tokens == want.tokens
    assert all(torch.equal(x, want.logits[p]) for p, x in got.logits.items())


def test_two_ways_to_say_one_geometry_are_one():
    """A live dtype that is the retained one, said or not: the same facts, the same fingerprint."""
    said, unsaid = toy_geometry(live_state_dtype="bf16"), toy_geometry()
    assert said != unsaid and said.facts == unsaid.facts and said.fingerprint == unsaid.fingerprint


def test_what_a_dump_says(tmp_path):
    path, e, _ = saved(tmp_path)
    told = json.loads((tmp_path / "checkpoint.safetensors.json").read_text())
    assert (told["format"], told["position"], told["block_tokens"]) == ("hybridkv.checkpoint/1", 32, 16)
    assert len(told["chain"]) == 2 and told["geometry"]["chunk_tokens"] == 16
    assert told["geometry"]["state_dtype"] == "bf16" and "name" not in told["geometry"]
    assert {n: t["shape"] for n, t in told["tensors"].items()} == {
        "key": [1, 32, 2, 16], "value": [1, 32, 2, 16], "ssm": [2, 3, 16, 16], "conv": [2, 3, 80],
    }  # fmt: skip
    assert {n: list(t.shape) for n, t in load_file(path).items()} == {
        n: t["shape"] for n, t in told["tensors"].items()
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, path.name + ".json"]
    assert e.arena.violations() == []


def test_nothing_is_saved_where_nothing_is_cached(tmp_path):
    e = engine("mamba2")
    r = e.cache.request("it", list(PROMPT))
    assert dump.save(tmp_path / "none", e.arena, e.cache, r) == 0
    assert not list(tmp_path.iterdir())


def test_a_load_that_does_not_fit_is_a_refusal(tmp_path):
    path, *_ = saved(tmp_path)
    e = engine("mamba2", "s1", pages=5)
    r = e.cache.request("it", list(PROMPT))
    before = e.cache.stats()
    assert isinstance(dump.load(path, e.arena, e.cache, r), Refused)
    assert e.cache.stats()._replace(counters=before.counters) == before


def changed(path, edit):
    beside = path.with_name(path.name + ".json")
    told = json.loads(beside.read_text())
    edit(told)
    beside.write_text(json.dumps(told))


def other(field, value):
    return lambda path: changed(path, lambda told: told["geometry"].update({field: value}))


def cut_tensor(path):
    tensors = load_file(path)
    tensors["conv"] = tensors["conv"][:1].contiguous()
    save_file(tensors, path)


MISMATCHES = [
    (other("chunk_tokens", 64), "chunk_tokens must be 16, got 64 in the dump"),
    (other("state_dtype", "fp32"), "state_dtype must be bf16, got fp32 in the dump"),
    (other("kv_dtype", None), "kv_dtype must be bf16, got None in the dump"),
    (other("layers", 9), "layers must be 3, got 9 in the dump"),
    (other("recurrent", None), "recurrent must be .*'mamba2'.*, got None in the dump"),
    (
        lambda p: changed(p, lambda t: t.update(root="00")),
        "salt, decode and loop_policy must be those of the dump",
    ),
    (
        lambda p: changed(p, lambda t: t["chain"].__setitem__(1, "00")),
        "tokens must be those of the dump, got others from position 16 on",
    ),
    (lambda p: changed(p, lambda t: t.update(position=64)), "request must know the dump's 64 tokens, got 52"),
    (lambda p: changed(p, lambda t: t.update(format="x")), "format must be 'hybridkv.checkpoint/1', got 'x'"),
    (lambda p: changed(p, lambda t: t.pop("chain")), "sidecar must hold geometry, .*, got none of chain"),
    (
        lambda p: p.with_name(p.name + ".json").unlink(),
        "path must have a sidecar checkpoint.safetensors.json, got none",
    ),
    (
        lambda p: p.with_name(p.name + ".json").write_text("{"),
        "sidecar must be JSON, got checkpoint.safetensors.json",
    ),
    (
        lambda p: p.with_name(p.name + ".json").write_text("[]"),
        "format must be 'hybridkv.checkpoint/1', got 'list'",
    ),
    (cut_tensor, r"tensors must be .* as the sidecar says, got .*'conv': \(\[1, 3, 80\]"),
    (
        lambda p: save_file({n: t.float() for n, t in load_file(p).items()}, p),
        r"tensors must be .*'BF16'.* as the sidecar says, got .*'F32'",
    ),
    (lambda p: p.unlink(), "No such file"),
]


@pytest.mark.parametrize(("spoil", "message"), MISMATCHES)
def test_a_mismatch_is_refused_and_changes_nothing(tmp_path, spoil, message):
    """I6, I9: named before anything happens, or undone."""
    path, *_ = saved(tmp_path)
    spoil(path)
    e = engine("mamba2", "nested")
    r = e.cache.request("it", list(PROMPT))
    before = e.cache.stats()
    with pytest.raises((UsageError, FileNotFoundError), match=message):
        dump.load(path, e.arena, e.cache, r)
    assert e.cache.stats()._replace(counters=before.counters) == before
    assert r.status.value == "waiting"


def test_other_tokens_and_other_tenants_are_refused(tmp_path):
    """I9."""
    path, *_ = saved(tmp_path)
    e = engine("mamba2")
    wrong = e.cache.request("tokens", [*PROMPT[:20], 60, *PROMPT[21:]])
    with pytest.raises(UsageError, match="tokens must be those of the dump, got others from position 16 on"):
        dump.load(path, e.arena, e.cache, wrong)
    tenant = e.cache.request("tenant", list(PROMPT), salt=3)
    with pytest.raises(
        UsageError, match="salt, decode and loop_policy must be those of the dump, got others"
    ):
        dump.load(path, e.arena, e.cache, tenant)


def test_states_of_update_decode_are_kept_apart(tmp_path):
    """I9: a dump of a cache that decodes by `update` is of other numerics."""
    path, *_ = saved(tmp_path)
    e = engine("mamba2", decode="update_shared")
    r = e.cache.request("it", list(PROMPT))
    with pytest.raises(
        UsageError, match="salt, decode and loop_policy must be those of the dump, got others"
    ):
        dump.load(path, e.arena, e.cache, r)


def test_running_states_of_another_dtype_do_not_matter():
    """What arrives is the retained state; the next step loads the running one from it."""
    o = toy_organization("s2", toy_geometry(live_state_dtype="fp32"))
    e = engine("mamba2", decode="update_shared")
    cache = type(e.cache)(o, pages={"shared": 60}, policy=e.cache.policy, check=3)
    r = cache.request("it", list(PROMPT))
    answer = cache.admit(r, 32, arriving=True)
    assert [w.position for w in answer.plan.writes] == [32]
    cache.commit(r, 32)
    plan = cache.extend(r, 40).plan
    assert plan.source is not None and plan.source.position == 32 and plan.source is not plan.destination


def test_arrivals_end_on_boundaries():
    e = engine("mamba2")
    r = e.cache.request("it", list(PROMPT))
    with pytest.raises(
        UsageError, match=r"upto must be a boundary \(a multiple of 32\) for what arrives, got 33"
    ):
        e.cache.admit(r, 33, arriving=True)
    with pytest.raises(UsageError, match="budget must be None for what arrives, got 4"):
        e.cache.admit(r, 32, budget=4, arriving=True)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["mamba2", "gated_delta_net"])
def test_other_ranks_and_back(kind, ranks):
    """G2: bit-exact, each section of a convolution cut by itself; every rank gets what its own arena would hold."""
    g = ModelGeometry(
        name="wide",
        layers=2,
        attention=AttentionSpec(layers=1, kv_heads=2, key_dim=16, value_dim=16),
        recurrent=RecurrentSpec.derived(kind=kind, layers=1, state_shape=(8, 16, 32), conv_width=4, groups=2),
        chunk_tokens=16,
    )
    spec = g.recurrent
    columns = torch.arange(spec.conv_dim, dtype=torch.float32).expand(1, 3, -1)
    whole = {
        "key": torch.randn(1, 32, 2, 16), "value": torch.randn(1, 32, 2, 16), "ssm": torch.randn(1, 8, 16, 32),
        "conv": columns.contiguous(),
    }  # fmt: skip
    parts = payload.shard(g, whole, ranks)
    mine = g.shard(ranks)
    for part in parts:
        assert part["key"].shape[2] == mine.attention.kv_heads
        assert part["ssm"].shape[1] == mine.recurrent.rows
        assert part["conv"].shape[2] == mine.recurrent.conv_dim
        ends = torch.tensor(spec.conv_sections).cumsum(0)
        sections = torch.bucketize(part["conv"][0, 0], ends.float(), right=True)
        assert torch.bincount(sections).tolist() == list(mine.recurrent.conv_sections)
    back = payload.unshard(g, parts)
    assert {name: torch.equal(back[name], values) for name, values in whole.items()} == dict.fromkeys(
        whole, True
    )
    assert ranks == 1 or not torch.equal(parts[0]["conv"], parts[-1]["conv"])


def test_what_cannot_be_split_is_refused():
    g = toy_geometry()
    with pytest.raises(UnsupportedError, match="must be divisible by 2 ranks, got 3"):
        payload.shard(g, {"ssm": torch.zeros(2, 3, 16, 16)}, 2)
