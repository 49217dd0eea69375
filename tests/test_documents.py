"""What the documents show runs as written, and so do the examples."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("name", ["README.md", "docs/arena.md"])
def test_the_first_program_of_a_document_runs(name):
    code = BLOCK.search((ROOT / name).read_text())
    assert code is not None
    exec(compile(code[1], name, "exec"), {})  # our own document


def test_the_hybrid_example_finds_no_differing_bit(capsys):
    runpy.run_path(str(ROOT / "examples" / "hybrid.py"), run_name="__main__")
    out = capsys.readouterr().out
    rows = re.findall(r"^  (s0|s1|s2|d0|striped|nested) .* (\d+)$", out, re.MULTILINE)
    assert [name for name, _ in rows] == 2 * ["s0", "s1", "s2", "d0", "striped", "nested"]
    assert {wrong for _, wrong in rows} == {"0"}
    assert out.count("64 of 64 tokens found, 0 positions differ") == 4
