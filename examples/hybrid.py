"""A toy hybrid model served over every memory organization: other places, other batches, the same bits.

    python examples/hybrid.py

Serves four requests that share prefixes. Prints, for each organization, what the prefix cache found, how often a request
was preempted, and how many tokens and logits differ from those of each request alone in an empty cache: none. Then the
same after a trip through host memory, and through a file into another organization.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch

from hybridkv.arena import dump
from hybridkv.arena.offload import HostTier
from hybridkv.schedule.hybrid import HybridConfig
from hybridkv.testing.toy_hybrid import (
    ORGANIZATIONS,
    VOCABULARY,
    Served,
    ToyEngine,
    Weights,
    toy_geometry,
    toy_organization,
)

NEW = 16
KINDS = {"mamba2": "Mamba-2 and attention", "gated_delta_net": "gated delta rule and attention"}


def engine(name: str, weights: Weights, *, budget: int = 25, running: int = 3, pages: int = 45) -> ToyEngine:
    """Serve in small pools, with steps that cut prompts anywhere."""
    o = toy_organization(name, weights.g)
    config = HybridConfig(token_budget=budget, max_running=running, cut_at_boundaries=False)
    return ToyEngine(o, weights, pages={p.name: pages for p in o.pools}, config=config)


def alone(weights: Weights, prompt: list[int]) -> Served:
    """One request, one prompt, nothing cached."""
    e = engine("s0", weights, budget=256, pages=99)
    e.submit("it", prompt, NEW)
    return e.run()["it"]


def differing(served: Served, want: Served) -> int:
    """Positions whose logits differ in any bit."""
    return sum(not torch.equal(row, want.logits[at]) for at, row in served.logits.items())


def organizations(weights: Weights, prompts: list[list[int]], expected: list[Served]) -> None:
    """Serve the same traffic six times."""
    print(f"  {'':9}{'hits (tokens)':22}{'preempted':>10}{'positions':>11}{'differ in bits':>16}")
    for name in ORGANIZATIONS:
        e = engine(name, weights)
        for n, prompt in enumerate(prompts):
            e.submit(n, prompt, NEW)
        served = e.run()
        wrong = sum(differing(served[n], want) for n, want in enumerate(expected))
        wrong += sum(served[n].tokens != want.tokens for n, want in enumerate(expected))
        hits = " ".join(str(e.hits[n]) for n in range(len(prompts)))
        positions = sum(len(s.logits) for s in served.values())
        print(f"  {name:9}{hits:22}{e.cache.counters['preempted']:>10}{positions:>11}{wrong:>16}")


def travelled(weights: Weights, prompt: list[int], want: Served) -> None:
    """A checkpoint goes to the host and back, and through a file into another organization."""
    e = engine("s2", weights)
    e.submit("first", prompt, NEW)
    e.run()
    r = e.cache.request("again", prompt)
    host = HostTier(e.arena, e.cache, budget_bytes=1 << 20)
    host.store_prefix(r)
    host.poll()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.safetensors"
        saved = dump.save(path, e.arena, e.cache, r)
        e.cache.clear()
        host.fetch(r)
        host.poll()
        e.cache.release(r)
        other = engine("nested", weights)
        r = other.cache.request("load", prompt)
        dump.load(path, other.arena, other.cache, r)
        other.cache.release(r)
    for target, how in ((e, "from the host, s2"), (other, "from a file, s2 to nested")):
        target.submit("again", prompt, NEW)
        served = target.run()["again"]
        print(
            f"  {how}: {target.hits['again']} of {saved} tokens found, {differing(served, want)} positions differ"
        )


def main() -> None:
    """Run both kinds of recurrence."""
    torch.set_num_threads(1)
    for kind, title in KINDS.items():
        weights, rng = Weights(toy_geometry(kind)), random.Random(1)
        base = [rng.randrange(VOCABULARY) for _ in range(80)]
        prompts = [base[:70], [*base[:40], 1, 2, 3], base[:50], base[:75]]
        expected = [alone(weights, prompt) for prompt in prompts]
        print(f"\n{title}")
        organizations(weights, prompts, expected)
        travelled(weights, prompts[0], expected[0])


if __name__ == "__main__":
    main()
