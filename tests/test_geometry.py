import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from math import ceil
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.geometry import (
    AttentionSpec,
    LoopLayout,
    LoopSpec,
    ModelGeometry,
    RecurrentKind,
    RecurrentSpec,
)
from tests.configs import CONFIGS, OTHERS
from tests.conftest import load_golden

GOLDEN = load_golden("geometry")
MODELS = {model["name"].lower(): model for model in GOLDEN["models"]}
LOOPED = ("ouro-1.4b", "ouro-2.6b", "huginn-3.5b")
PAGE_BYTES = 512 * 1024


def from_hf(name: str) -> ModelGeometry:
    loops = {"max_loops": 16} if name == "huginn-3.5b" else {}
    return ModelGeometry.from_hf(CONFIGS[name], name=name, **loops)


SOURCES = {"preset": ModelGeometry.preset, "from_hf": from_hf}


@pytest.fixture(params=SOURCES, scope="module")
def source(request):
    return SOURCES[request.param]


def members(g: ModelGeometry, page_bytes: int) -> int:
    return ceil(g.state_rows / (page_bytes // g.state_row_bytes))


# ---- the golden


@pytest.mark.parametrize("name", MODELS)
def test_every_expected_number(source, name):
    g, expected = source(name), MODELS[name]["expected"]
    fp32 = g.replace(state_dtype="fp32")
    wide = g.replace(conv_full_width=True, live_state_dtype="fp32")
    assert {
        "kv_bytes_per_token": g.kv_bytes_per_token,
        "kv_bytes_16_tokens": 16 * g.kv_bytes_per_token,
        "ssm_bytes_bf16": g.ssm_bytes,
        "ssm_bytes_fp32": fp32.ssm_bytes,
        "conv_bytes": g.conv_bytes,
        "conv_bytes_full_width": wide.conv_bytes,
        "composite_bytes": g.composite_bytes,
        "composite_bytes_fp32": fp32.composite_bytes,
        "transformers_live_bytes": wide.live_ssm_bytes + wide.conv_bytes,
    } == expected["per_layer"]
    per_sequence = {
        "kv_bytes_per_token": g.kv_bytes_per_sequence_token,
        "recurrent_bytes": g.recurrent_bytes_per_sequence,
        "recurrent_bytes_fp32": fp32.recurrent_bytes_per_sequence,
        "tokens_of_kv_equal_to_recurrent": (
            round(g.recurrent_bytes_per_sequence / g.kv_bytes_per_sequence_token) if g.attention else None
        ),
    }
    assert per_sequence == expected["per_sequence"]


@pytest.mark.parametrize("name", MODELS)
def test_every_shape(source, name):
    g, model = source(name), MODELS[name]
    layers, recurrent = model["layers"], model["recurrent"]
    assert (g.layers, g.attention_layers, g.recurrent_layers) == (
        layers["total"],
        layers["attention"],
        layers["recurrent"],
    )
    shape = recurrent["state_shape"]
    spec = g.recurrent
    assert spec is not None
    assert spec.kind == recurrent["kind"]
    assert spec.state_shape == (None if shape is None else tuple(shape))
    assert (spec.conv_dim, spec.conv_width) == (recurrent["conv_dim"], recurrent["d_conv"])
    assert spec.groups == recurrent.get("groups", recurrent.get("key_heads", 1))
    assert g.state_rows == (shape[0] if shape else 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_and_its_preset_are_one(name):
    assert from_hf(name) == ModelGeometry.preset(name)


def test_presets_are_the_golden_and_the_looped_models():
    assert ModelGeometry.preset_names() == tuple(sorted([*MODELS, *LOOPED]))
    assert set(CONFIGS) == set(ModelGeometry.preset_names())


@pytest.mark.parametrize("name", ["Falcon-H1-7B", "Granite-4.0-H-Micro"])
def test_identities_of_the_paper(source, name):
    g, identity = source(name.lower()), GOLDEN["identities"][name]
    assert g.ssm_bytes == identity["ssm_bytes"]
    assert g.conv_bytes == identity["conv_bytes"]
    assert g.composite_bytes == identity["composite_bytes"]
    assert g.kv_bytes_per_token == identity["kv_bytes_per_token_layer"]
    assert 16 * g.kv_bytes_per_token == identity["kv_bytes_16_tokens"]
    assert g.kv_bytes_per_token * identity["kv_tokens_per_512_kib"] == PAGE_BYTES
    assert members(g, PAGE_BYTES) == identity["ssm_members_of_512_kib"]
    assert members(g, PAGE_BYTES) * PAGE_BYTES == g.ssm_bytes, "the paper's pages leave no tail"
    assert members(g.replace(state_dtype="fp32"), PAGE_BYTES) == 2 * identity["ssm_members_of_512_kib"]
    unit = identity["uniform_unit"]
    assert g.uniform_unit == (unit["tokens"], unit["bytes"])
    for budget in identity["budgets"].values():
        units = int(budget["rule"].split()[0])
        assert units * g.uniform_unit.bytes == budget["bytes_per_layer"]


def test_falcon_over_all_layers():
    g, identity = ModelGeometry.preset("falcon-h1-7b"), GOLDEN["identities"]["Falcon-H1-7B"]
    assert g.composite_bytes * identity["layers"] == identity["composite_bytes_all_layers"]
    assert g.recurrent_bytes_per_sequence == identity["composite_bytes_all_layers"]
    assert (g.ssm_bytes, g.conv_bytes, g.composite_bytes) == tuple(
        1024 * identity[key] for key in ("ssm_kib", "conv_kib", "composite_kib")
    )


def test_models_with_the_same_units():
    for name, facts in GOLDEN["identities"]["same_units"].items():
        g, other = ModelGeometry.preset(name.lower()), ModelGeometry.preset(facts["as_model"].lower())
        assert g.composite_bytes == other.composite_bytes == facts["composite_bytes"]
        if "kv_bytes_16_tokens" in facts:
            assert g.uniform_unit == other.uniform_unit
            assert 16 * g.kv_bytes_per_token == facts["kv_bytes_16_tokens"]
    for name, facts in GOLDEN["identities"]["not_the_papers_granite"].items():
        g = ModelGeometry.preset(name.lower())
        assert (16 * g.kv_bytes_per_token, g.composite_bytes) == tuple(facts.values())


@pytest.mark.parametrize(
    ("name", "per_group", "attention", "recurrent"),
    [
        ("falcon-h1-7b", 44, 1, 1),
        ("granite-4.0-h-micro", 4, 1, 9),
        ("bamba-9b", 1, 3, 29),
        ("nemotron-h-47b", 5, 1, 9),
        ("qwen3-next-80b-a3b", 12, 1, 3),
        ("falcon-mamba-7b", 64, 0, 1),
        ("lfm2-2.6b", 2, 4, 11),
        ("ouro-1.4b", 24, 4, 0),
        ("huginn-3.5b", 2, 34, 0),
    ],
)
def test_layer_groups(name, per_group, attention, recurrent):
    g = ModelGeometry.preset(name)
    assert (g.layers_per_group, g.attention_groups, g.recurrent_groups) == (per_group, attention, recurrent)


def test_uniform_unit_needs_both_kinds():
    assert ModelGeometry.preset("falcon-mamba-7b").uniform_unit is None
    assert ModelGeometry.preset("ouro-1.4b").uniform_unit is None


def test_live_state_follows_the_retained_one_unless_declared():
    g = ModelGeometry.preset("falcon-h1-7b")
    assert g.live_ssm_bytes == g.ssm_bytes
    assert g.live_state_row_bytes == g.state_row_bytes == 65_536
    assert g.replace(state_dtype="fp32").live_ssm_bytes == 2 * g.ssm_bytes
    nano = ModelGeometry.preset("nemotron-3-nano-30b-a3b")
    assert (nano.state_dtype, nano.live_state_dtype) == ("bf16", "fp32")
    assert nano.live_state_row_bytes == 2 * nano.state_row_bytes == 32_768


def test_every_dtype_has_its_own_bytes():
    g = ModelGeometry.preset("falcon-h1-7b")
    small = g.replace(kv_dtype="fp8", conv_dtype="fp32", state_dtype="fp16")
    assert (small.kv_bytes_per_token, small.conv_bytes, small.ssm_bytes) == (512, 43_008, 1_572_864)


# ---- looped models


@pytest.mark.parametrize(
    ("name", "row", "sizes"),
    [
        ("ouro-1.4b", 8_192, (786_432, 393_216, 196_608)),
        ("ouro-2.6b", 8_192, (1_572_864, 786_432, 393_216)),
        ("huginn-3.5b", 21_120, (1_436_160, 253_440, 168_960)),
    ],
)
def test_looped_kv_bytes(source, name, row, sizes):
    g, (depth_indexed, first_then_shared, single) = source(name), sizes
    assert g.loop.layout is LoopLayout.DEPTH_INDEXED
    assert g.kv_bytes_per_token == row
    assert g.kv_bytes_per_sequence_token == depth_indexed
    expected = {"last_exited": depth_indexed, "first_then_shared": first_then_shared, "single": single}
    for layout, size in expected.items():
        assert g.replace(loop_layout=layout).kv_bytes_per_sequence_token == size


@pytest.mark.parametrize(
    ("layout", "planes"),
    [
        ("depth_indexed", [0, 1, 2, 3]),
        ("last_exited", [0, 1, 2, 3]),
        ("single", [0, 0, 0, 0]),
        ("first_then_shared", [0, 1, 1, 1]),
    ],
)
def test_planes(layout, planes):
    loop = LoopSpec(prelude=2, core=4, coda=2, max_loops=4, layout=layout)
    assert [loop.plane_of(r) for r in range(1, 5)] == planes
    assert loop.planes == max(planes) + 1
    assert loop.attention_layers == 2 + 4 * loop.planes + 2
    for outside in (0, -1, 5, True, 1.5):
        with pytest.raises(UsageError, match="loop must be"):
            loop.plane_of(outside)


def test_one_loop_has_one_plane_in_every_layout():
    for layout in LoopLayout:
        loop = LoopSpec(prelude=0, core=3, coda=0, max_loops=1, layout=layout)
        assert (loop.planes, loop.plane_of(1), loop.attention_layers) == (1, 0, 3)


def test_loops_can_be_capped():
    config = CONFIGS["huginn-3.5b"]
    assert ModelGeometry.from_hf(config).loop.max_loops == 32
    assert ModelGeometry.preset("ouro-1.4b", max_loops=2).attention_layers == 48


# ---- configurations


def test_a_file_and_its_directory(tmp_path):
    where = tmp_path / "Falcon-H1-7B"
    where.mkdir()
    (where / "config.json").write_text(json.dumps(CONFIGS["falcon-h1-7b"]))
    from_file = ModelGeometry.from_hf(where / "config.json")
    assert from_file == ModelGeometry.from_hf(str(where))
    assert from_file.name == "Falcon-H1-7B"
    assert from_file.replace(name="falcon-h1-7b") == ModelGeometry.preset("falcon-h1-7b")


def test_names():
    config = CONFIGS["falcon-h1-7b"]
    assert ModelGeometry.from_hf(config).name == "falcon_h1"
    assert ModelGeometry.from_hf(config | {"_name_or_path": "tiiuae/Falcon-H1-7B"}).name == "Falcon-H1-7B"
    assert ModelGeometry.from_hf(CONFIGS["falcon-mamba-7b"]).name == "falcon_mamba"


def test_overrides():
    g = ModelGeometry.from_hf(CONFIGS["falcon-h1-7b"], state_dtype="fp32", chunk_tokens=128, name="mine")
    assert (g.name, g.state_dtype, g.chunk_tokens, g.ssm_bytes) == ("mine", "fp32", 128, 3_145_728)
    g = ModelGeometry.from_hf(CONFIGS["qwen3.5-4b"], live_state_dtype=None)
    assert g.live_ssm_bytes == g.ssm_bytes


SAME = {
    "derived head and inner widths": (
        "falcon-h1-1.5b",
        {"mamba_d_ssm": None, "mamba_d_head": "auto", "hidden_size": 1536},
    ),
    "derived inner width of granite": ("granite-4.0-h-micro", {"mamba_d_head": None}),
    "granite with the older field": (
        "granite-4.0-h-micro",
        {"layer_types": None, "layers_block_type": CONFIGS["granite-4.0-h-micro"]["layer_types"]},
    ),
    "nemotron with words": (
        "nemotron-h-8b",
        {
            "hybrid_override_pattern": None,
            "layers_block_type": ["mamba"] * 24 + ["attention"] * 4 + ["mlp"] * 20 + ["moe"] * 4,
        },
    ),
    "nemotron with the newer words": (
        "nemotron-h-8b",
        {
            "hybrid_override_pattern": None,
            "num_hidden_layers": None,
            "layers_block_type": ["linear_attention"] * 24 + ["full_attention"] * 4 + ["mlp"] * 24,
        },
    ),
    "nemotron with the older names": (
        "nemotron-h-8b",
        {"n_groups": None, "conv_kernel": None, "mamba_n_groups": 8, "mamba_d_conv": 4}
        | {"head_dim": None, "attention_head_dim": 128},
    ),
    "zamba2 without its derived widths": ("zamba2-2.7b", {"attention_head_dim": None, "mamba_headdim": None}),
    "qwen3-next with words": (
        "qwen3-next-80b-a3b",
        {
            "full_attention_interval": None,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
        },
    ),
    "kimi flat": (
        "kimi-linear-48b-a3b",
        {
            "linear_attn_config": None,
            "layer_types": ["linear_attention"] * 20 + ["full_attention"] * 7,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "jamba with words": (
        "jamba-v0.1",
        {"attn_layer_period": None, "layers_block_type": (["mamba"] * 7 + ["attention"]) * 4},
    ),
    "bamba with words": (
        "bamba-9b",
        {"attn_layer_indices": None, "layers_block_type": ["mamba"] * 29 + ["attention"] * 3},
    ),
    "falcon-mamba from expand": ("falcon-mamba-7b", {"intermediate_size": None, "expand": 2}),
    "ouro without words": ("ouro-1.4b", {"layer_types": None}),
    "huginn under its own name": ("huginn-3.5b", {"num_attention_heads": None, "n_heads": 55}),
    "state declared as it is retained": ("falcon-h1-7b", {"mamba_ssm_cache_dtype": "bfloat16"}),
}


@pytest.mark.parametrize("case", SAME)
def test_other_spellings_say_the_same(case):
    name, changes = SAME[case]
    g = ModelGeometry.from_hf(CONFIGS[name] | changes, name=name)
    if name == "huginn-3.5b":
        g = g.replace(max_loops=16)
    assert g == ModelGeometry.preset(name)


def test_a_text_model_may_name_its_family_outside():
    outer = CONFIGS["qwen3.5-4b"]
    inner = {key: value for key, value in outer["text_config"].items() if key != "model_type"}
    assert ModelGeometry.from_hf(outer | {"text_config": inner}, name="qwen3.5-4b") == ModelGeometry.preset(
        "qwen3.5-4b"
    )


@pytest.mark.parametrize(
    ("name", "sizes", "window"),
    [
        ("llama", (32, 4_096, 0, 0), None),
        ("llama without grouped heads", (32, 16_384, 0, 0), None),
        ("mistral", (32, 4_096, 0, 0), 4_096),
        ("qwen3", (36, 4_096, 0, 0), None),
        ("mamba", (64, 0, 163_840, 30_720), None),
        ("mamba2", (64, 0, 2_097_152, 61_440), None),
    ],
)
def test_plain_families(name, sizes, window):
    g = ModelGeometry.from_hf(OTHERS[name])
    assert (g.layers, g.kv_bytes_per_token, g.ssm_bytes, g.conv_bytes) == sizes
    assert g.name == OTHERS[name]["model_type"]
    assert (g.attention.window_tokens if g.attention else None) == window


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": True, "max_window_layers": 0}, 4_096),
        ({"use_sliding_window": True, "max_window_layers": 36}, None),
        ({"layer_types": ["sliding_attention"] * 36}, 4_096),
        ({"layer_types": ["full_attention"] * 36, "use_sliding_window": True}, None),
    ],
)
def test_windows(changes, window):
    assert ModelGeometry.from_hf(OTHERS["qwen3"] | changes).attention.window_tokens == window


def test_attention_only_granite():
    config = CONFIGS["granite-4.0-h-micro"] | {"layer_types": ["attention"] * 40}
    g = ModelGeometry.from_hf(config)
    assert (g.attention_layers, g.recurrent) == (40, None)


def test_needs_nothing_but_the_standard_library():
    program = """
import sys, types
package = types.ModuleType("hybridkv")  # without the package's own names, which need numpy
package.__path__ = [sys.argv[1]]
sys.modules["hybridkv"] = package
from hybridkv.geometry import ModelGeometry
ModelGeometry.preset("falcon-h1-7b").fingerprint
roots = {name.partition(".")[0] for name in sys.modules}
print(sorted(roots & {"numpy", "torch", "triton", "transformers"}))
"""
    where = str(Path(__file__).parent.parent / "hybridkv")
    found = subprocess.run([sys.executable, "-c", program, where], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# ---- identity


def test_fingerprint_is_stable():
    g = ModelGeometry.preset("falcon-h1-7b")
    assert g.fingerprint == "570c3a4d6bc9b97907d98c19605d128138f7fac06bb458c6d6a0ed658b5e0704"
    assert g.replace(name="other").fingerprint == g.fingerprint
    assert g.replace(live_state_dtype="bf16").fingerprint == g.fingerprint
    assert from_hf("falcon-h1-7b").fingerprint == g.fingerprint


def test_fingerprint_tells_numbers_apart():
    g, ouro = ModelGeometry.preset("falcon-h1-7b"), ModelGeometry.preset("ouro-1.4b")
    variants = [ModelGeometry.preset(name) for name in ModelGeometry.preset_names()]
    changes = {
        "kv_dtype": "fp8",
        "state_dtype": "fp16",
        "live_state_dtype": "fp32",
        "conv_dtype": "fp32",
        "conv_full_width": True,
        "chunk_tokens": 128,
        "tp_rank_count": 2,
    }
    variants += [g.replace(**{name: value}) for name, value in changes.items()]
    variants += [ouro.replace(loop_layout=layout) for layout in LoopLayout if layout != "depth_indexed"]
    variants += [ouro.replace(max_loops=3), g.shard(2), g.shard(4)]
    same = [("granite-4.0-h-1b", "granite-4.0-h-tiny")]
    for one, other in same:
        assert ModelGeometry.preset(one).fingerprint == ModelGeometry.preset(other).fingerprint
    assert len({v.fingerprint for v in variants}) == len(variants) - len(same)


def test_frozen_and_hashable():
    g = ModelGeometry.preset("falcon-h1-7b")
    assert hash(g) == hash(from_hf("falcon-h1-7b"))
    with pytest.raises(FrozenInstanceError):
        g.layers = 1
    assert isinstance(g.replace(recurrent=MAMBA2).recurrent.kind, RecurrentKind)


# ---- shards

MAMBA2 = RecurrentSpec(kind="mamba2", layers=2, state_shape=(8, 4, 16), conv_dim=64, conv_width=4)


def test_shards_of_falcon():
    g = ModelGeometry.preset("falcon-h1-7b")
    assert g.shard(1) is g
    half = g.shard(2)
    assert half.attention.kv_heads == 1
    assert half.recurrent.state_shape == (12, 128, 256)
    assert half.recurrent.conv_sections == (1_536, 256, 256), "one group is on both ranks"
    assert half.tp_rank_count == 2
    eighth = g.shard(8)
    assert eighth.attention.kv_heads == 1, "two heads on eight ranks: four copies"
    assert eighth.state_rows == 3
    assert eighth.state_row_bytes == g.state_row_bytes


@pytest.mark.parametrize(
    ("name", "tp", "sections", "groups"),
    [
        ("nemotron-h-8b", 4, (2_048, 256, 256), 2),
        ("nemotron-h-8b", 16, (512, 128, 128), 1),
        ("qwen3-next-80b-a3b", 8, (256, 256, 512), 2),
        ("qwen3-next-80b-a3b", 32, (128, 128, 128), 1),
        ("kimi-linear-48b-a3b", 8, (512, 512, 512), 1),
        ("jamba-v0.1", 4, (2_048,), 1),
        ("lfm2-1.2b", 4, (512,), 1),
    ],
)
def test_sections_of_a_shard(name, tp, sections, groups):
    shard = ModelGeometry.preset(name).shard(tp)
    assert (shard.recurrent.conv_sections, shard.recurrent.groups) == (sections, groups)
    assert shard.recurrent.conv_dim == sum(sections)


def test_latent_kv_is_on_every_rank():
    g = ModelGeometry.preset("kimi-linear-48b-a3b")
    shard = g.shard(8)
    assert shard.attention == g.attention
    assert shard.ssm_bytes * 8 == g.ssm_bytes
    assert shard.conv_bytes * 8 == g.conv_bytes


@st.composite
def geometries(draw):
    small = st.integers(1, 6)
    attention = AttentionSpec(
        layers=draw(small),
        kv_heads=draw(st.integers(1, 16)),
        key_dim=draw(small) * 16,
        value_dim=draw(small) * 16,
    )
    kind = draw(st.sampled_from(RecurrentKind))
    groups = draw(st.sampled_from([1, 2, 3, 4, 8])) if kind in {"mamba2", "gated_delta_net"} else 1
    rows = groups * draw(small) * draw(st.sampled_from([1, 2, 4, 8]))
    shape = {"mamba1": (rows, draw(small)), "short_conv": None}.get(kind, (rows, draw(small), draw(small)))
    recurrent = RecurrentSpec.derived(
        kind=kind,
        layers=draw(small),
        state_shape=shape,
        conv_width=draw(st.integers(2, 5)),
        groups=groups,
        channels=rows,
    )
    return ModelGeometry(
        name="drawn",
        layers=attention.layers + recurrent.layers,
        attention=draw(st.sampled_from([attention, None])),
        recurrent=recurrent,
        state_dtype=draw(st.sampled_from(["bf16", "fp32"])),
        conv_full_width=draw(st.booleans()),
    )


def shard_or_none(g, tp):
    try:
        return g.shard(tp)
    except UnsupportedError:
        return None


def splits(g, tp):
    """Nothing needs a copy, and everything divides."""
    spec = g.recurrent
    counts = [spec.conv_dim if spec.state_shape is None else spec.rows]
    counts += [spec.groups] if spec.kind in {"mamba2", "gated_delta_net"} else []
    counts += [g.attention.kv_heads] if g.attention else []
    return all(count % tp == 0 for count in counts)


@given(geometries(), st.sampled_from([2, 3, 4, 8]))
def test_shards_hold_the_whole(g, tp):
    shard = shard_or_none(g, tp)
    assume(shard is not None)
    for part, whole in (
        (shard.kv_bytes_per_token, g.kv_bytes_per_token),
        (shard.conv_bytes, g.conv_bytes),
        (shard.composite_bytes, g.composite_bytes),
        (shard.recurrent_bytes_per_sequence, g.recurrent_bytes_per_sequence),
    ):
        assert whole <= tp * part <= tp * whole
        assert tp * part == whole or not splits(g, tp)
    assert tp * shard.ssm_bytes == g.ssm_bytes, "a state is never copied"
    assert shard.state_row_bytes == g.state_row_bytes


@given(geometries(), st.sampled_from([2, 3, 4, 8]))
def test_shards_keep_layers_and_groups(g, tp):
    shard = shard_or_none(g, tp)
    if shard is None:
        assert not splits(g, tp), "what divides is served"
        return
    for name in ("layers", "attention_layers", "recurrent_layers", "layers_per_group"):
        assert getattr(shard, name) == getattr(g, name)
    assert (shard.attention_groups, shard.recurrent_groups) == (g.attention_groups, g.recurrent_groups)
    assert shard.fingerprint != g.fingerprint


@given(geometries())
def test_the_uniform_unit_is_the_smallest(g):
    unit = g.uniform_unit
    assert (unit is None) == (g.attention is None)
    if unit:
        assert unit.tokens % 16 == 0
        assert unit.bytes == unit.tokens * g.kv_bytes_per_token
        assert unit.bytes - 16 * g.kv_bytes_per_token < g.composite_bytes <= unit.bytes


@given(geometries())
def test_groups_count_every_layer(g):
    assert g.layers_per_group * g.attention_groups == g.attention_layers
    assert g.layers_per_group * g.recurrent_groups == g.recurrent_layers


@pytest.mark.parametrize(
    ("name", "tp", "fragment"),
    [
        ("falcon-h1-7b", 16, "recurrent.state_shape heads must be divisible by 16 ranks, got 24"),
        ("zamba2-7b", 3, "attention.kv_heads must be a multiple or a divisor of 3 ranks, got 32"),
        ("jamba-v0.1", 3, "attention.kv_heads must be a multiple or a divisor of 3 ranks, got 8"),
        ("falcon-mamba-7b", 3, "recurrent.state_shape d_inner must be divisible by 3 ranks, got 8192"),
        ("ouro-1.4b", 3, "attention.kv_heads must be a multiple or a divisor of 3 ranks, got 16"),
    ],
)
def test_what_cannot_be_sharded(name, tp, fragment):
    with pytest.raises(UnsupportedError) as caught:
        ModelGeometry.preset(name).shard(tp)
    assert fragment in str(caught.value)


def test_groups_that_fit_no_way():
    spec = RecurrentSpec(
        kind="mamba2", layers=1, state_shape=(12, 4, 8), conv_dim=48 + 6 * 8, conv_width=4, groups=3
    )
    with pytest.raises(
        UnsupportedError, match=r"recurrent.groups must be a multiple or a divisor of 4 ranks, got 3"
    ):
        spec.shard(4)
    channels = RecurrentSpec(kind="short_conv", layers=1, state_shape=None, conv_dim=10, conv_width=3)
    with pytest.raises(
        UnsupportedError, match=r"recurrent.conv_sections x must be divisible by 4 ranks, got 10"
    ):
        channels.shard(4)


def test_sections_follow_from_the_shape_or_have_to_be_said():
    assert MAMBA2.conv_sections == (32, 16, 16)
    unknown = RecurrentSpec(kind="mamba2", layers=2, state_shape=(8, 4, 16), conv_dim=60, conv_width=4)
    assert unknown.conv_sections == (60,)
    with pytest.raises(UnsupportedError, match=r"must be 3 sections \(x, B, C\) to be sharded, got \(60,\)"):
        unknown.shard(2)
    none = RecurrentSpec(kind="mamba2", layers=2, state_shape=(8, 4, 16), conv_dim=0, conv_width=0)
    assert (none.conv_sections, none.conv_elements(full_width=True), none.shard(2).rows) == ((), 0, 4)


def test_a_rank_is_not_sharded_again():
    with pytest.raises(UsageError, match="tp_rank_count must be 1 to be sharded, got 2"):
        ModelGeometry.preset("falcon-h1-7b").shard(2).shard(2)
