"""How attention and recurrences are read out of a configuration, for families that differ in names only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hybridkv.errors import UnsupportedError
from hybridkv.geometry.checks import refuse, size
from hybridkv.geometry.specs import AttentionSpec, RecurrentKind, RecurrentSpec

if TYPE_CHECKING:
    from hybridkv.geometry.config_fields import Fields


def _quotient(fields: Fields, name: str, whole: int, parts: int, what: str) -> int:
    """Derive a width that a configuration leaves out."""
    if whole % parts:
        refuse(f"{fields.prefix}.{name}", f"given where {what} does not divide", f"{whole} / {parts}")
    return whole // parts


def gqa(
    fields: Fields, layers: int, *, hidden: int | None = None, window: int | None = None
) -> AttentionSpec | None:
    """Read grouped-query attention of `layers` layers; `hidden` is the width that its heads share."""
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


def mla(fields: Fields, layers: int) -> AttentionSpec | None:
    """Read latent attention: one head, the latent as key, the rotary part as value."""
    if not layers:
        return None
    latent, rotary = fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim")
    return AttentionSpec(layers=layers, kv_heads=1, key_dim=latent, value_dim=rotary)


def recurrence(
    kind: RecurrentKind,
    layers: int,
    state: tuple[int, ...] | None,
    width: int,
    *,
    groups: int = 1,
    channels: int = 0,
) -> RecurrentSpec | None:
    """Build the recurrence of `layers` layers; None for none of them."""
    if not layers:
        return None
    return RecurrentSpec.derived(
        kind=kind, layers=layers, state_shape=state, conv_width=width, groups=groups, channels=channels
    )


class Mamba2Names(NamedTuple):
    """Names of the mamba2 fields in one family; of several the first that is present counts.

    The inner width is `inner`, else `expand` times the hidden size; with neither, nothing binds the heads.
    """

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: tuple[str, ...] = ("mamba_n_groups",)
    d_state: str = "mamba_d_state"
    d_conv: tuple[str, ...] = ("mamba_d_conv",)
    expand: str | None = "mamba_expand"
    inner: str | None = None


def _inner_width(fields: Fields, names: Mamba2Names, *, needed: bool) -> int | None:
    if names.inner and fields.find(names.inner)[1] is not None:
        return fields.size(names.inner)
    if names.expand and (needed or fields.find(names.expand)[1] is not None):
        return fields.size(names.expand) * fields.size("hidden_size")
    return None


def mamba2(fields: Fields, layers: int, names: Mamba2Names) -> RecurrentSpec | None:
    """Read mamba2 of `layers` layers under a family's names."""
    if not layers:
        return None
    heads = fields.size(names.heads)
    name, head_dim = fields.find(names.head_dim)
    derived = head_dim is None or head_dim == "auto"
    inner = _inner_width(fields, names, needed=derived)
    if derived and inner is not None:
        head_dim = _quotient(fields, names.head_dim, inner, heads, f"inner width / {names.heads}")
    elif inner is not None and size(name, head_dim) * heads != inner:
        refuse(name, f"inner width / {names.heads} ({inner} / {heads})", head_dim)
    shape = (heads, size(name, head_dim), fields.size(names.d_state))
    width, groups = fields.size(*names.d_conv), fields.size(*names.groups)
    return recurrence(RecurrentKind.MAMBA2, layers, shape, width, groups=groups)


def window(fields: Fields, kinds: list[str] | None, total: int, *, by_default: bool) -> int | None:
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
            f"{fields.prefix}.layer_types must be all full or all sliding attention,"
            f" got {sliding} sliding of {total}"
        )
    return fields.size("sliding_window") if sliding else None
