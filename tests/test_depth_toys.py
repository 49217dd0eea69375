"""Toy looped models through planner and pager: schedules never change tokens, and layouts mean what they say."""

import random

import pytest

torch = pytest.importorskip("torch")

from hybridkv.errors import CorruptionError, UnsupportedError  # noqa: E402  (after the skip)
from hybridkv.geometry import LoopLayout  # noqa: E402
from hybridkv.schedule.depth import DepthConfig, DepthPlanner, DepthRequest, KVPool, Stage  # noqa: E402
from hybridkv.schedule.exits import ExitRouter, Hazard  # noqa: E402
from hybridkv.testing.loops import LoopedEngine, LoopedPager, huginn_toy, ouro_toy  # noqa: E402

torch.set_num_threads(1)  # rows are tiny: threads only wait for each other
TOYS = {"ouro": ouro_toy(), "huginn": huginn_toy()}
FILLS = ("copy", "depth", "alias")
READS = (
    (LoopLayout.SINGLE, "copy"), (LoopLayout.FIRST_THEN_SHARED, "copy"), *((LoopLayout.LAST_EXITED, fill) for fill in FILLS)
)  # fmt: skip


def drawn(model, seed=0, requests=4, tokens=3):
    """Prompts and recorded depths, at least 2 everywhere so that every layout takes them."""
    rng = random.Random(f"toys {seed}")
    names = [f"r{index}" for index in range(requests)]
    prompts = {name: [rng.randrange(97) for _ in range(rng.randint(1, 4))] for name in names}
    depths = {name: [rng.randint(2, model.shape.max_loops) for _ in range(tokens)] for name in names}
    return prompts, depths


def play(
    model,
    prompts,
    depths,
    *,
    layout=LoopLayout.SINGLE,
    fill="copy",
    blocks=64,
    pool=None,
    trace=None,
    **config,
):
    """Generated tokens, engine and planner of one run with recorded exits."""
    settings = {"mode": "refill", "width": 4, "max_loops": model.shape.max_loops, "min_signal": 2} | config
    planner = DepthPlanner(DepthConfig(layout=layout, pool=pool, **settings), trace)
    pager = LoopedPager(model.laid_out(layout), blocks, 2, model.width, fill=fill)
    for name, prompt in prompts.items():
        planner.submit(DepthRequest.recorded(name, len(prompt), depths[name]))
    engine = LoopedEngine(model, pager, prompts, depths=depths)
    generated = engine.run(planner)
    assert pager.held == 0
    return generated, engine


@pytest.mark.parametrize(("layout", "fill"), READS, ids=str)
@pytest.mark.parametrize("toy", TOYS)
def test_tokens_do_not_depend_on_the_schedule(toy, layout, fill):
    model = TOYS[toy]
    prompts, depths = drawn(model)
    alone, _ = play(model, prompts, depths, layout=layout, fill=fill, width=1)
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)
    for config in (
        {"mode": "cb"},
        {"mode": "norefill"},
        {"mode": "refill"},
        {"mode": "refill", "min_coda": 2, "width": 3, "prefill_tokens": 3},
        {"mode": "refill", "planes": "aged", "width": 3},
    ):
        assert play(model, prompts, depths, layout=layout, fill=fill, **config)[0] == alone, config


@pytest.mark.parametrize("toy", TOYS)
def test_tokens_do_not_depend_on_width_or_coda_batch(toy):
    """Every K and W, with pages that planes share; and depth-indexed KV, where every token runs all loops."""
    model = TOYS[toy]
    prompts, depths = drawn(model, seed=2, requests=3)
    full = {name: [model.shape.max_loops] * len(d) for name, d in depths.items()}
    for layout, fill, wanted in (
        (LoopLayout.LAST_EXITED, "alias", depths),
        (LoopLayout.DEPTH_INDEXED, "copy", full),
    ):
        alone, _ = play(model, prompts, wanted, layout=layout, fill=fill, mode="cb", width=1)
        for width in (1, 2, 3):
            for mode, k in (("cb", 1), ("norefill", 1), *(("refill", k) for k in range(1, width + 1))):
                config = {"mode": mode, "width": width, "min_coda": k}
                assert play(model, prompts, wanted, layout=layout, fill=fill, **config)[0] == alone, config


@pytest.mark.parametrize("toy", TOYS)
def test_early_exits_matter(toy):
    """Without this the other tests could pass on a model that ignores depth."""
    model = TOYS[toy]
    prompts, depths = drawn(model, tokens=6)
    full = {name: [model.shape.max_loops] * len(d) for name, d in depths.items()}
    for layout in (LoopLayout.SINGLE, LoopLayout.LAST_EXITED):
        assert play(model, prompts, depths, layout=layout)[0] != play(model, prompts, full, layout=layout)[0]


