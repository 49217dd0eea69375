"""HK-H2: the order of dicts, sets and object ids plays no part. Two processes with different hash seeds agree."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

from hybridkv.testing import Scope, World
from hybridkv.testing._explore import choices
from hybridkv.testing.cache_adapter import SHAPES, make_cache

ROOT = Path(__file__).parent.parent


def digest(seed: int) -> str:
    """A random walk through every organization, as plans and states."""
    found = hashlib.sha256()
    scope = Scope(max_live=3, max_tokens=8, max_flights=3)
    for specs in SHAPES.values():
        for spec in specs:
            rng, world = random.Random(seed), World(make_cache, spec)
            for _ in range(40):
                world.do(rng.choice(list(choices(world, scope))))
                world.check()
                steps = [live.steps for live in world.live]
                found.update(repr((world.trace[-1], steps, world.sut.owned().free)).encode())
    return found.hexdigest()


def test_two_hash_seeds_agree() -> None:
    command = [sys.executable, "-c", "from tests.test_kit_determinism import digest; print(digest(5))"]
    answers = []
    for seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        answers.append(done.stdout)
    assert answers[0] == answers[1]
    assert answers[0].strip() == digest(5)
    assert digest(6) != digest(5)
