"""What one token and one checkpoint of a model cost: sizes, groups, tensor-parallel shards, identity.

Owns every size that the rest of the library divides memory by. Knows neither pages nor requests nor tensors.
"""

from hybridkv.geometry.model import ModelGeometry
from hybridkv.geometry.specs import (
    DTYPE_BYTES,
    AttentionSpec,
    LoopLayout,
    LoopSpec,
    RecurrentKind,
    RecurrentSpec,
)

__all__ = [
    "DTYPE_BYTES",
    "AttentionSpec",
    "LoopLayout",
    "LoopSpec",
    "ModelGeometry",
    "RecurrentKind",
    "RecurrentSpec",
]
