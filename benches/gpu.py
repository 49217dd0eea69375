"""Exactness and speed of the kernels on a GPU, in one command and well under ten minutes.

    python -m benches.gpu [--json rows.jsonl] [--seconds 480]

Prints whether each history of `hybridkv.testing.exact` gave equal bits; then, per kernel at Falcon-H1-7B's shapes,
microseconds in a CUDA graph and launched from Python, bytes, and the share of the copy bandwidth that was measured in the
same run; then what the device's own compiler made of every kernel. What fails is a row too, and does not end the run.
Exits with 0 where there is no GPU, with 1 where bits differ or something failed. Asserts no speed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hybridkv import ops
from hybridkv.testing import exact
from hybridkv.testing.exact import BF16, indices
from hybridkv.units import ssd_window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SETS = 4  # rotating sets of buffers, together larger than the L2 cache except where a row says so
ROUNDS = (
    16  # over the sets in one graph: the shortest kernels take about a microsecond, starting a graph several
)
REPLAYS = 20
PAGE = 262_144  # bf16 elements of 512 KiB
PAGES = 128
HEADS, ROWS, COLUMNS = 24, 128, 256
STATE = HEADS * ROWS * COLUMNS
BATCH, CONTEXT = 64, 2048


class Case(NamedTuple):
    """A kernel on several sets of buffers, and the bytes that one call moves."""

    name: str
    calls: list[Callable[[], object]]
    bytes: float


def normal(device: torch.device, *shape: int) -> torch.Tensor:
    """Draw on the device: the 800 million values of all cases take a CPU longer than the measurements."""
    return torch.randn(*shape, dtype=BF16, device=device)


def seconds_per_call(calls: list[Callable[[], object]]) -> float:
    """Time a CUDA graph that runs every set `ROUNDS` times; the launch overhead of Python is not in it."""
    for call in calls:
        call()  # compiles and loads, which a capture forbids
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / (ROUNDS * len(calls)))
    return sorted(times)[len(times) // 2]


def seconds_from_python(calls: list[Callable[[], object]]) -> float:
    """Time the same calls launched one by one; call it after `seconds_per_call`, which compiles."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        for call in calls:
            call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / (ROUNDS * len(calls))


def copy_bandwidth(device: torch.device) -> float:
    """Measure bytes read and written per second by a copy of 512 MiB."""
    sets = [torch.zeros(2, 1 << 29, dtype=torch.uint8, device=device) for _ in range(2)]
    return 2 * (1 << 29) / seconds_per_call([partial(s[0].copy_, s[1]) for s in sets])


