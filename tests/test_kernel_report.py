"""The kernel report: what it reads is true, the budgets hold, and each check can fail. Compiles; needs no GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridkv.cli import kernels as command
from hybridkv.errors import UnsupportedError
from hybridkv.testing import aot

ROOT = Path(__file__).parent.parent
FIELDS = "kernel geometry target registers spills shared_bytes wide_access_share bytes_per_token floor_bytes hazard"


def compile_apart(*arguments):
    """Run Python where TRITON_INTERPRET is not set: the kernels' decorator looks at it."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=clean, capture_output=True, text=True, check=False
    )


def report(path, *arguments):
    done = compile_apart("-m", "hybridkv", "kernels", "--json", str(path), *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return [aot.Row(**row) for row in json.loads(path.read_text())], done


@pytest.fixture(scope="session")
def probe():
    done = compile_apart("tests/kernel_probe.py")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)
    assembler = tuple(rows.pop("assembler"))
    return assembler, {name: aot.Row(**row) for name, row in rows.items()}


def test_the_hopper_hazard_is_found_where_it_is(probe):
    assembler, rows = probe
    assert rows["wgmma"].hazard == ("safe" if assembler >= (13, 3) else "present")
    assert rows["one stage"].hazard == rows["mma.sync"].hazard == "none"
    assert rows["wgmma"].reductions.startswith("wgmma")
    assert rows["mma.sync"].reductions.startswith("mma2")


def test_spills_and_narrow_accesses_are_found(probe):
    _, rows = probe
    assert rows["hoard"].spills > 100
    assert rows["sum with 4 warps"].spills == 0
    assert rows["sum with 4 warps"].wide_access_share > 0.8
    assert rows["unaligned"].wide_access_share == 0  # the promise of divisibility is what makes accesses wide


def test_narrow_accesses_of_data_are_told_from_indices_and_scalars(probe):
    _, rows = probe
    fine, unaligned = rows["sum with 4 warps"], rows["unaligned"]
    # 4 rows of 256 fp32 are 32 bytes for each of 128 lanes; the 4 sums are 16 bytes in all, whatever their width
    assert (fine.hot_accesses, fine.narrow_hot) == (1, 0)
    assert fine.narrow_share == pytest.approx(16 / (4096 + 16), abs=1e-4)
    assert re.fullmatch(r"kernel_probe.py:\d+ 32 bits, 16 B, 0.125 a lane", fine.narrow)
    assert (unaligned.hot_accesses, unaligned.narrow_hot, unaligned.narrow_share) == (1, 1, 1.0)
    for target in ("sm_90", "gfx942"):
        # rows of tokens by a table: the table is no data, and the stores are 16 bits
        mixed = rows[f"mixed on {target}"]
        assert (mixed.hot_accesses, mixed.narrow_hot) == (2, 1), mixed
        assert "16 bits, 8192 B" in mixed.narrow
        assert "in kernel_probe.py" in mixed.narrow  # inlined: named with its caller


def test_the_reduction_class_follows_the_summed_axis_alone(probe):
    _, rows = probe
    assert rows["sum in other rows"].reductions == rows["sum with 4 warps"].reductions
    assert rows["unaligned"].reductions != rows["sum with 4 warps"].reductions


def test_the_command_prints_and_writes_rows(tmp_path):
    rows, done = report(tmp_path / "rows.json", "--targets", "sm_90", "--only", "[512] falcon")
    table, _, totals = done.stdout.partition("By target")
    _, _, header, _, *lines = table.rstrip().splitlines()
    assert header.split()[:10] == FIELDS.split()
    assert len(lines) == len(rows) >= 3
    assert f"[1/{len(rows)}]" in done.stderr
    decode = next(r for r in rows if r.kernel == "decode_segment[512]")
    prefill = next(r for r in rows if r.kernel == "prefill_attention[512]")
    assert decode.reductions == prefill.reductions  # one summation order: equal bits by construction
    assert decode.wide_access_share > 0.95
    assert decode.hot_accesses == 4  # query, keys, values, partial result
    _, heads, _, total = totals.splitlines()
    assert heads.split() == list(aot.summary(rows)[0])
    assert total.split()[:4] == ["sm_90", str(len(rows)), "0", "0"]
    assert decode.floor_bytes == 2048 * 1024 + 12 * 128 * 2  # 1 KiB a token, and the query
    assert all(r.spills == r.narrow_hot == 0 and r.hazard == "none" for r in rows)


@pytest.mark.nightly
@pytest.mark.parametrize("target", command.DEFAULT_TARGETS.split(","))
def test_every_kernel_keeps_its_budget(target, tmp_path):
    rows, done = report(tmp_path / "rows.json", "--targets", target)
    print(done.stdout)
    (total,) = aot.summary(rows)
    assert total["spills"] == total["hazards"] == total["narrow_hot"] == 0
    assert total["max_shared"] <= total["shared_limit"]
    assert all(r.hot_accesses for r in rows)  # every kernel moves something by 16 bytes a lane
    classes = {}
    for r in rows:
        if r.kernel.startswith(("decode_segment", "prefill_attention")):
            classes.setdefault((r.geometry, "fp32" in r.kernel), set()).add(r.reductions)
    assert {len(c) for c in classes.values()} == {1}, classes  # decode, prefill, blocks of 16 and of 512


