"""Speed and exactness of the kernels on a GPU, in one command and well under ten minutes.

    python -m benches.gpu [--json rows.jsonl]

Prints, per kernel at Falcon-H1-7B's shapes, microseconds, bytes and the share of the copy bandwidth that was measured in
the same run; then whether each history of `hybridkv.testing.exact` gave equal bits. Exits with 0 where there is no GPU,
and with 1 where bits differ. Asserts no speed.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from hybridkv import ops
from hybridkv.testing import exact
from hybridkv.testing.exact import BF16, draw, indices
from hybridkv.units import ssd_window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SETS = 4  # rotating sets of buffers, together larger than the L2 cache
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


def seconds_per_call(calls: list[Callable[[], object]]) -> float:
    """Time a CUDA graph that runs every set once; the launch overhead of Python is not in it."""
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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
        times.append(begin.elapsed_time(end) / 1000 / len(calls))
    return sorted(times)[len(times) // 2]


def copy_bandwidth(device: torch.device) -> float:
    """Measure bytes read and written per second by a copy of 512 MiB."""
    sets = [torch.empty(2, 1 << 29, dtype=torch.uint8, device=device) for _ in range(2)]
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
    query, chunk = draw(device, BATCH, 12, 128, seed=9), draw(device, CONTEXT, 12, 128, seed=8)
    new = draw(device, CONTEXT, 2, 128, seed=7)
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
        pools = [draw(device, BATCH * blocks * layout.extent, seed=i) for i in range(SETS)]
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
    pools = [draw(device, 4 * blocks * layout.extent, seed=i) for i in range(SETS)]
    positions = torch.arange(CONTEXT, dtype=torch.int32, device=device)
    zero = torch.zeros_like(positions)
    calls = [partial(ops.fill_exited, p, table, zero, positions, zero[None], layout=layout) for p in pools]
    yield Case("fill_exited", calls, CONTEXT * 4 * 8192.0)


def recurrent(device: torch.device) -> Iterator[Case]:
    """One decoded token a row: update against replay, at three phases of a chunk, and the convolution."""
    pools = [draw(device, BATCH * STATE, seed=i) for i in range(SETS)]
    order = torch.randperm(3 * BATCH, generator=torch.Generator().manual_seed(0)).view(BATCH, 3)
    members = (order * (STATE // 3 // 16)).to(device, torch.int32)
    token = {
        "x": draw(device, BATCH, HEADS, ROWS, seed=1), "dt": draw(device, BATCH, HEADS, seed=2),
        "B": draw(device, BATCH, 1, COLUMNS, seed=3), "C": draw(device, BATCH, 1, COLUMNS, seed=4),
        "A": -torch.rand(HEADS, device=device) - 0.5, "D": torch.ones(HEADS, device=device),
        "bias": torch.full((HEADS,), -4.0, device=device),
        "out": torch.empty(BATCH, HEADS, ROWS, dtype=BF16, device=device),
        "granule": 16, "heads_per_member": HEADS // 3,
    }  # fmt: skip
    row = 2.0 * (2 * HEADS * ROWS + 2 * COLUMNS + HEADS)
    calls = [partial(ops.state_update, p, members, members, **token) for p in pools]
    yield Case("state_update", calls, BATCH * (4.0 * STATE + row))
    size = ssd_window(64, HEADS, ROWS, 1, COLUMNS).size
    windows = [draw(device, BATCH * size, seed=i) for i in range(SETS)]
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
    lines = [draw(device, BATCH * 16384, seed=i) for i in range(SETS)]
    line = torch.arange(BATCH, dtype=torch.int32, device=device)[:, None]
    x, weight = draw(device, BATCH, 3584, seed=5), draw(device, 4, 3584, seed=6)
    out = torch.empty_like(x)
    calls = [partial(ops.conv_update, s, line, line, x, weight, None, out, granule=16384) for s in lines]
    yield Case("conv_update", calls, BATCH * 2.0 * 3584 * 8)


def main() -> int:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m benches.gpu")
    parser.add_argument("--json", type=Path, help="write one row a line here as well")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    copy = copy_bandwidth(device)
    print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}: copy {copy / 1e12:.2f} TB/s",
        flush=True,
    )
    rows = []
    for family in (moves, attention, fill, recurrent):
        for case in family(device):
            time = seconds_per_call(case.calls)
            share = case.bytes / time / copy
            rows.append({"kernel": case.name, "us": time * 1e6, "bytes": case.bytes, "share_of_copy": share})
            print(
                f"{case.name:36s} {time * 1e6:10.1f} us {case.bytes / 1e6:10.1f} MB {share:7.1%} of copy",
                flush=True,
            )
        torch.cuda.empty_cache()
    broken = 0
    sizes = exact.Sizes()
    for name, found in (
        ("attention", exact.attention(device, sizes)),
        ("ssd", exact.recurrent(exact.ssd_family(device, sizes), sizes.steps)),
        ("delta_rule", exact.recurrent(exact.delta_family(device, sizes), sizes.steps)),
    ):
        for varied, equal in found.items():
            broken += not equal
            rows.append({"kernel": name, "exact": varied, "equal": equal})
            print(f"{name:12s} {varied:32s} {'equal bits' if equal else 'BITS DIFFER'}", flush=True)
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
