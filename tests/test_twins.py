"""Every kernel has a reference of the same name and signature, and neither side knows the other."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hybridkv.reference
import hybridkv.triton
from hybridkv import ops

ROOT = Path(__file__).parent.parent
MODULES = [m.name for m in pkgutil.iter_modules(hybridkv.triton.__path__)]


def public(side, module):
    """Functions that a module defines itself, by name."""
    loaded = importlib.import_module(f"hybridkv.{side}.{module}")
    functions = inspect.getmembers(loaded, inspect.isfunction)
    return {n: f for n, f in functions if f.__module__ == loaded.__name__ and not n.startswith("_")}


@pytest.mark.parametrize("name", sorted(set(ops.__all__) - {"KVLayout", "decode_workspace"}))
def test_every_op_has_twins_of_one_signature(name):
    found = [(m, public("triton", m)[name]) for m in MODULES if name in public("triton", m)]
    assert len(found) == 1
    module, kernel = found[0]
    reference = public("reference", module)[name]
    assert list(inspect.signature(kernel).parameters) == list(inspect.signature(reference).parameters)


@pytest.mark.parametrize("side", ["reference", "triton"])
def test_neither_side_imports_the_other_or_the_ops(side):
    other = {"reference": "triton", "triton": "reference"}[side]
    for path in (ROOT / "hybridkv" / side).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for banned in (f"hybridkv.{other}", "hybridkv.ops"):
                assert not any(n.startswith(banned) for n in names), f"{path.name} imports {names}"
            assert side == "triton" or "triton" not in names, path.name


def test_references_run_where_triton_is_not_installed():
    code = """
import sys
sys.modules["triton"] = None
import torch
from hybridkv import ops
pool = torch.arange(64.0)
ops.copy_units(pool, torch.tensor([0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), granule=16, unit=16)
assert torch.equal(pool[16:32], pool[:16])
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
