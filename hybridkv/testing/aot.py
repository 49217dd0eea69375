"""What the compiler makes of the kernels, for GPUs that are not there.

Compiles the cases that the modules of `hybridkv.triton` declare, and reads registers, spills, shared memory and the
widths of global accesses from machine code. Every tool comes in the Triton wheel. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import hybridkv.triton as kernels
from hybridkv.errors import UnsupportedError
from hybridkv.testing.accesses import accesses, narrow_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hybridkv.triton.common import CompileCase

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
SHARED_LIMIT = {
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_HAZARD_FIXED_IN = (13, 3)  # ptxas; triton #9433


class Row(NamedTuple):
    """One kernel, compiled for one model and one target.

    `wide_access_share` is the share of global bytes, by instruction, that 128-bit accesses move, table entries and
    scalars included. Of data alone: `hot_accesses` is how many loads and stores of the source have 16 bytes for every
    lane, `narrow_hot` how many of those take narrower instructions; `narrow_share` is the share of all data, by bytes
    of the tiles, that narrower instructions move, and `narrow` lists them. `reductions` names the order of every sum:
    equal text, equal bits.
    """

    kernel: str
    geometry: str
    target: str
    registers: int
    spills: int
    shared_bytes: int
    wide_access_share: float
    bytes_per_token: float
    floor_bytes: float
    hazard: str
    reductions: str
    hot_accesses: int = 0
    narrow_hot: int = 0
    narrow_share: float = 0.0
    narrow: str = ""

    @property
    def key(self) -> str:
        """Name the row in a table of budgets."""
        return f"{self.kernel} {self.geometry} {self.target}"


def cases(target: str) -> Iterator[CompileCase]:
    """Collect the compile cases of every kernel module."""
    for module in sorted(m.name for m in pkgutil.iter_modules(kernels.__path__)):
        declared = getattr(importlib.import_module(f"hybridkv.triton.{module}"), "compile_cases", None)
        if declared is not None:
            yield from declared(target)


def compile_case(case: CompileCase, target: str) -> Any:
    """Compile one case; arguments whose type ends in ":16" are promised to be divisible by 16."""
    if not isinstance(case.kernel, triton.JITFunction):
        raise UnsupportedError("TRITON_INTERPRET must be unset before kernels are compiled, got 1")
    names = case.kernel.arg_names
    types = {n: "constexpr" if n in case.constexprs else case.signature[n] for n in names}
    source = ASTSource(
        fn=case.kernel,
        signature={n: kind.removesuffix(":16") for n, kind in types.items()},
        constexprs={(names.index(n),): value for n, value in case.constexprs.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n].endswith(":16")},
    )
    return triton.compile(source, target=TARGETS[target], options=case.options)


def measure(case: CompileCase, target: str) -> Row:
    """Compile a case and read its row."""
    compiled = compile_case(case, target)
    read = _read_nvidia if target.startswith("sm") else _read_amd
    registers, spills, widths = read(compiled)
    total = sum(width * n for width, n in widths.items())
    wide = sum(width * n for width, n in widths.items() if width >= 16)
    ttgir, data = compiled.asm["ttgir"], accesses(compiled)
    return Row(
        kernel=case.name,
        geometry=case.geometry,
        target=target,
        registers=registers,
        spills=spills,
        shared_bytes=compiled.metadata.shared,
        wide_access_share=round(wide / total, 4) if total else 1.0,
        bytes_per_token=case.bytes_per_token,
        floor_bytes=case.floor_bytes,
        hazard=hazard(ttgir) if target == "sm_90" else "none",
        reductions=reductions(ttgir),
        hot_accesses=sum(a.hot for a in data),
        narrow_hot=sum(a.hot and a.narrow for a in data),
        narrow_share=round(narrow_share(data), 4),
        narrow="; ".join(str(a) for a in data if a.narrow),
    )


def _tool(name: str, *arguments: str, **binary: bytes) -> str:
    """Run a bundled tool on one file, given as suffix=content."""
    ((suffix, content),) = binary.items()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"kernel.{suffix}"
        path.write_bytes(content)
        done = subprocess.run(  # noqa: S603
            [str(_TOOLS / name), *arguments, str(path)], capture_output=True, text=True, check=False
        )
    return done.stdout + done.stderr


def _read_nvidia(compiled: Any) -> tuple[int, int, dict[int, int]]:
    cubin = compiled.asm["cubin"]
    used = re.search(r"REG:(\d+)", _tool("cuobjdump", "-res-usage", cubin=cubin))
    if used is None:
        raise UnsupportedError(f"cuobjdump must know this target, got {compiled.metadata.target}")
    sass = _tool("nvdisasm", "-c", cubin=cubin)
    ops = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass)
    widths: dict[int, int] = {}
    for op in ops:
        if re.match(r"(LDG|STG|LDGSTS)\b", op):
            bits = re.search(r"\.(?:U|S)?(8|16|64|128|256)\b", op)
            width = int(bits[1]) // 8 if bits else 4
            widths[width] = widths.get(width, 0) + 1
    return int(used[1]), sum(op.startswith(("LDL", "STL")) for op in ops), widths


_AMD_BYTES = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4}


def _read_amd(compiled: Any) -> tuple[int, int, dict[int, int]]:
    code = compiled.asm["amdgcn"]
    widths: dict[int, int] = {}
    for kind, count in re.findall(
        r"(?:global|buffer)_(?:load|store)_([a-z]+?)(?:_d16\w*)?(?:x(\d))?\s", code
    ):
        width = _AMD_BYTES.get(kind, 4) * int(count or 1)
        widths[width] = widths.get(width, 0) + 1
    found = {k: re.search(rf"\.{k}:\s+(\d+)", code) for k in ("vgpr_count", "vgpr_spill_count")}
    registers, spills = (int(m[1]) if m else 0 for m in found.values())
    return registers, spills, widths


@functools.cache
def ptxas_for_sm90() -> tuple[int, int]:
    """Version of the assembler that this Triton uses for sm_90: the newer of its two from 3.9 on."""
    newer = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
    found = re.search(
        r"release (\d+)\.(\d+)", _tool("ptxas-blackwell" if newer else "ptxas", "--version", txt=b"")
    )
    return (int(found[1]), int(found[2])) if found else (0, 0)


def hazard(ttgir: str, assembler: tuple[int, int] | None = None) -> str:
    """Look for a pipelined wgmma with its left operand in registers, which ptxas before 13.3 miscompiles.

    Returns "none", "safe" (there, but this assembler is sound) or "present".
    """
    pending = any(int(n) > 0 for n in re.findall(r"warp_group_dot_wait[^\n]*pendings = (\d+)", ttgir))
    dots = [
        d
        for d in ttgir.splitlines()
        if "ttng.warp_group_dot " in d and re.search(r":\s*tensor<[^>]*dot_op", d)
    ]
    if not pending or not any("isAsync = true" in d for d in dots):
        return "none"
    return "safe" if (assembler or ptxas_for_sm90()) >= _HAZARD_FIXED_IN else "present"


def reductions(ttgir: str) -> str:
    """Describe every reduction (values a thread, threads and warps on its axis) and matrix product (instruction, K)."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<[^\n]+>)$", ttgir, re.MULTILINE))
    out = set()
    pattern = r'"tt\.(reduce|scan)"[^\n]*?axis = (\d+)[\s\S]*?\}\)[^:]*: \(tensor<([\dx]+)x\w+, (#\w+|#ttg[^\n]*?>)>'
    for op, axis, shape, layout in re.findall(pattern, ttgir):
        out.add(
            f"{op} {shape.split('x')[int(axis)]}: {_on_axis(layouts.get(layout, layout), int(axis), layouts)}"
        )
    dot = r"(tt\.dot|ttng\.warp_group_dot) [^\n]*: (?:tensor|!ttg\.memdesc)<\d+x(\d+)x[^\n]*-> tensor<[\dx]+x\w+, (#\w+)>"
    for op, k, layout in re.findall(dot, ttgir):
        text = layouts.get(layout, layout)
        version = re.search(r"version(?:Major)? = (\d+)", text)
        shape = re.search(r"instrShape = \[([\d, ]+)\]", text)
        family = "wgmma" if op.startswith("ttng") else f"mma{version[1]}" if version else "fma"
        out.add(f"{family} {shape[1].replace(', ', 'x') if shape else ''} k={k}")
    if "ttng.tc_gen5_mma" in ttgir:
        out.add("tcgen05")
    return "; ".join(sorted(out))


