"""The three kinds of per-layer memory: attention KV, recurrent state, and the planes of a loop.

Owns shapes and what tensor parallelism does to them. Does not know dtypes: bytes are the geometry's business.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING

from hybridkv.errors import UnsupportedError
from hybridkv.geometry.checks import refuse, resolve, size, sizes
from hybridkv.units import DELTA_CHUNK, SSD_CHUNK

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}


class RecurrentKind(StrEnum):
    """The recurrence of a layer, which fixes the rank of its state and the sections of its convolution."""

    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    GATED_DELTA_NET = "gated_delta_net"
    KIMI_DELTA_ATTENTION = "kimi_delta_attention"
    SHORT_CONV = "short_conv"


class LoopLayout(StrEnum):
    """Which KV plane a loop writes (D42)."""

    DEPTH_INDEXED = "depth_indexed"
    LAST_EXITED = "last_exited"
    SINGLE = "single"
    FIRST_THEN_SHARED = "first_then_shared"


# axes of the state, and sections of the convolution with True where a section is cut by groups (or key heads)
_STATE_AXES: Mapping[RecurrentKind, tuple[str, ...]] = {
    RecurrentKind.MAMBA1: ("d_inner", "d_state"),
    RecurrentKind.MAMBA2: ("heads", "head_dim", "d_state"),
    RecurrentKind.GATED_DELTA_NET: ("value_heads", "key_dim", "value_dim"),
    RecurrentKind.KIMI_DELTA_ATTENTION: ("heads", "key_dim", "value_dim"),
    RecurrentKind.SHORT_CONV: (),
}
_SECTIONS: Mapping[RecurrentKind, tuple[tuple[str, bool], ...]] = {
    RecurrentKind.MAMBA1: (("x", False),),
    RecurrentKind.MAMBA2: (("x", False), ("B", True), ("C", True)),
    RecurrentKind.GATED_DELTA_NET: (("query", True), ("key", True), ("value", False)),
    RecurrentKind.KIMI_DELTA_ATTENTION: (("query", False), ("key", False), ("value", False)),
    RecurrentKind.SHORT_CONV: (("x", False),),
}


def chunk_tokens(spec: RecurrentSpec | None) -> int:
    """Distance of the points where our kernels round the carried state; the model's own chunk may be another."""
    return DELTA_CHUNK if spec is not None and spec.kind is RecurrentKind.GATED_DELTA_NET else SSD_CHUNK


def conv_sections(
    kind: RecurrentKind, state_shape: tuple[int, ...] | None, groups: int, channels: int = 0
) -> tuple[int, ...]:
    """Columns of each convolution section as the state implies them; `channels` where there is no state."""
    if state_shape is None:
        return (channels,)
    if kind is RecurrentKind.MAMBA1:
        return (state_shape[0],)
    heads, first, second = state_shape
    if kind is RecurrentKind.MAMBA2:
        return (heads * first, groups * second, groups * second)
    if kind is RecurrentKind.GATED_DELTA_NET:
        return (groups * first, groups * first, heads * second)
    return (heads * first, heads * first, heads * second)


def _split(what: str, count: int, ranks: int) -> int:
    if count % ranks:
        raise UnsupportedError(f"{what} must be divisible by {ranks} ranks, got {count}")
    return count // ranks


