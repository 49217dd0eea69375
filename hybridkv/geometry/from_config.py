"""Hugging Face configurations, read by model family.

Owns which field of which family means what, and the sizes that a family derives where a field is absent. Reads those
fields only: configurations are full of others. Does not know the dtype of the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.geometry.checks import one_of, refuse, resolve, size
from hybridkv.geometry.model import ModelGeometry
from hybridkv.geometry.specs import (
    AttentionSpec,
    LoopLayout,
    LoopSpec,
    RecurrentKind,
    RecurrentSpec,
    conv_sections,
)

if TYPE_CHECKING:
    from os import PathLike


class Parts(NamedTuple):
    """What a family contributes to a geometry."""

    layers: int
    attention: AttentionSpec | None
    recurrent: RecurrentSpec | None = None
    loop: LoopSpec | None = None


class Fields:
    """Typed access to a configuration. Null counts as absent; of several names the first that is present counts."""

    def __init__(self, values: Mapping[str, object], prefix: str = "config") -> None:
        self.values = values
        self.prefix = prefix

    def find(self, *names: str) -> tuple[str, object]:
        """Return a field under its full name, None where it is absent."""
        for name in names:
            if (value := self.values.get(name)) is not None:
                return f"{self.prefix}.{name}", value
        return f"{self.prefix}.{names[0]}", None

    def size(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Read a size; without `default` the field has to be there."""
        name, value = self.find(*names)
        if value is None and default is not None:
            return default
        return size(name, value, least=least, hint="the field is missing" if value is None else "")

    def words(self, *names: str) -> list[str] | None:
        """Read a list of words, one a layer."""
        name, value = self.find(*names)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            refuse(name, "a list with the kind of every layer", value)
        kinds = [one_of(f"{name} entry", word, LAYER_KINDS) for word in cast("list[object]", value)]
        total = self.size("num_hidden_layers", default=len(kinds))
        if not kinds or len(kinds) != total:
            refuse(name, f"a list of num_hidden_layers ({total}) kinds", f"{len(kinds)} of them")
        return kinds

    def indices(self, name: str, total: int, first: int = 0) -> set[int] | None:
        """Read a list of layer numbers that count from `first`."""
        full, value = self.find(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            refuse(full, "a list of layer numbers", value)
        found: set[int] = set()
        for index in cast("list[object]", value):
            number = size(f"{full} entry", index, least=first)
            if number >= first + total or number in found:
                refuse(f"{full} entry", f"distinct and below {first + total}", number)
            found.add(number)
        return found

    def inner(self, name: str) -> Fields:
        """Descend into a nested mapping; an absent one is empty."""
        full, value = self.find(name)
        if value is None:
            return Fields({}, full)
        if not isinstance(value, Mapping):
            refuse(full, "a mapping", value)
        return Fields(cast("Mapping[str, object]", value), full)


# kind of a layer -> it holds KV, it holds recurrent or convolution state
LAYER_KINDS: Mapping[str, tuple[bool, bool]] = {
    "full_attention": (True, False),
    "attention": (True, False),
    "sliding_attention": (True, False),
    "linear_attention": (False, True),
    "mamba": (False, True),
    "conv": (False, True),
    "hybrid": (True, True),
    "mlp": (False, False),
    "moe": (False, False),
}
PATTERN_LETTERS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
SSM_DTYPES: Mapping[str, str | None] = {"float32": "fp32", "float16": "fp16", "bfloat16": None, "auto": None}


def _count(kinds: list[str]) -> tuple[int, int, int]:
    holds = [LAYER_KINDS[kind] for kind in kinds]
    return len(kinds), sum(kv for kv, _ in holds), sum(state for _, state in holds)


def _by_indices(total: int, chosen: set[int], kind: str, other: str, first: int = 0) -> list[str]:
    return [kind if first + layer in chosen else other for layer in range(total)]


def _quotient(fields: Fields, name: str, whole: int, parts: int, what: str) -> int:
    """Derive a width that a configuration leaves out."""
    if whole % parts:
        refuse(f"{fields.prefix}.{name}", f"given where {what} does not divide", f"{whole} / {parts}")
    return whole // parts


def _gqa(
    fields: Fields, layers: int, *, hidden: int | None = None, window: int | None = None
) -> AttentionSpec | None:
    if not layers:
        return None
    heads_names = ("num_attention_heads", "n_heads", "num_heads")
    kv_heads = fields.size("num_key_value_heads", *heads_names)
    name, width = fields.find("head_dim", "attention_head_dim")
    if width is None:
        hidden = fields.size("hidden_size", "n_embd") if hidden is None else hidden
        heads = fields.size(*heads_names)
        width = _quotient(fields, "head_dim", hidden, heads, "hidden_size / num_attention_heads")
    head_dim = size(name, width)
    return AttentionSpec(
        layers=layers, kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim, window_tokens=window
    )


def _recurrence(
    kind: RecurrentKind,
    layers: int,
    state: tuple[int, ...] | None,
    width: int,
    *,
    groups: int = 1,
    channels: int = 0,
) -> RecurrentSpec | None:
    if not layers:
        return None
    sections = conv_sections(kind, state, groups, channels)
    return RecurrentSpec(
        kind=kind,
        layers=layers,
        state_shape=state,
        conv_dim=sum(sections),
        conv_width=width,
        groups=groups,
        conv_sections=sections,
    )


class Mamba2Names(NamedTuple):
    """Names of the mamba2 fields in one family. `inner` is the inner width, where the family declares it."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    d_state: str = "mamba_d_state"
    d_conv: str = "mamba_d_conv"
    expand: str = "mamba_expand"
    inner: str = "mamba_d_ssm"


def _mamba2(fields: Fields, layers: int, names: Mamba2Names) -> RecurrentSpec | None:
    if not layers:
        return None
    heads = fields.size(names.heads)
    name, head_dim = fields.find(names.head_dim)
    _, inner = fields.find(names.inner)
    derived = head_dim is None or head_dim == "auto"
    if inner is not None or derived or fields.find(names.expand)[1] is not None:
        inner = (
            fields.size(names.inner)
            if inner is not None
            else fields.size(names.expand) * fields.size("hidden_size")
        )
        if derived:
            head_dim = _quotient(fields, names.head_dim, inner, heads, f"inner width / {names.heads}")
        elif size(name, head_dim) * heads != inner:
            refuse(name, f"inner width / {names.heads} ({inner} / {heads})", head_dim)
    shape = (heads, size(name, head_dim), fields.size(names.d_state))
    groups = fields.size(names.groups)
    return _recurrence(RecurrentKind.MAMBA2, layers, shape, fields.size(names.d_conv), groups=groups)


def _falcon_h1(fields: Fields) -> Parts:
    total = fields.size("num_hidden_layers")
    return Parts(total, _gqa(fields, total), _mamba2(fields, total, Mamba2Names()))


def _granite(fields: Fields) -> Parts:
    kinds = fields.words("layer_types", "layers_block_type") or ["mamba"] * fields.size("num_hidden_layers")
    total, attention, recurrent = _count(kinds)
    return Parts(total, _gqa(fields, attention), _mamba2(fields, recurrent, Mamba2Names()))


def _bamba(fields: Fields) -> Parts:
    kinds = fields.words("layer_types", "layers_block_type")
    if kinds is None:
        total = fields.size("num_hidden_layers")
        chosen = fields.indices("attn_layer_indices", total) or set()
        kinds = _by_indices(total, chosen, "attention", "mamba")
    total, attention, recurrent = _count(kinds)
    return Parts(total, _gqa(fields, attention), _mamba2(fields, recurrent, Mamba2Names()))


def _nemotron_h(fields: Fields) -> Parts:
    kinds = fields.words("layers_block_type", "layer_types")
    if kinds is None:
        name, pattern = fields.find("hybrid_override_pattern")
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(PATTERN_LETTERS):
            refuse(name, f"a string of the letters {' '.join(PATTERN_LETTERS)}", pattern)
        kinds = [PATTERN_LETTERS[letter] for letter in pattern]
        declared = fields.size("num_hidden_layers", default=len(kinds))
        if declared != len(kinds):
            refuse(name, f"num_hidden_layers ({declared}) letters", f"{len(kinds)} of them")
    total, attention, recurrent = _count(kinds)
    # the inner width is heads * head_dim here; `expand` does not bind it
    names = Mamba2Names(
        "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "-", "-"
    )
    if "n_groups" not in fields.values and "mamba_n_groups" in fields.values:
        names = names._replace(groups="mamba_n_groups")
    if "conv_kernel" not in fields.values and "mamba_d_conv" in fields.values:
        names = names._replace(d_conv="mamba_d_conv")
    return Parts(total, _gqa(fields, attention), _mamba2(fields, recurrent, names))


def _zamba2(fields: Fields) -> Parts:
    kinds = fields.words("layers_block_type", "layer_types")
    if kinds is None:
        total = fields.size("num_hidden_layers")
        chosen = fields.indices("hybrid_layer_ids", total)
        if chosen is None:
            refuse(
                f"{fields.prefix}.layers_block_type",
                "a list with the kind of every layer",
                None,
                "the field is missing",
            )
        kinds = _by_indices(total, chosen, "hybrid", "mamba")
    # a hybrid layer is a shared attention block in front of a mamba layer; the block reads state and embedding, 2 x hidden
    total, attention, _ = _count(kinds)
    names = Mamba2Names("n_mamba_heads", "mamba_headdim", "mamba_ngroups", inner="-")
    spec = _gqa(fields, attention, hidden=2 * fields.size("hidden_size"))
    return Parts(total, spec, _mamba2(fields, total, names))


def _qwen3_next(fields: Fields) -> Parts:
    kinds = fields.words("layer_types")
    if kinds is None:
        total = fields.size("num_hidden_layers")
        every = fields.size("full_attention_interval")
        kinds = _by_indices(total, set(range(every - 1, total, every)), "attention", "linear_attention")
    total, attention, recurrent = _count(kinds)
    shape = (
        fields.size("linear_num_value_heads"),
        fields.size("linear_key_head_dim"),
        fields.size("linear_value_head_dim"),
    )
    width, groups = fields.size("linear_conv_kernel_dim"), fields.size("linear_num_key_heads")
    spec = _recurrence(RecurrentKind.GATED_DELTA_NET, recurrent, shape, width, groups=groups)
    return Parts(total, _gqa(fields, attention), spec)


def _kimi_linear(fields: Fields) -> Parts:
    linear = fields.inner("linear_attn_config")
    flat = not linear.values
    kinds = fields.words("layer_types")
    if kinds is None:
        total = fields.size("num_hidden_layers")
        # these two lists count from 1
        full = linear.indices("full_attn_layers", total, first=1) or set()
        delta = linear.indices("kda_layers", total, first=1) or set()
        if full & delta or len(full | delta) != total:
            expected = f"with full_attn_layers a partition of the {total} layers"
            refuse(f"{linear.prefix}.kda_layers", expected, sorted(delta))
        kinds = _by_indices(total, full, "attention", "linear_attention", first=1)
    total, attention, recurrent = _count(kinds)
    heads = fields.size("linear_num_heads") if flat else linear.size("num_heads")
    head_dim = fields.size("linear_head_dim") if flat else linear.size("head_dim")
    width = fields.size("linear_conv_kernel_dim") if flat else linear.size("short_conv_kernel_size")
    latent = attention and AttentionSpec(
        layers=attention,
        kv_heads=1,
        key_dim=fields.size("kv_lora_rank"),
        value_dim=fields.size("qk_rope_head_dim"),
    )
    shape = (heads, head_dim, head_dim)
    return Parts(
        total, latent or None, _recurrence(RecurrentKind.KIMI_DELTA_ATTENTION, recurrent, shape, width)
    )


def _jamba(fields: Fields) -> Parts:
    kinds = fields.words("layers_block_type", "layer_types")
    if kinds is None:
        total = fields.size("num_hidden_layers")
        period = fields.size("attn_layer_period")
        offset = fields.size("attn_layer_offset", least=0)
        kinds = _by_indices(total, set(range(offset, total, period)), "attention", "mamba")
    total, attention, recurrent = _count(kinds)
    shape = (fields.size("mamba_expand") * fields.size("hidden_size"), fields.size("mamba_d_state"))
    spec = _recurrence(RecurrentKind.MAMBA1, recurrent, shape, fields.size("mamba_d_conv"))
    return Parts(total, _gqa(fields, attention), spec)


def _mamba1(fields: Fields) -> Parts:
    total = fields.size("num_hidden_layers")
    # published files declare an `expand` that the inner width does not follow: the width itself counts
    _, declared = fields.find("intermediate_size")
    inner = (
        fields.size("expand") * fields.size("hidden_size")
        if declared is None
        else fields.size("intermediate_size")
    )
    shape = (inner, fields.size("state_size"))
    return Parts(total, None, _recurrence(RecurrentKind.MAMBA1, total, shape, fields.size("conv_kernel")))


def _mamba2_only(fields: Fields) -> Parts:
    total = fields.size("num_hidden_layers")
    names = Mamba2Names("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "expand", "-")
    return Parts(total, None, _mamba2(fields, total, names))


def _lfm2(fields: Fields) -> Parts:
    kinds = fields.words("layer_types")
    if kinds is None:
        total = fields.size("num_hidden_layers")
        chosen = fields.indices("full_attn_idxs", total)
        if chosen is None:
            refuse(
                f"{fields.prefix}.layer_types",
                "a list with the kind of every layer",
                None,
                "the field is missing",
            )
        kinds = _by_indices(total, chosen, "attention", "conv")
    total, attention, recurrent = _count(kinds)
    width, channels = fields.size("conv_L_cache"), fields.size("hidden_size")
    spec = _recurrence(RecurrentKind.SHORT_CONV, recurrent, None, width, channels=channels)
    return Parts(total, _gqa(fields, attention), spec)


def _window(fields: Fields, kinds: list[str] | None, total: int, *, by_default: bool) -> int | None:
    """Find the sliding window, which has to be the same in all layers."""
    name, enabled = fields.find("use_sliding_window")
    if enabled is not None and not isinstance(enabled, bool):
        refuse(name, "true or false", enabled)
    if kinds is not None:
        sliding = kinds.count("sliding_attention")
    elif (by_default if enabled is None else enabled) and fields.find("sliding_window")[1] is not None:
        sliding = total - min(fields.size("max_window_layers", default=0, least=0), total)
    else:
        sliding = 0
    if sliding not in {0, total}:
        raise UnsupportedError(
            f"{fields.prefix}.layer_types must be all full or all sliding attention, got {sliding} sliding of {total}"
        )
    return fields.size("sliding_window") if sliding else None


def _plain(fields: Fields, *, sliding: bool = False) -> Parts:
    kinds = fields.words("layer_types")
    total = fields.size("num_hidden_layers") if kinds is None else len(kinds)
    if kinds is not None and set(kinds) - {"full_attention", "sliding_attention", "attention"}:
        refuse(f"{fields.prefix}.layer_types", "attention in every layer", sorted(set(kinds)))
    return Parts(total, _gqa(fields, total, window=_window(fields, kinds, total, by_default=sliding)))


def _ouro(fields: Fields) -> Parts:
    layers, attention, *_ = _plain(fields)
    loop = LoopSpec(prelude=0, core=layers, coda=0, max_loops=fields.size("total_ut_steps"))
    return Parts(layers, attention, loop=loop)


def _huginn(fields: Fields) -> Parts:
    loop = LoopSpec(
        prelude=fields.size("n_layers_in_prelude", least=0),
        core=fields.size("n_layers_in_recurrent_block"),
        coda=fields.size("n_layers_in_coda", least=0),
        max_loops=fields.size("mean_recurrence"),
    )
    return Parts(loop.layers, _gqa(fields, loop.layers), loop=loop)


FAMILIES: dict[str, Callable[[Fields], Parts]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _mamba1,
    "granitemoehybrid": _granite,
    "huginn_raven": _huginn,
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "llama": _plain,
    "mamba": _mamba1,
    "mamba2": _mamba2_only,
    "mistral": lambda fields: _plain(fields, sliding=True),
    "nemotron_h": _nemotron_h,
    "ouro": _ouro,
    "qwen3": _plain,
    "qwen3_5": _qwen3_next,
    "qwen3_5_text": _qwen3_next,
    "qwen3_next": _qwen3_next,
    "zamba2": _zamba2,
}


def _load(source: str | PathLike[str]) -> tuple[Mapping[str, object], str]:
    """Read the file and the name that its directory gives the model."""
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    expected = "a config.json, a directory that holds one, or a mapping"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        refuse("path_or_mapping", expected, str(source), error.strerror or "")
    except ValueError as error:
        refuse("path_or_mapping", expected, str(source), f"it is not JSON: {error}")
    if not isinstance(found, dict):
        refuse("path_or_mapping", "a JSON object", type(found).__name__)
    return cast("dict[str, object]", found), file.resolve().parent.name


def _live_dtype(fields: Fields, recurrent: RecurrentSpec | None) -> str | None:
    name, declared = fields.find("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if declared is None or recurrent is None:
        return None
    return SSM_DTYPES[one_of(name, declared, SSM_DTYPES)]


def from_config(
    source: str | PathLike[str] | Mapping[str, object], overrides: Mapping[str, Any]
) -> ModelGeometry:
    """Read a configuration; see `ModelGeometry.from_hf`."""
    values, folder = (source, "") if isinstance(source, Mapping) else _load(source)
    fields = Fields(values)
    outer_type = fields.find("model_type")[1]
    label = next(
        (text for key in ("_name_or_path", "name") if isinstance(text := values.get(key), str) and text), ""
    )
    if fields.find("text_config")[1] is not None:
        fields = fields.inner("text_config")
    name, model_type = fields.find("model_type")
    if model_type is None:
        model_type = outer_type
    if not isinstance(model_type, str):
        refuse(name, "the name of a model family", model_type)
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedError(f"{name} must be one of {', '.join(FAMILIES)}, got {model_type!r}")
    parts = family(fields)
    changes = dict(overrides)
    loop = _loop_overrides(parts.loop, changes)
    return ModelGeometry(
        name=label or folder or model_type,
        layers=parts.layers,
        attention=parts.attention,
        recurrent=parts.recurrent,
        loop=loop,
        live_state_dtype=_live_dtype(fields, parts.recurrent),
    ).replace(**changes)


def _loop_overrides(loop: LoopSpec | None, changes: dict[str, Any]) -> LoopSpec | None:
    """Take `max_loops` and `loop_layout` out of `changes`."""
    for key, field in (("max_loops", "max_loops"), ("loop_layout", "layout")):
        if key not in changes:
            continue
        value = changes.pop(key)
        if loop is None:
            raise UsageError(f"{key} must be left out for a model without loop, got {value!r}")
        loop = replace(
            loop, **{field: resolve(LoopLayout, key, value) if field == "layout" else size(key, value)}
        )
    return loop
