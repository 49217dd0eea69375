"""Configurations in the form of the published files: the fields that size a cache, some that must not matter.

Not copies of the files. Widths that no cache depends on, and where exactly the attention layers stand, are
reconstructed for many models; what a cache depends on has to come out as the golden says.
"""

from typing import Any

Config = dict[str, Any]


def places(total: int, chosen: list[int], kind: str, other: str) -> list[str]:
    return [kind if layer in chosen else other for layer in range(total)]


def falcon_h1(
    layers: int, hidden: int, attention: tuple[int, int, int], mamba: tuple[int, int, int, int]
) -> Config:
    heads, kv, head = attention
    n_heads, d_head, d_state, groups = mamba
    return {
        "model_type": "falcon_h1",
        "attn_layer_indices": None,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head,
        "mamba_chunk_size": 256,
        "mamba_d_conv": 4,
        "mamba_d_head": d_head,
        "mamba_d_ssm": n_heads * d_head,
        "mamba_d_state": d_state,
        "mamba_expand": 2,
        "mamba_n_groups": groups,
        "mamba_n_heads": n_heads,
        "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.35],
        "torch_dtype": "bfloat16",
    }


def granite(kinds: list[str], hidden: int, heads: int, kv: int, mamba: tuple[int, int | str]) -> Config:
    n_heads, d_head = mamba
    return {
        "model_type": "granitemoehybrid",
        "hidden_size": hidden,
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "mamba_d_conv": 4,
        "mamba_d_head": d_head,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": n_heads,
        "position_embedding_type": "nope",
    }


def nemotron(pattern: str, hidden: int, heads: int, kv: int, mamba: tuple[int, int, int]) -> Config:
    n_heads, d_head, d_state = mamba
    return {
        "model_type": "nemotron_h",
        "hidden_size": hidden,
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 128,
        "mamba_num_heads": n_heads,
        "mamba_head_dim": d_head,
        "ssm_state_size": d_state,
        "n_groups": 8,
        "n_group": 1,
        "conv_kernel": 4,
        "expand": 2,
        "sliding_window": None,
    }


def zamba2(
    layers: int, hybrid: list[int], hidden: int, head: int, mamba: tuple[int, int, int], *, words: bool = True
) -> Config:
    n_heads, d_state, groups = mamba
    config: Config = {
        "model_type": "zamba2",
        "attention_hidden_size": 2 * hidden,
        "hidden_size": hidden,
        "hybrid_layer_ids": hybrid,
        "kv_channels": hidden // 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "attention_head_dim": head,
        "mamba_d_conv": 4,
        "mamba_d_state": d_state,
        "mamba_expand": 2,
        "mamba_headdim": 64,
        "mamba_ngroups": groups,
        "n_mamba_heads": n_heads,
        "sliding_window": None,
    }
    if words:
        config["layers_block_type"] = places(layers, hybrid, "hybrid", "mamba")
    return config


def qwen(model_type: str, layers: int, hidden: int, heads: int, kv: int, **more: object) -> Config:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "partial_rotary_factor": 0.25,
        **more,
    }


def lfm2(layers: int, attention: list[int], hidden: int, heads: int, *, words: bool) -> Config:
    config: Config = {
        "model_type": "lfm2",
        "block_dim": hidden,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": hidden,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "full_attn_idxs": None if words else attention,
    }
    if words:
        config["layer_types"] = places(layers, attention, "full_attention", "conv")
    return config


def ouro(layers: int) -> Config:
    return {
        "model_type": "ouro",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "layer_types": ["full_attention"] * layers,
        "max_window_layers": layers,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": None,
        "use_sliding_window": False,
        "total_ut_steps": 4,
        "early_exit_threshold": 1.0,
    }


GRANITE_40 = places(40, [5, 15, 25, 35], "attention", "mamba")
NEMOTRON_52 = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_98 = (
    "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
)
NEMOTRON_NANO_2 = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
NEMOTRON_NANO_3 = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
ZAMBA2_7B_HYBRID = [6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77]

