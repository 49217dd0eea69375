import pytest

from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.geometry import AttentionSpec, LoopSpec, ModelGeometry, RecurrentSpec
from tests.configs import CONFIGS, OTHERS


def attention(**changes):
    return AttentionSpec(**{"layers": 2, "kv_heads": 2, "key_dim": 64, "value_dim": 64} | changes)


def recurrent(**changes):
    base = {"kind": "mamba2", "layers": 2, "state_shape": (8, 4, 16), "conv_dim": 64, "conv_width": 4}
    return RecurrentSpec(**base | changes)


def loop(**changes):
    return LoopSpec(**{"prelude": 0, "core": 2, "coda": 0, "max_loops": 4} | changes)


def model(**changes):
    return ModelGeometry(**{"name": "m", "layers": 2, "attention": attention(), "recurrent": None} | changes)


def config(name, **changes):
    return ModelGeometry.from_hf((CONFIGS | OTHERS)[name] | changes)


def text(**changes):
    outer = CONFIGS["qwen3.5-4b"]
    return ModelGeometry.from_hf(outer | {"text_config": outer["text_config"] | changes})


def kimi(**changes):
    inner = CONFIGS["kimi-linear-48b-a3b"]["linear_attn_config"] | changes
    return config("kimi-linear-48b-a3b", linear_attn_config=inner)


