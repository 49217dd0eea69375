"""The conformance kit: the test suite as a specification that any engine can run on its own allocator.

Needs numpy only; hypothesis and pytest are imported where they are used (`strategies`, `suite`).
"""

from hybridkv.testing._adapter import AllocatorAdapter, Capabilities
from hybridkv.testing._explore import SMALL, Report, Scope, Shape, explore
from hybridkv.testing._rules import RULES, ConformanceError
from hybridkv.testing._world import World

__all__ = [
    "RULES",
    "SMALL",
    "AllocatorAdapter",
    "Capabilities",
    "ConformanceError",
    "Report",
    "Scope",
    "Shape",
    "World",
    "explore",
]
