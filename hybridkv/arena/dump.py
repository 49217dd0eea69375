"""Checkpoints as files: tensors in safetensors, and beside them a JSON sidecar that says what they are.

A dump holds every state of one boundary, layer by layer, and loads into any organization of the same geometry. The
sidecar names geometry, dtypes, chunk length, axes and the chain of token hashes; what does not fit is refused, with the
field that differs, before anything is reserved. Only the sidecar makes a dump complete: it is written last.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridkv.alloc.plan import Admitted, Refused
from hybridkv.alloc.prefix import Blake2b, extend_chain
from hybridkv.arena.payload import AXES, read_blocks, read_state, write_blocks, write_state
from hybridkv.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from hybridkv.alloc.cache import HybridCache
    from hybridkv.alloc.requests import Request
    from hybridkv.arena.arena import Arena

FORMAT = "hybridkv.checkpoint/1"
SAVED_AS = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
}  # safetensors' words
NAMES = ("geometry", "position", "root", "block_tokens", "chain", "tensors")


def save(path: str | os.PathLike[str], arena: Arena, cache: HybridCache, r: Request) -> int:
    """Write the deepest cached checkpoint of a request's prefix to `path` and `path`.json; the tokens it covers.

    Blocks until the bytes are on disk. Nothing is written, and 0 returned, where nothing is cached.
    """
    found = cache.cached(r)
    position = found.match.joint
    if not position:
        return 0
    o = arena.organization
    blocks = found.blocks[: position // o.block_tokens]
    states = [*blocks, *(c for c in found.checkpoints if c.position == position)]
    for state in states:
        cache.lease(state)
    try:
        tensors: dict[str, Tensor] = {}
        if blocks:
            tensors |= read_blocks(
                arena, np.concatenate([next(iter(b.units.values())) for b in blocks], axis=1)
            )
        if len(states) > len(blocks):
            tensors |= read_state(arena, states[-1])
        _write(Path(path), {n: t.cpu() for n, t in tensors.items()}, _sidecar(cache, r, position, tensors))
    finally:
        for state in states:
            cache.end_lease(state)
    return position


def load(path: str | os.PathLike[str], arena: Arena, cache: HybridCache, r: Request) -> Admitted | Refused:
    """Start a waiting request from a dump of its prefix: its first step is computed when this returns.

    `Refused` where there is no room; `UsageError` where the dump is of another model, numerics, tenant or prefix.
    Nothing changes unless every tensor could be read.
    """
    from safetensors.torch import load_file

    target = Path(path)
    told = _told(target)
    position = _check(told, cache, r)
    _check_tensors(told, target)
    answer = cache.admit(r, position, arriving=True)
    if isinstance(answer, Refused):
        return answer
    try:
        tensors = load_file(target)
        plan, width = answer.plan, cache.organization.block_tokens
        if "key" in tensors:
            parts = {name: tensors[name][:, plan.start : position] for name in ("key", "value")}
            write_blocks(arena, plan.attention[:, plan.start // width : position // width], parts)
        if plan.writes:
            write_state(arena, plan.writes[-1].state, tensors)
    except BaseException:
        cache.abandon(r)
        raise
    cache.commit(r, position)
    return answer


def _sidecar(cache: HybridCache, r: Request, position: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    g, width = cache.organization.geometry, cache.organization.block_tokens
    chain: list[Any] = []
    extend_chain(chain, r.root, r.tokens[:position], width, Blake2b())
    return {
        "format": FORMAT,
        "model": g.name,
        "geometry": g.facts,
        "position": position,
        "root": r.root.hex(),
        "block_tokens": width,
        "chain": [key.hex() for key in chain],
        "tensors": {
            n: {"axes": AXES[n], "shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
            for n, t in tensors.items()
        },
    }


def _write(path: Path, tensors: dict[str, Tensor], sidecar: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    beside = _beside(path)
    beside.unlink(missing_ok=True)
    save_file(tensors, path)
    unfinished = beside.with_name(beside.name + ".part")
    unfinished.write_text(json.dumps(sidecar, indent=1) + "\n")
    unfinished.replace(beside)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _told(path: Path) -> dict[str, Any]:
    beside = _beside(path)
    try:
        told = json.loads(beside.read_text())
    except FileNotFoundError:
        raise UsageError(
            f"path must have a sidecar {beside.name}, got none; the dump is not complete"
        ) from None
    except json.JSONDecodeError as error:
        raise UsageError(f"sidecar must be JSON, got {beside.name} with {error.msg}") from None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        got = told.get("format") if isinstance(told, dict) else type(told).__name__
        raise UsageError(f"format must be {FORMAT!r}, got {got!r}")
    if missing := [name for name in NAMES if name not in told]:
        raise UsageError(f"sidecar must hold {', '.join(NAMES)}, got none of {', '.join(missing)}")
    return told


def _check(told: dict[str, Any], cache: HybridCache, r: Request) -> int:
    """The dump is of this model, these numerics, this tenant and this prefix; the tokens it covers."""
    mine, theirs = cache.organization.geometry.facts, told["geometry"]
    for name in mine:
        if theirs.get(name) != mine[name]:
            raise UsageError(f"{name} must be {mine[name]}, got {theirs.get(name)} in the dump")
    position = int(told["position"])
    if position > r.length:
        raise UsageError(f"request must know the dump's {position} tokens, got {r.length}")
    chain: list[Any] = []
    extend_chain(chain, r.root, r.tokens[:position], told["block_tokens"], Blake2b())
    if told["root"] != r.root.hex():
        raise UsageError("salt, decode and loop_policy must be those of the dump, got others")
    same = [key.hex() == other for key, other in zip(chain, told["chain"], strict=False)]
    if not all(same) or len(chain) != len(told["chain"]):
        at = (same.index(False) if not all(same) else len(same)) * told["block_tokens"]
        raise UsageError(f"tokens must be those of the dump, got others from position {at} on")
    return position


def _check_tensors(told: dict[str, Any], path: Path) -> None:
    """The file's header agrees with the sidecar; no tensor is read."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
        got = {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    expected = {name: (t["shape"], SAVED_AS.get(t["dtype"])) for name, t in told["tensors"].items()}
    if got != expected:
        raise UsageError(f"tensors must be {expected} as the sidecar says, got {got}")