BAD = [
    (lambda: attention(layers=0), "attention.layers must be a positive integer, got 0"),
    (lambda: attention(kv_heads=True), "attention.kv_heads must be a positive integer, got True"),
    (lambda: attention(key_dim=64.0), "attention.key_dim must be a positive integer, got 64.0"),
    (lambda: attention(value_dim="64"), "attention.value_dim must be a positive integer, got '64'"),
    (
        lambda: attention(window_tokens=0),
        "attention.window_tokens must be a positive integer, got 0; None is",
    ),
    (lambda: recurrent(kind="s4"), "recurrent.kind must be one of mamba1, mamba2, gated_delta_net, "),
    (lambda: recurrent(layers=-1), "recurrent.layers must be a positive integer, got -1"),
    (lambda: recurrent(groups=0), "recurrent.groups must be a positive integer, got 0"),
    (lambda: recurrent(groups=3), "recurrent.groups must be a divisor of heads (8), got 3"),
    (
        lambda: recurrent(state_shape=(8, 4)),
        "recurrent.state_shape must be (heads, head_dim, d_state) for mamba2",
    ),
    (lambda: recurrent(state_shape=[8, 4, 16]), "for mamba2, got [8, 4, 16]"),
    (lambda: recurrent(state_shape=None), "for mamba2, got None"),
    (
        lambda: recurrent(state_shape=(8, 0, 16)),
        "recurrent.state_shape entry must be a positive integer, got 0",
    ),
    (
        lambda: recurrent(kind="short_conv", state_shape=(8,)),
        "recurrent.state_shape must be None for short_conv",
    ),
    (
        lambda: recurrent(kind="short_conv", state_shape=()),
        "recurrent.state_shape must be None for short_conv",
    ),
    (
        lambda: recurrent(kind="short_conv", state_shape=None, conv_width=0),
        "recurrent.conv_width must be at least 2 where there is no state, got 0",
    ),
    (lambda: recurrent(conv_width=1), "recurrent.conv_width must be 0 or at least 2, got 1"),
    (lambda: recurrent(conv_width=-1), "recurrent.conv_width must be an integer of at least 0, got -1"),
    (lambda: recurrent(conv_dim=0), "recurrent.conv_dim must be a positive integer, got 0"),
    (
        lambda: recurrent(conv_sections=(32, 16)),
        "conv_sections must be columns that sum to conv_dim (64), got (32, 16)",
    ),
    (
        lambda: recurrent(conv_sections=(64, 0)),
        "recurrent.conv_sections entry must be a positive integer, got 0",
    ),
    (
        lambda: recurrent(conv_sections=[64]),
        "recurrent.conv_sections must be a tuple of positive integers, got [64]",
    ),
    (lambda: loop(core=0), "loop.core must be a positive integer, got 0"),
    (lambda: loop(prelude=-1), "loop.prelude must be an integer of at least 0, got -1"),
    (lambda: loop(max_loops=0), "loop.max_loops must be a positive integer, got 0"),
    (
        lambda: loop(layout="ring"),
        "loop.layout must be one of depth_indexed, last_exited, single, first_then_shared",
    ),
    (lambda: loop().plane_of(5), "loop must be 1 to max_loops (4), got 5"),
    (lambda: loop().plane_of(0), "loop must be a positive integer, got 0; loops count from 1"),
    (lambda: model(name=""), "name must be a non-empty string, got ''"),
    (lambda: model(layers=0), "layers must be a positive integer, got 0"),
    (lambda: model(layers=1), "attention.layers must be at most layers (1), got 2"),
    (
        lambda: model(layers=2, recurrent=recurrent(layers=3)),
        "recurrent.layers must be at most layers (2), got 3",
    ),
    (lambda: model(attention=None), "attention must be given where recurrent is None"),
    (lambda: model(attention=(2, 2)), "attention must be a AttentionSpec or None, got (2, 2)"),
    (lambda: model(kv_dtype="int8"), "kv_dtype must be one of bf16, fp16, fp32, fp8, got 'int8'"),
    (lambda: model(state_dtype=None), "state_dtype must be one of bf16, fp16, fp32, fp8, got None"),
    (lambda: model(conv_dtype="float32"), "conv_dtype must be one of"),
    (lambda: model(live_state_dtype="f32"), "live_state_dtype must be one of"),
    (lambda: model(conv_full_width=1), "conv_full_width must be a bool, got 1"),
    (
        lambda: model(chunk_tokens=96),
        "chunk_tokens must be a power of two, got 96; the nearest are 64 and 128",
    ),
    (lambda: model(chunk_tokens=0), "chunk_tokens must be a positive integer, got 0"),
    (lambda: model(tp_rank_count=0), "tp_rank_count must be a positive integer, got 0"),
    (lambda: model(loop=loop(core=3)), "layers must be prelude + core + coda of the loop (3), got 2"),
    (
        lambda: model(attention=attention(layers=1), loop=loop()),
        "attention.layers must be layers of the loop (2), got 1",
    ),
    (lambda: model().shard(0), "tp must be a positive integer, got 0"),
    (lambda: model().shard(2.0), "tp must be a positive integer, got 2.0"),
    (lambda: model().replace(heads=2), "field must be one of name, layers, attention"),
    (lambda: model().replace(max_loops=2), "max_loops must be left out for a model without loop, got 2"),
    (
        lambda: ModelGeometry.preset("ouro-1.4b", max_loops=0),
        "loop.max_loops must be a positive integer, got 0",
    ),
    (lambda: ModelGeometry.preset("ouro-1.4b", loop_layout="ring"), "loop.layout must be one of"),
    (lambda: ModelGeometry.preset("Falcon-H1-7B"), "got 'Falcon-H1-7B'; near it: falcon-h1-7b"),
    (lambda: ModelGeometry.preset("xyzzy"), "got 'xyzzy'; ModelGeometry.preset_names() lists all"),
    (lambda: ModelGeometry.preset(7), "preset must be the name of a published model, got 7"),
    (lambda: ModelGeometry.from_hf({}), "config.model_type must be the name of a model family, got None"),
    (
        lambda: ModelGeometry.from_hf(7),
        "path_or_mapping must be a config.json, a directory that holds one, or a mapping",
    ),
    (lambda: ModelGeometry.from_hf("/nowhere/config.json"), "got '/nowhere/config.json'; No such file"),
    (
        lambda: config("falcon-h1-7b", num_hidden_layers=None),
        "config.num_hidden_layers must be a positive integer, got None; the field is missing",
    ),
    (
        lambda: config("falcon-h1-7b", num_key_value_heads=0),
        "config.num_key_value_heads must be a positive integer, got 0",
    ),
    (lambda: config("falcon-h1-7b", head_dim="128"), "config.head_dim must be a positive integer, got '128'"),
    (
        lambda: config("falcon-h1-7b", mamba_d_state=-256),
        "config.mamba_d_state must be a positive integer, got -256",
    ),
    (
        lambda: config("falcon-h1-7b", mamba_d_head=64),
        "config.mamba_d_head must be inner width / mamba_n_heads (3072 / 24), got 64",
    ),
    (
        lambda: config("falcon-h1-7b", mamba_n_heads=25, mamba_d_head="auto"),
        "inner width / mamba_n_heads does not divide, got '3072 / 25'",
    ),
    (
        lambda: config("falcon-h1-7b", mamba_ssm_cache_dtype="float8"),
        "config.mamba_ssm_cache_dtype must be one of float32",
    ),
    (lambda: config("falcon-h1-7b", text_config=[]), "config.text_config must be a mapping, got []"),
    (
        lambda: config("granite-4.0-h-micro", layer_types=["mamba"]),
        "config.layer_types must be a list of num_hidden_layers (40) kinds, got '1 of them'",
    ),
    (
        lambda: config("granite-4.0-h-micro", layer_types=["rwkv"] * 40),
        "config.layer_types entry must be one of full_attention",
    ),
    (
        lambda: config("granite-4.0-h-micro", layer_types="mamba"),
        "config.layer_types must be a list with the kind of every layer, got 'mamba'",
    ),
    (
        lambda: config("granite-4.0-h-micro", mamba_expand=1.5),
        "config.mamba_expand must be a positive integer, got 1.5",
    ),
    (
        lambda: config("bamba-9b", attn_layer_indices=[9, 32]),
        "config.attn_layer_indices entry must be distinct and below 32, got 32",
    ),
    (
        lambda: config("bamba-9b", attn_layer_indices=[9, 9]),
        "config.attn_layer_indices entry must be distinct and below 32, got 9",
    ),
    (
        lambda: config("bamba-9b", attn_layer_indices=9),
        "config.attn_layer_indices must be a list of layer numbers, got 9",
    ),
    (
        lambda: config("nemotron-h-8b", hybrid_override_pattern="MX"),
        "config.hybrid_override_pattern must be a string of the letters M * - E, got 'MX'",
    ),
    (
        lambda: config("nemotron-h-8b", num_hidden_layers=50),
        "config.hybrid_override_pattern must be num_hidden_layers (50) letters, got '52 of them'",
    ),
    (
        lambda: config("zamba2-7b", hybrid_layer_ids=None),
        "config.layers_block_type must be a list with the kind of every layer, got None",
    ),
    (
        lambda: config("qwen3-next-80b-a3b", full_attention_interval=None),
        "config.full_attention_interval must be a positive integer, got None; the field is missing",
    ),
    (
        lambda: text(linear_num_value_heads=0),
        "config.text_config.linear_num_value_heads must be a positive integer, got 0",
    ),
    (lambda: text(linear_num_key_heads=5), "recurrent.groups must be a divisor of value_heads (32), got 5"),
    (
        lambda: kimi(kda_layers=[1, 2]),
        "kda_layers must be with full_attn_layers a partition of the 27 layers, got [1, 2]",
    ),
    (
        lambda: kimi(full_attn_layers=[0]),
        "config.linear_attn_config.full_attn_layers entry must be a positive integer, got 0",
    ),
    (
        lambda: kimi(num_heads=None),
        "config.linear_attn_config.num_heads must be a positive integer, got None; the field is missing",
    ),
    (
        lambda: config("jamba-v0.1", attn_layer_offset=-1),
        "config.attn_layer_offset must be an integer of at least 0, got -1",
    ),
    (
        lambda: config("lfm2-1.2b", full_attn_idxs=None),
        "config.layer_types must be a list with the kind of every layer, got None",
    ),
    (
        lambda: config("llama", num_attention_heads=30),
        "hidden_size / num_attention_heads does not divide, got '4096 / 30'",
    ),
    (
        lambda: config("llama", layer_types=["mamba"] * 32),
        "config.layer_types must be attention in every layer, got ['mamba']",
    ),
    (
        lambda: config("qwen3", use_sliding_window="no"),
        "config.use_sliding_window must be true or false, got 'no'",
    ),
    (
        lambda: config("ouro-1.4b", total_ut_steps=0),
        "config.total_ut_steps must be a positive integer, got 0",
    ),
    (
        lambda: config("huginn-3.5b", n_layers_in_recurrent_block=None),
        "config.n_layers_in_recurrent_block must be a positive integer, got None",
    ),
]