def _split_or_replicate(what: str, count: int, ranks: int) -> int:
    """Split, or keep one where there are fewer than ranks: then several ranks hold the same one."""
    if count % ranks == 0:
        return count // ranks
    if ranks % count == 0:
        return 1
    raise UnsupportedError(f"{what} must be a multiple or a divisor of {ranks} ranks, got {count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """KV of one attention layer: heads and per-head widths, in elements.

    MLA is one head: its key is the latent (`kv_lora_rank`), its value the rotary part (`qk_rope_head_dim`).
    `layers` counts layers of the network; a loop multiplies them into planes. `window_tokens` is the sliding
    window; it changes no size here.
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "key_dim", "value_dim"):
            size(f"attention.{name}", getattr(self, name))
        if self.window_tokens is not None:
            size("attention.window_tokens", self.window_tokens, hint="None is no window")

    @property
    def elements_per_token(self) -> int:
        """Elements of one layer and token."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    def shard(self, ranks: int) -> AttentionSpec:
        """Return what one of `ranks` holds: its KV heads, or a copy of one where there are fewer."""
        return replace(self, kv_heads=_split_or_replicate("attention.kv_heads", self.kv_heads, ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """State of one recurrent layer and sequence, in elements.

    `state_shape` is (heads, head_dim, d_state) for mamba2, (value_heads, key_dim, value_dim) for the delta
    rules, (d_inner, d_state) for mamba1, None for a convolution alone. `conv_width` is d_conv; 0 is no
    convolution state. `groups` are mamba2's B/C groups, or the key heads of a gated delta net.
    `conv_sections` (x, B, C or query, key, value) are derived from the shape where that adds up to
    `conv_dim`; otherwise one section, which cannot be sharded for kinds that have several.
    """

    kind: RecurrentKind
    layers: int
    state_shape: tuple[int, ...] | None
    conv_dim: int
    conv_width: int
    groups: int = 1
    conv_sections: tuple[int, ...] = ()

    @classmethod
    def derived(
        cls,
        *,
        kind: RecurrentKind,
        layers: int,
        state_shape: tuple[int, ...] | None,
        conv_width: int,
        groups: int = 1,
        channels: int = 0,
    ) -> RecurrentSpec:
        """Build a spec whose convolution follows from the state; `channels` wide where there is no state."""
        sections = conv_sections(kind, state_shape, groups, channels)
        return cls(
            kind=kind,
            layers=layers,
            state_shape=state_shape,
            conv_dim=sum(sections),
            conv_width=conv_width,
            groups=groups,
            conv_sections=sections,
        )

    def __post_init__(self) -> None:
        kind = resolve(RecurrentKind, "recurrent.kind", self.kind)
        object.__setattr__(self, "kind", kind)
        size("recurrent.layers", self.layers)
        size("recurrent.groups", self.groups)
        self._check_state()
        size("recurrent.conv_width", self.conv_width, least=0, hint="0 is no convolution state")
        if self.conv_width == 1:
            refuse("recurrent.conv_width", "0 or at least 2", 1, "a convolution of one token keeps no state")
        size("recurrent.conv_dim", self.conv_dim, least=1 if self.conv_width else 0)
        if self.state_shape is None and not self.conv_width:
            refuse("recurrent.conv_width", "at least 2 where there is no state", 0)
        if self.conv_sections:
            self._check_sections()
        elif self.conv_dim:
            implied = conv_sections(kind, self.state_shape, self.groups, self.conv_dim)
            found = implied if sum(implied) == self.conv_dim else (self.conv_dim,)
            object.__setattr__(self, "conv_sections", found)

    def _check_state(self) -> None:
        axes = _STATE_AXES[self.kind]
        expected = f"({', '.join(axes)}) for {self.kind}" if axes else f"None for {self.kind}"
        if self.state_shape is None and not axes:
            return
        shape = sizes("recurrent.state_shape", self.state_shape, expected=expected, count=len(axes))
        if not axes:
            refuse("recurrent.state_shape", expected, shape)
        if shape[0] % self.groups:
            refuse("recurrent.groups", f"a divisor of {axes[0]} ({shape[0]})", self.groups)

    def _check_sections(self) -> None:
        sections = sizes(
            "recurrent.conv_sections", self.conv_sections, expected="a tuple of positive integers"
        )
        if sum(sections) != self.conv_dim:
            refuse("recurrent.conv_sections", f"columns that sum to conv_dim ({self.conv_dim})", sections)

    @property
    def state_elements(self) -> int:
        """Elements of the recurrent state; 0 without one."""
        return 0 if self.state_shape is None else prod(self.state_shape)

    @property
    def section_groups(self) -> tuple[int, ...]:
        """For each convolution section the groups it is made of, 0 where it is cut between any channels."""
        return tuple(self.groups if by_group else 0 for _, by_group in _SECTIONS[self.kind])

    @property
    def rows(self) -> int:
        """Length of the axis along which a state may be cut: heads, d_inner for mamba1; 0 without state."""
        return 0 if self.state_shape is None else self.state_shape[0]

    def conv_elements(self, *, full_width: bool) -> int:
        """Elements of the convolution state: `conv_width` - 1 columns are read again, engines keep all."""
        columns = self.conv_width if full_width else max(self.conv_width - 1, 0)
        return self.conv_dim * columns

    def shard(self, ranks: int) -> RecurrentSpec:
        """Return what one of `ranks` holds: rows and channels split, groups split or replicated."""
        roles = _SECTIONS[self.kind]
        shape = self.state_shape
        if shape is not None:
            shape = (
                _split(f"recurrent.state_shape {_STATE_AXES[self.kind][0]}", shape[0], ranks),
                *shape[1:],
            )
        grouped = any(by_group for _, by_group in roles)
        groups = _split_or_replicate("recurrent.groups", self.groups, ranks) if grouped else self.groups
        sections = self.conv_sections if self.conv_dim else ()
        if sections and len(sections) != len(roles):
            names = ", ".join(name for name, _ in roles)
            raise UnsupportedError(
                f"recurrent.conv_sections must be {len(roles)} sections ({names}) to be sharded,"
                f" got {sections}"
            )
        parts: list[int] = []
        for columns, (name, by_group) in zip(sections, roles, strict=False):
            what = f"recurrent.conv_sections {name}"
            parts.append(
                _split(f"{what} (by group)", columns, self.groups) * groups
                if by_group
                else _split(what, columns, ranks)
            )
        return replace(
            self, state_shape=shape, groups=groups, conv_dim=sum(parts), conv_sections=tuple(parts)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """A looped model: `prelude` layers once, `core` layers up to `max_loops` times, `coda` layers once."""

    prelude: int
    core: int
    coda: int
    max_loops: int
    layout: LoopLayout = LoopLayout.DEPTH_INDEXED

    def __post_init__(self) -> None:
        size("loop.prelude", self.prelude, least=0)
        size("loop.core", self.core)
        size("loop.coda", self.coda, least=0)
        size("loop.max_loops", self.max_loops)
        object.__setattr__(self, "layout", resolve(LoopLayout, "loop.layout", self.layout))

    @property
    def planes(self) -> int:
        """KV planes that every core layer keeps."""
        if self.layout is LoopLayout.SINGLE:
            return 1
        if self.layout is LoopLayout.FIRST_THEN_SHARED:
            return min(2, self.max_loops)
        return self.max_loops

    @property
    def layers(self) -> int:
        """Layers of the network, each counted once."""
        return self.prelude + self.core + self.coda

    @property
    def attention_layers(self) -> int:
        """KV planes of all layers."""
        return self.prelude + self.planes * self.core + self.coda

    def plane_of(self, loop: int) -> int:
        """Plane that `loop` (1-based) writes and reads."""
        if size("loop", loop, hint="loops count from 1") > self.max_loops:
            refuse("loop", f"1 to max_loops ({self.max_loops})", loop)
        return min(loop, self.planes) - 1