@pytest.mark.parametrize("toy", TOYS)
def test_offload_changes_nothing(toy):
    model = TOYS[toy]
    for seed, (layout, fill) in enumerate(READS):
        prompts, depths = drawn(model, seed, tokens=6)
        blocks = 1 + max(-(-(len(prompt) + 6) // 2) for prompt in prompts.values())
        calm, _ = play(model, prompts, depths, layout=layout, fill=fill)
        stages = []
        pool = KVPool(blocks=blocks, block_tokens=2, preemption="offload")
        pressed, _ = play(
            model, prompts, depths, layout=layout, fill=fill, blocks=blocks, pool=pool,
            trace=lambda entry, stages=stages: stages.append(entry.stage),
        )  # fmt: skip
        assert {Stage.PREEMPT, Stage.RESTORE} <= set(stages)
        assert pressed == calm


@pytest.mark.parametrize("toy", TOYS)
def test_last_exited_is_bit_identical_in_every_way_to_fill(toy):
    """By copy, by per-token depth and by aliased pages: every read of every layer, not just the tokens."""
    model = TOYS[toy]
    prompts, depths = drawn(model, seed=7, tokens=6)
    depths = {name: sorted(d) for name, d in depths.items()}  # neighbours that leave alike share a block
    reads = {}
    for fill in FILLS:
        seen = reads[fill] = []

        class Recorder(LoopedPager):
            def read(self, *args, seen=seen):
                keys, values = super().read(*args)
                seen.append((args, keys.clone(), values.clone()))
                return keys, values

        planner = DepthPlanner(
            DepthConfig(mode="refill", width=4, max_loops=model.shape.max_loops, layout="last_exited")
        )
        pager = Recorder(model.laid_out(LoopLayout.LAST_EXITED), 64, 2, model.width, fill=fill)
        for name, prompt in prompts.items():
            planner.submit(DepthRequest.recorded(name, len(prompt), depths[name]))
        LoopedEngine(model, pager, prompts, depths=depths).run(planner)
        assert (pager.copied > 0, pager.aliased > 0) == (fill == "copy", fill == "alias")
    for fill in FILLS[1:]:
        assert len(reads["copy"]) == len(reads[fill])
        for (at, keys, values), (other, other_keys, other_values) in zip(
            reads["copy"], reads[fill], strict=True
        ):
            assert at == other
            assert torch.equal(keys, other_keys)
            assert torch.equal(values, other_values)


@pytest.mark.parametrize(("layout", "fill"), READS, ids=str)
def test_a_shared_prompt_changes_nothing(layout, fill):
    """A prefix hit covers all planes: prompts run at full depth, whoever ran them."""
    model = TOYS["huginn"]
    prompts = {"a": [5, 6, 7, 8, 9], "b": [5, 6, 7, 8, 3]}
    depths = {"a": [2, 5, 4], "b": [3, 3, 6]}
    together, engine = play(model, prompts, depths, layout=layout, fill=fill, width=1)
    assert engine.pager.cache.stats().counters["cached_tokens"] == 4
    for name, prompt in prompts.items():
        assert play(model, {name: prompt}, depths, layout=layout, fill=fill)[0][name] == together[name]


def test_recompute_keeps_tokens_where_nothing_left_early():
    model = TOYS["ouro"]
    prompts, depths = drawn(model, seed=3)
    full = {name: [4] * len(d) for name, d in depths.items()}
    pool = KVPool(blocks=8, block_tokens=2, preemption="recompute")
    stages = []
    pressed, _ = play(
        model, prompts, full, blocks=8, pool=pool, trace=lambda entry: stages.append(entry.stage)
    )
    assert Stage.PREEMPT in stages
    assert pressed == play(model, prompts, full)[0]
    with pytest.raises(UnsupportedError, match="recompute must not change KV"):
        play(model, prompts, depths, blocks=8, pool=pool)


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("lookahead", [False, True])
def test_a_gate_decides_row_by_row(toy, lookahead):
    """Exits from the model's own gate: the same depths in any batch, and each token runs exactly its depth."""
    model = TOYS[toy]
    prompts, depths = drawn(model, seed=5, tokens=5)
    runs = []
    for mode, width, k in (("refill", 1, 1), ("refill", 4, 1), ("refill", 4, 3), ("norefill", 4, 1)):
        loops = model.shape.max_loops
        planner = DepthPlanner(
            DepthConfig(mode=mode, width=width, min_coda=k, max_loops=loops, lookahead=lookahead)
        )
        router = ExitRouter(Hazard(0.75), max_loops=loops, lookahead=lookahead)
        pager = LoopedPager(model.laid_out(LoopLayout.LAST_EXITED), 64, 2, model.width, fill="depth")
        for name, prompt in prompts.items():
            planner.submit(DepthRequest(id=name, prompt=len(prompt), decode_tokens=len(depths[name])))
        engine = LoopedEngine(model, pager, prompts, router=router)
        runs.append((engine.run(planner), engine.loops_run))
    assert len(set(runs[0][1].values())) > 1
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("mode", ["cb", "norefill", "refill"])
@pytest.mark.parametrize("late", [False, True])
def test_eos_cuts_the_output(mode, late):
    model = TOYS["ouro"]
    prompts, depths = drawn(model, seed=11, tokens=8)
    whole, _ = play(model, prompts, depths)
    eos = whole["r1"][2]
    planner = DepthPlanner(DepthConfig(mode=mode, width=4, max_loops=4))
    pager = LoopedPager(model.laid_out(LoopLayout.SINGLE), 64, 2, model.width)
    for name, prompt in prompts.items():
        planner.submit(DepthRequest.recorded(name, len(prompt), depths[name]))
    cut = LoopedEngine(model, pager, prompts, depths=depths, eos=eos, late=late).run(planner)
    for name, tokens in whole.items():
        end = tokens.index(eos) + 1 if eos in tokens else len(tokens)
        assert cut[name] == tokens[:end]
    assert pager.held == 0


def test_a_hole_raises():
    """Depth-indexed KV has no value for loops that a token never ran; reading on must not shrink the context."""
    model = TOYS["huginn"]
    prompts, depths = {"r": [3, 1]}, {"r": [3, 5]}
    with pytest.raises(
        CorruptionError,
        match=r"I7: position 2 must have written plane 3 before loop 4 reads it \(D42\), got 3 loops",
    ):
        play(model, prompts, depths, layout=LoopLayout.DEPTH_INDEXED)
    assert len(play(model, prompts, {"r": [5, 3]}, layout=LoopLayout.DEPTH_INDEXED)[0]["r"]) == 3