@pytest.mark.parametrize(("call", "fragment"), BAD, ids=[fragment for _, fragment in BAD])
def test_bad_inputs_are_named(call, fragment):
    with pytest.raises(UsageError) as caught:
        call()
    assert fragment in str(caught.value)


UNSUPPORTED = [
    (
        lambda: ModelGeometry.from_hf({"model_type": "rwkv"}),
        "config.model_type must be one of bamba, falcon_h1, ",
    ),
    (lambda: ModelGeometry.from_hf({"model_type": "rwkv"}), "zamba2, got 'rwkv'"),
    (lambda: text(model_type="gpt2"), "config.text_config.model_type must be one of"),
    (
        lambda: config("qwen3", use_sliding_window=True, max_window_layers=10),
        "all full or all sliding attention, got 26 sliding of 36",
    ),
    (lambda: model(recurrent=recurrent(), loop=loop()), "recurrent must be None for a looped model"),
]


@pytest.mark.parametrize(("call", "fragment"), UNSUPPORTED, ids=[fragment for _, fragment in UNSUPPORTED])
def test_sound_requests_that_are_not_served(call, fragment):
    with pytest.raises(UnsupportedError) as caught:
        call()
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("content", "fragment"), [("{", "it is not JSON"), ("[1]", "must be a JSON object, got 'list'")]
)
def test_files_that_hold_no_configuration(tmp_path, content, fragment):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError) as caught:
        ModelGeometry.from_hf(tmp_path)
    assert fragment in str(caught.value)