ROW = aot.Row("k", "m", "gfx942", 100, 0, 1024, 0.97, 10.0, 10.0, "none", "")
BUDGET = {
    "k m gfx942": {"registers": 100, "shared_bytes": 1024, "wide_access_share": 0.97, "narrow_share": 0.01}
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"registers": 101}, "k m gfx942: registers must be at most 100, got 101"),
        ({"spills": 1}, "spills must be at most 0, got 1"),
        ({"shared_bytes": 2048}, "shared_bytes must be at most 1024, got 2048"),
        ({"wide_access_share": 0.96}, "wide_access_share must be at least 0.97, got 0.96"),
        ({"narrow_share": 0.02}, "narrow_share must be at most 0.01, got 0.02"),
        ({"narrow_hot": 1, "narrow": "k.py:7 64 bits"}, "narrow_hot must be 0, got 1: k.py:7 64 bits"),
        ({"hazard": "present"}, "hazard must be none, got present"),
        ({"kernel": "new"}, "new m gfx942: no budget"),
    ],
)
def test_budgets_speak(change, message):
    assert aot.violations([ROW], BUDGET) == []
    assert message in "\n".join(aot.violations([ROW._replace(**change)], BUDGET))


def test_a_kernel_without_a_budget_must_still_fit_the_target():
    found = aot.violations([ROW._replace(shared_bytes=65 << 10)], {})
    assert "k m gfx942: shared_bytes must be at most 65536, got 66560" in found


def test_widened_budgets_keep_all_rows_and_never_shrink():
    worse = ROW._replace(registers=120, wide_access_share=0.9, narrow_share=0.1)
    budgets = aot.widened(BUDGET, [worse])
    assert aot.violations([ROW, worse], budgets) == []
    assert aot.widened(budgets, [ROW]) == budgets


def test_every_checked_in_budget_names_a_declared_kernel():
    budgets = json.loads(command.BUDGETS.read_text())
    declared = {
        f"{c.name} {c.geometry} {t}" for t in command.DEFAULT_TARGETS.split(",") for c in aot.cases(t)
    }
    assert set(budgets) == declared


def test_summaries_add_up():
    other = ROW._replace(target="sm_90", spills=2, hazard="present", hot_accesses=3, narrow_hot=1)
    amd, nvidia = aot.summary([ROW, other, ROW._replace(shared_bytes=4096), other])
    assert (amd["target"], amd["rows"], amd["max_shared"], amd["shared_limit"]) == ("gfx942", 2, 4096, 65536)
    assert [nvidia[n] for n in ("spills", "hazards", "hot_accesses", "narrow_hot")] == [4, 2, 6, 2]


def test_paging_costs_nothing_in_the_machine_code():
    """The paged state update has the memory instructions of the same kernel on dense slots, and no more registers as
    the hardware hands them out, 8 at a time (one pair of 16 differs by one within that, on Triton 3.9.0).
    """
    done = compile_apart("-m", "tests.contiguous_probe", *command.DEFAULT_TARGETS.split(","))
    assert done.returncode == 0, done.stderr[-3000:]
    pairs = json.loads(done.stdout)
    assert len(pairs) == 16
    for name, (paged, dense) in pairs.items():
        assert paged["widths"] == dense["widths"], name
        assert paged["spills"] == dense["spills"] == 0, name
        assert paged["registers"] <= -(-dense["registers"] // 8) * 8, (name, paged, dense)


def test_signatures_are_counted():
    """Batches of 1, 2, 16 and 17, odd and even strides of tables, aligned and unaligned metadata: one signature each.

    So it is for the recurrent ops and the convolution where rows of data are an odd multiple of 8 elements apart, as in
    Falcon-H1-7B's fused projection. For the KV write, attention and the moves these make a second one.
    """
    done = compile_apart("tests/signature_probe.py")
    assert done.returncode == 0, done.stderr[-3000:]
    metadata, data = json.loads(done.stdout)
    declared = {c.kernel.__name__.strip("_").removesuffix("_kernel") for c in aot.cases("sm_90")}
    assert metadata == dict.fromkeys(declared, 1)
    twice = {
        "write_kv", "decode_segment", "decode_merge", "prefill_attention", "gather_units", "scatter_units",
    }  # fmt: skip
    assert data == {n: 2 if n in twice else 1 for n in declared}


def test_refusals():
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET must be unset"):
        aot.compile_case(next(iter(aot.cases("sm_90"))), "sm_90")
    done = compile_apart("-m", "hybridkv", "kernels", "--targets", "sm_12")
    assert done.returncode == 2
    assert "targets must be among sm_80" in done.stderr
