"""Published models, as the fields of their configurations that size a cache.

One row a model: layers; attention as (layers, kv heads, key width, value width); recurrence as (kind, layers,
state shape, groups or key heads, convolution width), with the hidden size in place of a state for short
convolutions; loop as (prelude, core, coda, loops); the dtype of the live state where one is declared.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

from hybridkv.errors import UsageError
from hybridkv.geometry.model import ModelGeometry
from hybridkv.geometry.specs import AttentionSpec, LoopSpec, RecurrentKind, RecurrentSpec, chunk_tokens

Attention = tuple[int, int, int, int]
Recurrent = tuple[str, int, tuple[int, ...], int, int]


class Row(NamedTuple):
    """One published model."""

    layers: int
    attention: Attention | None
    recurrent: Recurrent | None
    loop: tuple[int, int, int, int] | None = None
    live_state_dtype: str | None = None


GDN, KDA, CONV = "gated_delta_net", "kimi_delta_attention", "short_conv"

PRESETS: dict[str, Row] = {
    "falcon-h1-tiny-90m": Row(24, (24, 2, 64, 64), ("mamba2", 24, (24, 32, 64), 1, 4)),
    "falcon-h1-0.5b": Row(36, (36, 2, 64, 64), ("mamba2", 36, (24, 64, 128), 1, 4)),
    "falcon-h1-1.5b": Row(24, (24, 2, 128, 128), ("mamba2", 24, (48, 64, 256), 1, 4)),
    "falcon-h1-1.5b-deep": Row(66, (66, 2, 128, 128), ("mamba2", 66, (24, 64, 256), 1, 4)),
    "falcon-h1-3b": Row(32, (32, 2, 128, 128), ("mamba2", 32, (32, 128, 256), 1, 4)),
    "falcon-h1-7b": Row(44, (44, 2, 128, 128), ("mamba2", 44, (24, 128, 256), 1, 4)),
    "falcon-h1-34b": Row(72, (72, 4, 128, 128), ("mamba2", 72, (32, 128, 256), 2, 4)),
    "granite-4.0-h-350m": Row(32, (4, 4, 64, 64), ("mamba2", 28, (48, 32, 128), 1, 4)),
    "granite-4.0-h-1b": Row(40, (4, 4, 128, 128), ("mamba2", 36, (48, 64, 128), 1, 4)),
    "granite-4.0-h-micro": Row(40, (4, 8, 64, 64), ("mamba2", 36, (64, 64, 128), 1, 4)),
    "granite-4.0-h-tiny": Row(40, (4, 4, 128, 128), ("mamba2", 36, (48, 64, 128), 1, 4)),
    "granite-4.0-h-small": Row(40, (4, 8, 128, 128), ("mamba2", 36, (128, 64, 128), 1, 4)),
    "bamba-9b": Row(32, (3, 8, 128, 128), ("mamba2", 29, (128, 64, 128), 1, 4)),
    "nemotron-h-4b": Row(52, (4, 8, 128, 128), ("mamba2", 24, (112, 64, 128), 8, 4)),
    "nemotron-h-8b": Row(52, (4, 8, 128, 128), ("mamba2", 24, (128, 64, 128), 8, 4)),
    "nemotron-h-47b": Row(98, (5, 8, 128, 128), ("mamba2", 45, (256, 64, 256), 8, 4)),
    "nemotron-nano-9b-v2": Row(56, (4, 8, 128, 128), ("mamba2", 27, (128, 80, 128), 8, 4)),
    "nemotron-3-nano-30b-a3b": Row(52, (6, 2, 128, 128), ("mamba2", 23, (64, 64, 128), 8, 4), None, "fp32"),
    "zamba2-1.2b": Row(38, (6, 32, 128, 128), ("mamba2", 38, (64, 64, 128), 1, 4)),
    "zamba2-2.7b": Row(54, (9, 32, 160, 160), ("mamba2", 54, (80, 64, 64), 1, 4)),
    "zamba2-7b": Row(81, (13, 32, 224, 224), ("mamba2", 81, (112, 64, 64), 2, 4)),
    "qwen3-next-80b-a3b": Row(48, (12, 2, 256, 256), (GDN, 36, (32, 128, 128), 16, 4)),
    "qwen3.5-4b": Row(32, (8, 4, 256, 256), (GDN, 24, (32, 128, 128), 16, 4), None, "fp32"),
    "kimi-linear-48b-a3b": Row(27, (7, 1, 512, 64), (KDA, 20, (32, 128, 128), 1, 4)),
    "jamba-v0.1": Row(32, (4, 8, 128, 128), ("mamba1", 28, (8192, 16), 1, 4)),
    "falcon-mamba-7b": Row(64, None, ("mamba1", 64, (8192, 16), 1, 4)),
    "lfm2-350m": Row(16, (6, 8, 64, 64), (CONV, 10, (1024,), 1, 3)),
    "lfm2-1.2b": Row(16, (6, 8, 64, 64), (CONV, 10, (2048,), 1, 3)),
    "lfm2-2.6b": Row(30, (8, 8, 64, 64), (CONV, 22, (2048,), 1, 3)),
    "ouro-1.4b": Row(24, (24, 16, 128, 128), None, (0, 24, 0, 4)),
    "ouro-2.6b": Row(48, (48, 16, 128, 128), None, (0, 48, 0, 4)),
    # trained with 32 loops on average; the depth-batching results cap it at 16
    "huginn-3.5b": Row(8, (8, 55, 96, 96), None, (2, 4, 2, 16)),
}


def _attention(row: Attention) -> AttentionSpec:
    layers, kv_heads, key_dim, value_dim = row
    return AttentionSpec(layers=layers, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim)


def _recurrent(row: Recurrent) -> RecurrentSpec:
    kind, layers, shape, groups, width = RecurrentKind(row[0]), *row[1:]
    state = None if kind is RecurrentKind.SHORT_CONV else shape
    return RecurrentSpec.derived(
        kind=kind, layers=layers, state_shape=state, conv_width=width, groups=groups, channels=shape[0]
    )


def _loop(row: tuple[int, int, int, int]) -> LoopSpec:
    prelude, core, coda, loops = row
    return LoopSpec(prelude=prelude, core=core, coda=coda, max_loops=loops)


def preset(name: str) -> ModelGeometry:
    """Return the geometry of a published model."""
    row = PRESETS.get(name) if isinstance(name, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if row is None:
        near = get_close_matches(str(name).lower(), PRESETS, n=3, cutoff=0.5)
        hint = f"near it: {', '.join(near)}; " if near else ""
        raise UsageError(
            f"preset must be the name of a published model, got {name!r}; {hint}"
            "ModelGeometry.preset_names() lists all"
        )
    recurrent = row.recurrent and _recurrent(row.recurrent)
    return ModelGeometry(
        name=name,
        layers=row.layers,
        attention=row.attention and _attention(row.attention),
        recurrent=recurrent,
        loop=row.loop and _loop(row.loop),
        live_state_dtype=row.live_state_dtype,
        chunk_tokens=chunk_tokens(recurrent),
    )