def _on_axis(layout: str, axis: int, layouts: dict[str, str]) -> str:
    parent = re.search(r"parent = (#\w+)", layout)
    if parent:
        layout = layouts.get(parent[1], layout)
    parts = []
    for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA"):
        found = re.search(name + r" = \[([\d, ]+)\]", layout)
        parts.append(found[1].split(", ")[axis] if found and axis < len(found[1].split(", ")) else "-")
    return "x".join(parts)


def violations(rows: Iterable[Row], budgets: dict[str, dict[str, Any]]) -> list[str]:
    """Compare rows with their budgets; a row without one is a violation too. No budget allows a narrow hot access."""
    out = []
    for row in rows:
        budget = budgets.get(row.key)
        limits = {"spills": 0, "shared_bytes": SHARED_LIMIT[row.target]} | (budget or {})
        if budget is None:
            out.append(f"{row.key}: no budget")
        out += [
            f"{row.key}: {name} must be at most {limits[name]}, got {getattr(row, name)}"
            for name in ("registers", "spills", "shared_bytes", "narrow_share")
            if name in limits and getattr(row, name) > limits[name]
        ]
        if row.wide_access_share < limits.get("wide_access_share", 0):
            out.append(
                f"{row.key}: wide_access_share must be at least {limits['wide_access_share']}, got {row.wide_access_share}"
            )
        if row.narrow_hot:
            out.append(f"{row.key}: narrow_hot must be 0, got {row.narrow_hot}: {row.narrow}")
        if row.hazard == "present":
            out.append(f"{row.key}: hazard must be none, got {row.hazard}")
    return out


def summary(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Add up the rows of every target."""
    by_target: dict[str, list[Row]] = {}
    for row in rows:
        by_target.setdefault(row.target, []).append(row)
    return [
        {
            "target": target,
            "rows": len(of),
            "spills": sum(r.spills for r in of),
            "hazards": sum(r.hazard == "present" for r in of),
            "max_registers": max(r.registers for r in of),
            "max_shared": max(r.shared_bytes for r in of),
            "shared_limit": SHARED_LIMIT[target],
            "hot_accesses": sum(r.hot_accesses for r in of),
            "narrow_hot": sum(r.narrow_hot for r in of),
        }
        for target, of in by_target.items()
    ]


def widened(budgets: dict[str, dict[str, Any]], rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Return budgets that these rows keep as well; run it under every Triton version that is supported."""
    out = dict(budgets)
    for row in rows:
        old = out.get(row.key, {})
        out[row.key] = {
            "registers": max(row.registers, old.get("registers", 0)),
            "shared_bytes": max(row.shared_bytes, old.get("shared_bytes", 0)),
            "wide_access_share": min(row.wide_access_share, old.get("wide_access_share", 1.0)),
            "narrow_share": max(row.narrow_share, old.get("narrow_share", 0.0)),
        }
    return dict(sorted(out.items()))
