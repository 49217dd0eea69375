"""Two looped toy models through the depth planner and a paged KV: other schedules, other layouts, the same tokens.

    python examples/looped.py

Prints, for an Ouro-like model (0-4-0) and a Huginn-like one (2-4-2), how many launches each mode needs for the same
recorded exits, that the tokens agree, what preemption by offload changes (nothing), and the exits of the model's own
gate.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import torch

from hybridkv.geometry import LoopLayout
from hybridkv.schedule.depth import DepthConfig, DepthPlanner, DepthRequest, KVPool
from hybridkv.schedule.exits import ExitRouter, Hazard
from hybridkv.testing.loops import FillMode, LoopedEngine, LoopedPager, LoopedToy, huginn_toy, ouro_toy

if TYPE_CHECKING:
    from hybridkv.schedule.depth import Entry

TOKENS = 6
BLOCK = 2


def main() -> None:
    """Run both toys."""
    torch.set_num_threads(1)
    for name, model in (
        ("Ouro-like 0-4-0, 4 loops", ouro_toy()),
        ("Huginn-like 2-4-2, 6 loops", huginn_toy()),
    ):
        print(f"\n{name}")
        rng = random.Random(4)
        prompts = {f"r{i}": [rng.randrange(97) for _ in range(rng.randint(1, 5))] for i in range(4)}
        depths = {r: [rng.randint(2, model.shape.max_loops) for _ in range(TOKENS)] for r in prompts}
        modes(model, prompts, depths)
        layouts(model, prompts, depths)
        offload(model, prompts, depths)
        gate(model, prompts)


def serve(
    model: LoopedToy,
    prompts: dict[str, list[int]],
    depths: dict[str, list[int]] | None,
    *,
    mode: str = "refill",
    k: int = 1,
    layout: LoopLayout = LoopLayout.LAST_EXITED,
    fill: FillMode = "copy",
    pool: KVPool | None = None,
    router: ExitRouter | None = None,
) -> tuple[dict[str, list[int]], Counter[str], LoopedEngine]:
    """Generated tokens, launches by stage, and the engine."""
    stages: Counter[str] = Counter()

    def count(entry: Entry) -> None:
        stages[entry.stage.value] += 1

    loops = model.shape.max_loops
    config = DepthConfig(
        mode=mode,
        width=4,
        max_loops=loops,
        min_coda=k,
        layout=layout,
        pool=pool,
        min_signal=2,
        lookahead=router is not None,
    )
    planner = DepthPlanner(config, count)
    pager = LoopedPager(model.laid_out(layout), pool.blocks if pool else 64, BLOCK, model.width, fill=fill)
    for name, prompt in prompts.items():
        recorded = None if depths is None else depths[name]
        planner.submit(DepthRequest(id=name, prompt=len(prompt), decode_tokens=TOKENS, depths=recorded))
    engine = LoopedEngine(model, pager, prompts, depths=depths, router=router)
    return engine.run(planner), stages, engine


def modes(model: LoopedToy, prompts: dict[str, list[int]], depths: dict[str, list[int]]) -> None:
    """Same exits, three ways to form batches."""
    expected, _, _ = serve(model, prompts, depths, mode="cb")
    for mode, k in (("cb", 1), ("norefill", 1), ("refill", 1), ("refill", 4)):
        tokens, stages, _ = serve(model, prompts, depths, mode=mode, k=k)
        loops = stages["recurrent"] + stages["decode"] * model.shape.max_loops
        print(
            f"  {mode:8} K={k}  {loops:3} loops, {stages['coda']:2} codas, tokens {agree(tokens, expected)}"
        )


def layouts(model: LoopedToy, prompts: dict[str, list[int]], depths: dict[str, list[int]]) -> None:
    """Last-exited KV by copies, by reading each token at its depth, and by pages that planes share; other layouts."""
    copied, _, engine = serve(model, prompts, depths)
    print(f"  last-exited by {engine.pager.copied} copies")
    for fill, means in (("depth", "per-token depth"), ("alias", "pages that planes share")):
        tokens, _, engine = serve(model, prompts, depths, fill=fill)
        shared = f" ({engine.pager.aliased} blocks)" if engine.pager.aliased else ""
        print(f"    by {means}{shared}: tokens {agree(tokens, copied)}")
    for layout in (LoopLayout.SINGLE, LoopLayout.FIRST_THEN_SHARED):
        expected, _, _ = serve(model, prompts, depths, mode="cb", layout=layout)
        tokens, _, engine = serve(model, prompts, depths, layout=layout)
        layers = engine.pager.loop.attention_layers
        print(f"  {layout.value}: KV of {layers} layers, cb and refill: tokens {agree(tokens, expected)}")
    full = {r: [model.shape.max_loops] * TOKENS for r in prompts}
    expected, _, _ = serve(model, prompts, full, mode="cb", layout=LoopLayout.DEPTH_INDEXED)
    tokens, _, _ = serve(model, prompts, full, layout=LoopLayout.DEPTH_INDEXED)
    print(f"  depth_indexed, no early exits, cb and refill: tokens {agree(tokens, expected)}")


def offload(model: LoopedToy, prompts: dict[str, list[int]], depths: dict[str, list[int]]) -> None:
    """A pool that one request nearly fills."""
    expected, _, _ = serve(model, prompts, depths)
    blocks = 1 + max(-(-(len(prompt) + TOKENS) // BLOCK) for prompt in prompts.values())
    tokens, stages, _ = serve(
        model, prompts, depths, pool=KVPool(blocks=blocks, block_tokens=BLOCK, preemption="offload")
    )
    print(f"  {blocks} blocks: {stages['preempt']} preemptions, tokens {agree(tokens, expected)}")


def gate(model: LoopedToy, prompts: dict[str, list[int]]) -> None:
    """The model decides, one loop ahead."""
    router = ExitRouter(Hazard(0.5), max_loops=model.shape.max_loops, min_signal=2, lookahead=True)
    _, _, engine = serve(model, prompts, None, router=router)
    depths = Counter(engine.loops_run.values())
    print(f"  own gate, lookahead: tokens by depth {dict(sorted(depths.items()))}")


def agree(tokens: dict[str, list[int]], expected: dict[str, list[int]]) -> str:
    """Whether two runs generated the same."""
    return "agree" if tokens == expected else "DIFFER"


if __name__ == "__main__":
    main()
