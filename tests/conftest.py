"""What every test may rely on: Hypothesis profiles, the goldens, and the traces where they are at hand."""

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # a kernel's decorator looks at it
os.environ.setdefault("OMP_NUM_THREADS", "1")  # operands are tiny, and workers run beside each other
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from hybridkv.testing import interpreter

HERE = Path(__file__).parent

interpreter.install()

settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", deadline=None, max_examples=500, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def load_golden(name: str) -> Any:
    return json.loads((HERE / "goldens" / f"{name}.json").read_text())


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of public request traces. They are not part of the repository: see docs/traces.md."""
    where = Path(os.environ.get("HYBRIDKV_TRACES", HERE.parent.parent / "shared" / "data"))
    if not where.is_dir():
        pytest.skip(
            f"no traces: set HYBRIDKV_TRACES to the folder that docs/traces.md describes, got {where}"
        )
    return where
