"""Continuous depth batching: a pure, replayable step planner for looped language models."""

from hybridkv.schedule.depth.batch import Counts, Entry, EventRow, Queues, Row, Stage, StageBatch
from hybridkv.schedule.depth.cases import config_of, play_case, run_case
from hybridkv.schedule.depth.config import (
    Admission,
    DepthConfig,
    DepthRequest,
    IdleOrder,
    KVPool,
    Mode,
    Planes,
    Preemption,
)
from hybridkv.schedule.depth.planner import DepthPlanner

__all__ = [
    "Admission",
    "Counts",
    "DepthConfig",
    "DepthPlanner",
    "DepthRequest",
    "Entry",
    "EventRow",
    "IdleOrder",
    "KVPool",
    "Mode",
    "Planes",
    "Preemption",
    "Queues",
    "Row",
    "Stage",
    "StageBatch",
    "config_of",
    "play_case",
    "run_case",
]
