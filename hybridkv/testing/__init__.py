"""The conformance kit: the test suite as a specification that any engine can run on its own allocator.

Needs numpy only; hypothesis and pytest are imported where they are used (`strategies`, `suite`).
"""

from hybridkv.testing._adapter import AllocatorAdapter, Capabilities
from hybridkv.testing._explore import SMALL, Report, Scope, Shape, explore
from hybridkv.testing._rules import RULES, ConformanceError
from hybridkv.testing._world import World
from hybridkv.testing.geometries import tiny_geometry, tiny_organization
from hybridkv.testing.suite import AllocatorConformance, check_allocator

__all__ = [
    "RULES",
    "SMALL",
    "AllocatorAdapter",
    "AllocatorConformance",
    "Capabilities",
    "ConformanceError",
    "Report",
    "Scope",
    "Shape",
    "World",
    "check_allocator",
    "explore",
    "tiny_geometry",
    "tiny_organization",
]