CONFIGS: dict[str, Config] = {
    "falcon-h1-tiny-90m": falcon_h1(24, 512, (8, 2, 64), (24, 32, 64, 1)),
    "falcon-h1-0.5b": falcon_h1(36, 1024, (8, 2, 64), (24, 64, 128, 1)),
    "falcon-h1-1.5b": falcon_h1(24, 2048, (8, 2, 128), (48, 64, 256, 1)),
    "falcon-h1-1.5b-deep": falcon_h1(66, 1280, (6, 2, 128), (24, 64, 256, 1)),
    "falcon-h1-3b": falcon_h1(32, 2560, (10, 2, 128), (32, 128, 256, 1)),
    "falcon-h1-7b": falcon_h1(44, 3072, (12, 2, 128), (24, 128, 256, 1)),
    "falcon-h1-34b": falcon_h1(72, 5120, (20, 4, 128), (32, 128, 256, 2)),
    "granite-4.0-h-350m": granite(places(32, [10, 13, 17, 27], "attention", "mamba"), 768, 12, 4, (48, 32)),
    "granite-4.0-h-1b": granite(GRANITE_40, 1536, 12, 4, (48, 64)),
    "granite-4.0-h-micro": granite(GRANITE_40, 2048, 32, 8, (64, 64)),
    "granite-4.0-h-tiny": granite(GRANITE_40, 1536, 12, 4, (48, 64)),
    "granite-4.0-h-small": granite(GRANITE_40, 4096, 32, 8, (128, "auto")),
    "bamba-9b": {
        "model_type": "bamba",
        "attn_layer_indices": [9, 18, 27],
        "attn_rotary_emb": 64,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
    },
    "nemotron-h-4b": nemotron(NEMOTRON_52, 3072, 32, 8, (112, 64, 128)),
    "nemotron-h-8b": nemotron(NEMOTRON_52, 4096, 32, 8, (128, 64, 128)),
    "nemotron-h-47b": nemotron(NEMOTRON_98, 8192, 64, 8, (256, 64, 256)),
    "nemotron-nano-9b-v2": nemotron(NEMOTRON_NANO_2, 4480, 40, 8, (128, 80, 128)),
    "nemotron-3-nano-30b-a3b": nemotron(NEMOTRON_NANO_3, 2688, 32, 2, (64, 64, 128))
    | {"mamba_ssm_cache_dtype": "float32"},
    "zamba2-1.2b": zamba2(38, [5, 11, 17, 23, 29, 35], 2048, 128, (64, 128, 1)),
    "zamba2-2.7b": zamba2(54, [6, 12, 18, 24, 30, 36, 42, 47, 51], 2560, 160, (80, 64, 1)),
    "zamba2-7b": zamba2(81, ZAMBA2_7B_HYBRID, 3584, 224, (112, 64, 2), words=False),
    "qwen3-next-80b-a3b": qwen("qwen3_next", 48, 2048, 16, 2),
    "qwen3.5-4b": {
        "model_type": "qwen3_5",
        "image_token_id": 248056,
        "text_config": qwen("qwen3_5_text", 32, 2560, 16, 4, mamba_ssm_dtype="float32")
        | {"layer_types": places(32, list(range(3, 32, 4)), "full_attention", "linear_attention")},
        "vision_config": {"model_type": "qwen3_5", "hidden_size": 1024, "num_heads": 16},
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear",
        "head_dim": 72,
        "hidden_size": 2304,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "kda_layers": [n for n in range(1, 27) if n % 4],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "num_attention_heads": 32,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "jamba-v0.1": {
        "model_type": "jamba",
        "attn_layer_offset": 4,
        "attn_layer_period": 8,
        "expert_layer_period": 2,
        "hidden_size": 4096,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_dt_rank": 256,
        "mamba_expand": 2,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "sliding_window": None,
    },
    "falcon-mamba-7b": {
        "_name_or_path": "./",
        "model_type": "falcon_mamba",
        "conv_kernel": 4,
        "expand": 16,
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "num_hidden_layers": 64,
        "state_size": 16,
        "time_step_rank": 256,
    },
    "lfm2-350m": lfm2(16, [2, 5, 8, 10, 12, 14], 1024, 16, words=True),
    "lfm2-1.2b": lfm2(16, [2, 5, 8, 10, 12, 14], 2048, 32, words=False),
    "lfm2-2.6b": lfm2(30, [2, 5, 9, 13, 17, 21, 24, 27], 2048, 32, words=True),
    "ouro-1.4b": ouro(24),
    "ouro-2.6b": ouro(48),
    "huginn-3.5b": {
        "model_type": "huginn_raven",
        "block_size": 4096,
        "intermediate_size": 17920,
        "mean_recurrence": 32,
        "n_embd": 5280,
        "n_layers": 8,
        "n_layers_in_coda": 2,
        "n_layers_in_prelude": 2,
        "n_layers_in_recurrent_block": 4,
        "num_attention_heads": 55,
        "num_key_value_heads": 55,
        "vocab_size": 65536,
    },
}

# families without a preset, and other spellings of the same facts
OTHERS: dict[str, Config] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
    },
    "llama without grouped heads": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
    },
    "mistral": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 128,
        "hidden_size": 2560,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "use_sliding_window": False,
    },
    "mamba": {
        "model_type": "mamba",
        "conv_kernel": 4,
        "expand": 2,
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "state_size": 16,
    },
    "mamba2": {
        "model_type": "mamba2",
        "conv_kernel": 4,
        "expand": 2,
        "head_dim": 64,
        "hidden_size": 4096,
        "n_groups": 8,
        "num_heads": 128,
        "num_hidden_layers": 64,
        "state_size": 128,
    },
}
