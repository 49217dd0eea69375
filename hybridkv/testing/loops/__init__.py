"""Toy looped models, their KV in the pages of a `HybridCache`, and an engine that runs both through a depth planner. Needs torch."""

from hybridkv.testing.loops.engine import LoopedEngine
from hybridkv.testing.loops.models import HUGINN, OURO, LoopedToy, huginn_toy, ouro_toy
from hybridkv.testing.loops.pager import FillMode, LoopedPager

__all__ = ["HUGINN", "OURO", "FillMode", "LoopedEngine", "LoopedPager", "LoopedToy", "huginn_toy", "ouro_toy"]
