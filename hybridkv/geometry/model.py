"""One model: bytes per token, per checkpoint, per sequence; layer groups; shards; identity."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridkv.errors import UnsupportedError, UsageError
from hybridkv.geometry.checks import at_most, one_of, refuse, size
from hybridkv.geometry.specs import DTYPE_BYTES, AttentionSpec, LoopSpec, RecurrentSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

UNIFORM_TOKENS = 16


class UniformUnit(NamedTuple):
    """A block whose KV is at least as large as a checkpoint of one layer."""

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """What one token and one checkpoint cost. Bytes are of one layer unless the name says otherwise.

    `layers` counts all layers of the network, also those without state. `state_dtype` is the recurrent
    state as retained, `live_state_dtype` as the running model holds it (None: the same). `conv_full_width`
    keeps the oldest convolution column too, which is never read. `chunk_tokens` is the distance of the points
    where the carried state is rounded. `tp_rank_count` is the number of ranks of which this is one.
    """

    name: str
    layers: int
    attention: AttentionSpec | None
    recurrent: RecurrentSpec | None
    loop: LoopSpec | None = None
    kv_dtype: str = "bf16"
    state_dtype: str = "bf16"
    live_state_dtype: str | None = None
    conv_dtype: str = "bf16"
    conv_full_width: bool = False
    chunk_tokens: int = 64
    tp_rank_count: int = 1

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse("name", "a non-empty string", self.name)
        size("layers", self.layers)
        size("tp_rank_count", self.tp_rank_count)
        for name in ("kv_dtype", "state_dtype", "conv_dtype"):
            one_of(name, getattr(self, name), DTYPE_BYTES)
        if self.live_state_dtype is not None:
            one_of("live_state_dtype", self.live_state_dtype, DTYPE_BYTES)
        if not isinstance(self.conv_full_width, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse("conv_full_width", "a bool", self.conv_full_width)
        chunk = size("chunk_tokens", self.chunk_tokens)
        if chunk & (chunk - 1):
            lower = 1 << (chunk.bit_length() - 1)
            refuse("chunk_tokens", "a power of two", chunk, f"the nearest are {lower} and {2 * lower}")
        for name, kind in (("attention", AttentionSpec), ("recurrent", RecurrentSpec), ("loop", LoopSpec)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                refuse(name, f"a {kind.__name__} or None", value)
        if self.attention is None and self.recurrent is None:
            refuse("attention", "given where recurrent is None", None, "a model without state needs no cache")
        if self.attention is not None:
            at_most("attention.layers", self.attention.layers, self.layers, "layers")
        if self.recurrent is not None:
            at_most("recurrent.layers", self.recurrent.layers, self.layers, "layers")
        if self.loop is not None:
            self._check_loop(self.loop)

    def _check_loop(self, loop: LoopSpec) -> None:
        if self.recurrent is not None:
            raise UnsupportedError("recurrent must be None for a looped model, got a RecurrentSpec")
        if loop.layers != self.layers:
            refuse("layers", f"prelude + core + coda of the loop ({loop.layers})", self.layers)
        if self.attention is not None and self.attention.layers != self.layers:
            hint = "planes are counted by the loop"
            refuse("attention.layers", f"layers of the loop ({self.layers})", self.attention.layers, hint)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one attention layer and token; 0 without attention."""
        return 0 if self.attention is None else self.attention.elements_per_token * DTYPE_BYTES[self.kv_dtype]

    @property
    def ssm_bytes(self) -> int:
        """Recurrent state of one layer and sequence, as retained."""
        return 0 if self.recurrent is None else self.recurrent.state_elements * DTYPE_BYTES[self.state_dtype]

    @property
    def live_ssm_bytes(self) -> int:
        """Recurrent state of one layer and sequence, as the running model holds it."""
        return 0 if self.recurrent is None else self.recurrent.state_elements * DTYPE_BYTES[self._live_dtype]

    @property
    def conv_bytes(self) -> int:
        """Convolution state of one layer and sequence."""
        if self.recurrent is None:
            return 0
        return self.recurrent.conv_elements(full_width=self.conv_full_width) * DTYPE_BYTES[self.conv_dtype]

    @property
    def composite_bytes(self) -> int:
        """Retained recurrent and convolution state of one layer: a checkpoint without its attention."""
        return self.ssm_bytes + self.conv_bytes

    @property
    def state_rows(self) -> int:
        """Rows at which a state may be cut into member pages: heads, d_inner for mamba1; 0 without state."""
        return 0 if self.recurrent is None else self.recurrent.rows

    @property
    def state_row_bytes(self) -> int:
        """One row of the retained state; 0 without state."""
        return self.ssm_bytes // self.state_rows if self.state_rows else 0

    @property
    def live_state_row_bytes(self) -> int:
        """One row of the live state; 0 without state."""
        return self.live_ssm_bytes // self.state_rows if self.state_rows else 0

    @property
    def attention_layers(self) -> int:
        """Layers that hold KV; of a looped model every plane of every layer."""
        if self.attention is None:
            return 0
        return self.attention.layers if self.loop is None else self.loop.attention_layers

    @property
    def recurrent_layers(self) -> int:
        """Layers that hold recurrent or convolution state."""
        return 0 if self.recurrent is None else self.recurrent.layers

    @property
    def layers_per_group(self) -> int:
        """Layers that share page ids: as many as divide both counts, or the three parts of a loop."""
        if self.loop is not None:
            return gcd(self.loop.prelude, self.loop.core, self.loop.coda)
        return gcd(self.attention_layers, self.recurrent_layers)

    @property
    def attention_groups(self) -> int:
        """Layer groups that hold KV."""
        return self.attention_layers // self.layers_per_group

    @property
    def recurrent_groups(self) -> int:
        """Layer groups that hold recurrent or convolution state."""
        return self.recurrent_layers // self.layers_per_group

    @property
    def uniform_unit(self) -> UniformUnit | None:
        """Smallest multiple of 16 tokens whose KV reaches `composite_bytes`; None where either is missing."""
        if self.attention is None or self.recurrent is None:
            return None
        tokens = -(-self.composite_bytes // (UNIFORM_TOKENS * self.kv_bytes_per_token)) * UNIFORM_TOKENS
        return UniformUnit(tokens, tokens * self.kv_bytes_per_token)

    @property
    def kv_bytes_per_sequence_token(self) -> int:
        """KV of one token in all layers and planes."""
        return self.kv_bytes_per_token * self.attention_layers

    @property
    def recurrent_bytes_per_sequence(self) -> int:
        """Retained recurrent and convolution state of one sequence in all layers."""
        return self.composite_bytes * self.recurrent_layers

    @property
    def facts(self) -> dict[str, Any]:
        """What decides bits: shapes, dtypes, chunk, loop, ranks; not the name. As JSON gives it back."""
        facts = asdict(self)
        del facts["name"]
        facts["live_state_dtype"] = self._live_dtype
        return json.loads(json.dumps(facts))

    @property
    def fingerprint(self) -> str:
        """Identity of the numbers (I9): sha256 over `facts`."""
        canonical = json.dumps(["hybridkv.geometry/1", self.facts], sort_keys=True, separators=(",", ":"))
        return sha256(canonical.encode()).hexdigest()

    @property
    def _live_dtype(self) -> str:
        return self.live_state_dtype or self.state_dtype

    def shard(self, tp: int) -> ModelGeometry:
        """Return what one of `tp` ranks holds. Layers and groups stay: page ids are equal on every rank."""
        size("tp", tp)
        if tp == 1:
            return self
        if self.tp_rank_count != 1:
            refuse("tp_rank_count", "1 to be sharded", self.tp_rank_count, "shard the whole model instead")
        return replace(
            self,
            attention=None if self.attention is None else self.attention.shard(tp),
            recurrent=None if self.recurrent is None else self.recurrent.shard(tp),
            tp_rank_count=tp,
        )

    def replace(self, **changes: Any) -> ModelGeometry:
        """Return a copy with other fields, checked. `max_loops` and `loop_layout` reach into the loop."""
        for name, field in (("max_loops", "max_loops"), ("loop_layout", "layout")):
            if name in changes:
                value = changes.pop(name)
                loop: LoopSpec | None = changes.get("loop", self.loop)
                if loop is None:
                    refuse(name, "left out for a model without loop", value)
                changes["loop"] = replace(loop, **{field: value})
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise UsageError(
                    f"field must be one of {', '.join(known)}, max_loops, loop_layout, got {name!r}"
                )
        return replace(self, **changes)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ModelGeometry:
        """Return a published model by its lower-case name, with `overrides` as in `replace`."""
        from hybridkv.geometry.presets import preset

        return preset(name).replace(**overrides)

    @classmethod
    def preset_names(cls) -> tuple[str, ...]:
        """List every name that `preset` knows, sorted."""
        from hybridkv.geometry.presets import PRESETS

        return tuple(sorted(PRESETS))

    @classmethod
    def from_hf(
        cls, path_or_mapping: str | PathLike[str] | Mapping[str, object], **overrides: Any
    ) -> ModelGeometry:
        """Read a Hugging Face `config.json`: its path, its directory, or the mapping itself.

        `overrides` as in `replace`. The dtype of the weights is not read: KV and convolution state are bf16
        unless overridden. Where the file declares an fp32 state, the live one is fp32, the retained one bf16.
        """
        from hybridkv.geometry.from_config import from_config

        return from_config(path_or_mapping, overrides)
