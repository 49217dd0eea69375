"""Toy looped models, a pager for their KV, and an engine that runs both through a depth planner. Needs torch."""

from hybridkv.testing.loops.engine import LoopedEngine
from hybridkv.testing.loops.models import HUGINN, OURO, LoopedToy, huginn_toy, ouro_toy
from hybridkv.testing.loops.pager import LoopedPager

__all__ = ["HUGINN", "OURO", "LoopedEngine", "LoopedPager", "LoopedToy", "huginn_toy", "ouro_toy"]
