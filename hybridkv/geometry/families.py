"""Model families: which field of a Hugging Face configuration means what, what follows where one is absent.

Reads those fields only: configurations are full of others. Does not know files, names or dtypes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hybridkv.geometry.checks import refuse
from hybridkv.geometry.config_fields import LAYER_KINDS, PATTERN_LETTERS
from hybridkv.geometry.readers import Mamba2Names, gqa, mamba2, mla, recurrence, window
from hybridkv.geometry.specs import LoopSpec, RecurrentKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridkv.geometry.config_fields import Fields
    from hybridkv.geometry.specs import AttentionSpec, RecurrentSpec


class Parts(NamedTuple):
    """What a family contributes to a geometry."""

    layers: int
    attention: AttentionSpec | None
    recurrent: RecurrentSpec | None = None
    loop: LoopSpec | None = None


def _count(kinds: list[str]) -> tuple[int, int, int]:
    holds = [LAYER_KINDS[kind] for kind in kinds]
    return len(kinds), sum(kv for kv, _ in holds), sum(state for _, state in holds)


def _by_indices(total: int, chosen: set[int], kind: str, other: str, first: int = 0) -> list[str]:
    return [kind if first + layer in chosen else other for layer in range(total)]


def _falcon_h1(fields: Fields) -> Parts:
    total = fields.size("num_hidden_layers")
    return Parts(total, gqa(fields, total), mamba2(fields, total, Mamba2Names(inner="mamba_d_ssm")))


def _granite(fields: Fields) -> Parts:
    kinds = fields.words("layer_types", "layers_block_type") or ["mamba"] * fields.size("num_hidden_layers")
    total, attention, recurrent = _count(kinds)
    return Parts(total, gqa(fields, attention), mamba2(fields, recurrent, Mamba2Names()))


def _bamba(fields: Fields) -> Parts:
    kinds = fields.words("layer_types", "layers_block_type")
    if kinds is None:
        total = fields.size("num_hidden_layers")
        chosen = fields.indices("attn_layer_indices", total) or set()
        kinds = _by_indices(total, chosen, "attention", "mamba")
    total, attention, recurrent = _count(kinds)
    return Parts(total, gqa(fields, attention), mamba2(fields, recurrent, Mamba2Names()))


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
    names = Mamba2Names(
        heads="mamba_num_heads",
        head_dim="mamba_head_dim",
        groups=("n_groups", "mamba_n_groups"),
        d_state="ssm_state_size",
        d_conv=("conv_kernel", "mamba_d_conv"),
        expand=None,  # present, but it does not bind heads * head_dim: 4,096 of 5,376 in Nemotron-3
    )
    return Parts(total, gqa(fields, attention), mamba2(fields, recurrent, names))


def _zamba2(fields: Fields) -> Parts:
    kinds = fields.words("layers_block_type", "layer_types")
    if kinds is None:
        total = fields.size("num_hidden_layers")
        chosen = fields.indices("hybrid_layer_ids", total)
        if chosen is None:
            fields.missing("layers_block_type", "a list with the kind of every layer")
        kinds = _by_indices(total, chosen, "hybrid", "mamba")
    # a hybrid layer is a shared attention block before a mamba layer; it reads 2 x hidden
    total, attention, _ = _count(kinds)
    names = Mamba2Names(heads="n_mamba_heads", head_dim="mamba_headdim", groups=("mamba_ngroups",))
    spec = gqa(fields, attention, hidden=2 * fields.size("hidden_size"))
    return Parts(total, spec, mamba2(fields, total, names))


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
    spec = recurrence(RecurrentKind.GATED_DELTA_NET, recurrent, shape, width, groups=groups)
    return Parts(total, gqa(fields, attention), spec)


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
    spec = recurrence(RecurrentKind.KIMI_DELTA_ATTENTION, recurrent, (heads, head_dim, head_dim), width)
    return Parts(total, mla(fields, attention), spec)


def _jamba(fields: Fields) -> Parts:
    kinds = fields.words("layers_block_type", "layer_types")
    if kinds is None:
        total = fields.size("num_hidden_layers")
        period = fields.size("attn_layer_period")
        offset = fields.size("attn_layer_offset", least=0)
        kinds = _by_indices(total, set(range(offset, total, period)), "attention", "mamba")
    total, attention, recurrent = _count(kinds)
    shape = (fields.size("mamba_expand") * fields.size("hidden_size"), fields.size("mamba_d_state"))
    spec = recurrence(RecurrentKind.MAMBA1, recurrent, shape, fields.size("mamba_d_conv"))
    return Parts(total, gqa(fields, attention), spec)


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
    return Parts(total, None, recurrence(RecurrentKind.MAMBA1, total, shape, fields.size("conv_kernel")))


def _mamba2_only(fields: Fields) -> Parts:
    total = fields.size("num_hidden_layers")
    names = Mamba2Names("num_heads", "head_dim", ("n_groups",), "state_size", ("conv_kernel",), "expand")
    return Parts(total, None, mamba2(fields, total, names))


def _lfm2(fields: Fields) -> Parts:
    kinds = fields.words("layer_types")
    if kinds is None:
        total = fields.size("num_hidden_layers")
        chosen = fields.indices("full_attn_idxs", total)
        if chosen is None:
            fields.missing("layer_types", "a list with the kind of every layer")
        kinds = _by_indices(total, chosen, "attention", "conv")
    total, attention, recurrent = _count(kinds)
    width, channels = fields.size("conv_L_cache"), fields.size("hidden_size")
    spec = recurrence(RecurrentKind.SHORT_CONV, recurrent, None, width, channels=channels)
    return Parts(total, gqa(fields, attention), spec)


def _plain(fields: Fields, *, sliding: bool = False) -> Parts:
    kinds = fields.words("layer_types")
    total = fields.size("num_hidden_layers") if kinds is None else len(kinds)
    if kinds is not None and set(kinds) - {"full_attention", "sliding_attention", "attention"}:
        refuse(f"{fields.prefix}.layer_types", "attention in every layer", sorted(set(kinds)))
    return Parts(total, gqa(fields, total, window=window(fields, kinds, total, by_default=sliding)))


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
    return Parts(loop.layers, gqa(fields, loop.layers), loop=loop)


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
