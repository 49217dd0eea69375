"""KV caches for models that mix attention with recurrent state, and for looped models.

Public names, flat and sorted. Importing this package needs numpy only.
"""

from hybridkv.alloc.cache import CachePolicy, HybridCache
from hybridkv.alloc.organization import Organization
from hybridkv.errors import CorruptionError, HybridKVError, OutOfMemory, UnsupportedError, UsageError
from hybridkv.geometry import ModelGeometry

__all__ = [
    "CachePolicy",
    "CorruptionError",
    "HybridCache",
    "HybridKVError",
    "ModelGeometry",
    "Organization",
    "OutOfMemory",
    "UnsupportedError",
    "UsageError",
]