def moves(device: torch.device) -> Iterator[Case]:
    """Pages and checkpoints."""
    pools = [torch.zeros(2 * PAGES * PAGE, dtype=BF16, device=device) for _ in range(SETS)]
    order = torch.randperm(2 * PAGES, generator=torch.Generator().manual_seed(0)).tolist()
    source, target = indices(order[:PAGES], device), indices(order[PAGES:], device)
    unit, moved = {"granule": PAGE, "unit": PAGE}, 2.0 * PAGES * PAGE
    yield Case("copy_units", [partial(ops.copy_units, p, source, target, **unit) for p in pools], 2 * moved)
    yield Case("zero_units", [partial(ops.zero_units, p, target, **unit) for p in pools], moved)
    table = source[: PAGES // 3 * 3].view(-1, 3)
    dense = [torch.zeros(len(table), STATE, dtype=BF16, device=device) for _ in range(SETS)]
    size, pairs = 4.0 * dense[0].numel(), list(zip(pools, dense, strict=True))
    yield Case("gather_units", [partial(ops.gather_units, p, table, d, **unit) for p, d in pairs], size)
    yield Case("scatter_units", [partial(ops.scatter_units, p, table, d, **unit) for p, d in pairs], size)


def attention(device: torch.device) -> Iterator[Case]:
    """Decode over scattered and over contiguous blocks, prefill, and the write."""
    rows = indices(range(BATCH), device)
    lengths = torch.full_like(rows, CONTEXT)
    query, chunk = normal(device, BATCH, 12, 128), normal(device, CONTEXT, 12, 128)
    new = normal(device, CONTEXT, 2, 128)
    out, chunk_out, start = torch.empty_like(query), torch.empty_like(chunk), indices([0, CONTEXT], device)
    positions = torch.arange(CONTEXT, dtype=torch.int32, device=device)
    zero = torch.zeros_like(positions)
    for tokens in (16, 512):
        layout = ops.KVLayout.token_major(2, 128, tokens, 8192)
        blocks, step = -(-CONTEXT // tokens), layout.extent // layout.granule
        order = torch.randperm(BATCH * blocks, generator=torch.Generator().manual_seed(0))
        scattered, contiguous = (
            (places.view(BATCH, blocks) * step).to(device, torch.int32)
            for places in (order, torch.arange(BATCH * blocks))
        )
        pools = [normal(device, BATCH * blocks * layout.extent) for _ in range(SETS)]
        workspace = torch.empty(ops.decode_workspace(BATCH, 12, scattered, layout), device=device)
        read = BATCH * (CONTEXT * 1024.0 + 2 * 12 * 128 * 2)
        for where, table in (("scattered", scattered), ("contiguous", contiguous)):
            decode = partial(ops.decode_attention, query=query, table=table, rows=rows, lengths=lengths, out=out,
                             workspace=workspace, layout=layout)  # fmt: skip
            yield Case(f"decode_attention[{tokens}, {where}]", [partial(decode, p) for p in pools], read)
        prefill = partial(ops.prefill_attention, query=chunk, query_start=start, table=scattered, rows=rows[:1],
                          lengths=lengths[:1], out=chunk_out, layout=layout, max_query=CONTEXT)  # fmt: skip
        yield Case(f"prefill_attention[{tokens}]", [partial(prefill, p) for p in pools], CONTEXT * 7168.0)
        write = partial(
            ops.write_kv, key=new, value=new, table=scattered, rows=zero, positions=positions, layout=layout
        )
        yield Case(f"write_kv[{tokens}]", [partial(write, p) for p in pools], CONTEXT * 2048.0)


def fill(device: torch.device) -> Iterator[Case]:
    """The last-exited fill of Ouro-1.4B: tokens that exit after the first of four passes."""
    layout = ops.KVLayout.token_major(16, 128, 16, 8192)
    blocks = -(-CONTEXT // 16)
    table = (torch.arange(4 * blocks).view(1, 4, blocks) * (layout.extent // 8192)).to(device, torch.int32)
    pools = [normal(device, 4 * blocks * layout.extent) for _ in range(SETS)]
    positions = torch.arange(CONTEXT, dtype=torch.int32, device=device)
    zero = torch.zeros_like(positions)
    calls = [partial(ops.fill_exited, p, table, zero, positions, zero[None], layout=layout) for p in pools]
    yield Case("fill_exited", calls, CONTEXT * 4 * 8192.0)


def recurrent(device: torch.device) -> Iterator[Case]:
    """One decoded token a row: update against replay, at three phases of a chunk, and the convolution."""
    pools = [normal(device, BATCH * STATE) for _ in range(SETS)]
    order = torch.randperm(3 * BATCH, generator=torch.Generator().manual_seed(0)).view(BATCH, 3)
    members = (order * (STATE // 3 // 16)).to(device, torch.int32)
    token = {
        "x": normal(device, BATCH, HEADS, ROWS), "dt": normal(device, BATCH, HEADS),
        "B": normal(device, BATCH, 1, COLUMNS), "C": normal(device, BATCH, 1, COLUMNS),
        "A": -torch.rand(HEADS, device=device) - 0.5, "D": torch.ones(HEADS, device=device),
        "bias": torch.full((HEADS,), -4.0, device=device),
        "out": torch.empty(BATCH, HEADS, ROWS, dtype=BF16, device=device),
        "granule": 16, "heads_per_member": HEADS // 3,
    }  # fmt: skip
    row = 2.0 * (2 * HEADS * ROWS + 2 * COLUMNS + HEADS)
    calls = [partial(ops.state_update, p, members, members, **token) for p in pools]
    yield Case("state_update", calls, BATCH * (4.0 * STATE + row))
    size = ssd_window(64, HEADS, ROWS, 1, COLUMNS).size
    windows = [normal(device, BATCH * size) for _ in range(SETS)]
    entries = (torch.arange(BATCH) * (size // 8)).to(device, torch.int32)
    starts = indices(range(BATCH + 1), device)
    for phase in (0, 31, 63):
        positions = torch.full((BATCH,), 64 + phase, dtype=torch.int32, device=device)
        step = partial(ops.ssd, src_members=members, boundaries=members[:, None], scratch=None, windows=entries,
                       starts=starts, positions=positions, window_granule=8, chunk=64, max_tokens=1, **token)  # fmt: skip
        fold = 2.0 * (2 * STATE + size) if phase == 63 else 0.0
        calls = [partial(step, p, window_pool=w) for p, w in zip(pools, windows, strict=True)]
        yield Case(
            f"replay[phase {phase}]", calls, BATCH * (2.0 * STATE + 2.0 * size * phase / 64 + row + fold)
        )
    lines = [normal(device, BATCH * 16384) for _ in range(SETS)]
    line = torch.arange(BATCH, dtype=torch.int32, device=device)[:, None]
    x, weight = normal(device, BATCH, 3584), normal(device, 4, 3584)
    out = torch.empty_like(x)
    calls = [partial(ops.conv_update, s, line, line, x, weight, None, out, granule=16384) for s in lines]
    yield Case("conv_update", calls, BATCH * 2.0 * 3584 * 8)


class Report:
    """Rows, written as they come: a run that is cut short keeps what it has."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        """Empty the file; `seconds` from now on nothing new is begun."""
        self.path = path
        if path:
            path.write_text("")
        self.deadline = time.monotonic() + seconds
        self.broken = 0

    def add(self, text: str, broken: bool = False, **row: Any) -> None:
        """Print a line and write its row."""
        self.broken += broken
        print(text, flush=True)
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def run(self, name: str, part: Callable[[], None]) -> None:
        """Run a part, unless time is up; a failure is a row."""
        if time.monotonic() > self.deadline:
            self.add(f"{name}: no time left", broken=True, part=name, error="no time left")
            return
        try:
            part()
        except Exception as error:  # noqa: BLE001  # a kernel that does not compile must not hide the others
            self.add(f"{name}: {error!r}"[:2000], broken=True, part=name, error=repr(error)[:2000])


def compare(report: Report, name: str, histories: Callable[[], dict[str, bool]]) -> None:
    """Run one op along all histories."""
    for varied, equal in histories().items():
        words = "equal bits" if equal else "BITS DIFFER"
        report.add(f"{name:12s} {varied:32s} {words}", not equal, kernel=name, exact=varied, equal=equal)


def measure(report: Report, case: Case, copy: float, cache: int) -> None:
    """Time one case."""
    seconds, launched = seconds_per_call(case.calls), seconds_from_python(case.calls)
    share, cached = case.bytes / seconds / copy, case.bytes * len(case.calls) < 2 * cache
    report.add(
        f"{case.name:36s} {seconds * 1e6:10.2f} us {launched * 1e6:10.1f} us launched {case.bytes / 1e6:10.2f} MB "
        f"{share:7.1%} of copy{' (from L2)' if cached else ''}",
        kernel=case.name, us=seconds * 1e6, launched_us=launched * 1e6, bytes=case.bytes, share_of_copy=share, cached=cached,
    )  # fmt: skip


def compiled(report: Report, device: torch.device) -> None:
    """Read what this device's Triton made: signatures, registers, spills, the Hopper hazard."""
    import hybridkv.triton as kernels
    from hybridkv.testing import aot

    for module in sorted(m.name for m in pkgutil.iter_modules(kernels.__path__)):
        for name, kernel in vars(importlib.import_module(f"hybridkv.triton.{module}")).items():
            if not name.endswith("_kernel") or not hasattr(kernel, "device_caches"):
                continue
            found = list(kernel.device_caches[device.index][0].values())
            spills = sum(k.n_spills for k in found)
            hazards = sum(aot.hazard(k.asm["ttgir"]) == "present" for k in found)
            registers = max((k.n_regs for k in found), default=0)
            row = {"signatures": len(found), "registers": registers, "spills": spills, "hazards": hazards}
            words = "  ".join(f"{key} {value}" for key, value in row.items())
            report.add(f"{name:36s} {words}", bool(spills or hazards), compiled=name, **row)


def machine(device: torch.device) -> tuple[str, int]:
    """Name the device; also the bytes of its L2 cache."""
    name, cache = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).L2_cache_size
    return f"{name}, torch {torch.__version__}", cache


def run(report: Report, device: torch.device, sizes: exact.Sizes) -> None:
    """Compare bits first, which nothing else can tell; then measure."""
    for name, histories in (
        ("attention", lambda: exact.attention(device, sizes)),
        ("ssd", lambda: exact.recurrent(exact.ssd_family(device, sizes), sizes.steps)),
        ("delta_rule", lambda: exact.recurrent(exact.delta_family(device, sizes), sizes.steps)),
        ("served", lambda: exact.served(device)),
    ):
        report.run(name, partial(compare, report, name, histories))
    copy, (name, cache) = copy_bandwidth(device), machine(device)
    report.add(f"{name}: copy {copy / 1e12:.2f} TB/s, L2 {cache >> 20} MiB", machine=name, copy=copy)

    def cases(family: Callable[[torch.device], Iterator[Case]]) -> None:
        for case in family(device):
            report.run(case.name, partial(measure, report, case, copy, cache))

    for family in (moves, attention, fill, recurrent):
        report.run(family.__name__, partial(cases, family))
    report.run("compiled", partial(compiled, report, device))


def main() -> int:
    """Compare, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benches.gpu")
    parser.add_argument("--json", type=Path, help="write one row a line here as well")
    parser.add_argument("--seconds", type=float, default=480, help="begin nothing new after so long")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET must be unset: the interpreter would run on the CPU, got 1", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    start, report = time.monotonic(), Report(args.json, args.seconds)
    run(report, torch.device("cuda", torch.cuda.current_device()), exact.Sizes())
    print(f"{time.monotonic() - start:.0f} s, {report.broken} broken")
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
