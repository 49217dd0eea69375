"""The data plane's storage: tensors behind the pools, mapping tables of a step, dumps, and copies to the host."""

from hybridkv.arena.arena import Arena
from hybridkv.arena.layout import ArenaLayout
from hybridkv.arena.tables import StepTables, Tables

__all__ = ["Arena", "ArenaLayout", "StepTables", "Tables"]
