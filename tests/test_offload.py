"""Host copies: complete before they are found, never overwritten or evicted while they are read. Scenarios B4, C6, C7, G1, G3."""

from collections import deque

import pytest
import torch

from hybridkv import UsageError
from hybridkv.alloc.checkpoint import Checkpoint
from hybridkv.alloc.plan import Refused
from hybridkv.arena.offload import HostTier, Now
from hybridkv.testing.toy_hybrid import ORGANIZATIONS
from tests.test_served import NEW, alone, engine

PROMPT = [7 * k % 61 for k in range(101)]  # three boundaries of 32, and five tokens


class Late:
    """The worst allowed copier: every byte moves at the very end, when somebody lets it."""

    def __init__(self):
        self.queue = deque()

    def submit(self, work):
        event = type("Event", (), {"finished": False, "done": lambda self: self.finished})()
        self.queue.append((work, event))
        return event

    def finish(self, count=1000):
        for _ in range(min(count, len(self.queue))):
            work, event = self.queue.popleft()
            work()
            event.finished = True


def tier(name="s2", *, copier=None, budget=1 << 20, kind="mamba2", **options):
    e = engine(kind, name, **options)
    return e, HostTier(e.arena, e.cache, budget_bytes=budget, copier=copier)


def serve(e, name, prompt=PROMPT, new=NEW):
    e.submit(name, prompt, new)
    return e.run()[name]


def pressure(e):
    """Two requests that together want more than what nobody has used yet."""
    for token in (9, 8):
        serve(e, ("pressure", token), [token] * 90, 2)


def exact(served, prompt=PROMPT, new=NEW, kind="mamba2"):
    want = alone(kind, tuple(prompt), "reference", new)
    differ = [at for at, row in served.logits.items() if not torch.equal(row, want.logits[at])]
    return served.tokens == want.tokens and not differ


@pytest.mark.parametrize("name", ORGANIZATIONS)
@pytest.mark.parametrize("kind", ["mamba2", "gated_delta_net"])
def test_evicted_on_the_device_and_fetched_back_bit_by_bit(kind, name):
    """C7: written through to the host, then evicted on the device: still found, and it continues exactly."""
    e, host = tier(name, kind=kind)
    serve(e, "first")
    r = e.cache.request("again", PROMPT)
    assert host.store_prefix(r) == 6 + 3 and host.poll() == 0
    e.cache.clear()
    assert (e.cache.match(r).joint, host.match(r)) == (0, 96)
    fetch = host.fetch(r)
    assert not fetch.done and host.poll() == 0 and fetch.done
    assert e.cache.match(r).joint == 96
    e.cache.release(r)
    assert exact(serve(e, "second"), kind=kind) and e.hits["second"] == 96
    assert not e.cache.leases


def test_a_part_that_has_not_arrived_is_not_found():
    """G1, I7: all blocks and the state, each complete."""
    e, host = tier(copier=(late := Late()))
    serve(e, "first")
    r = e.cache.request("again", PROMPT)
    host.store_prefix(r)
    found = []
    while late.queue:
        late.finish(1)
        host.poll()
        with_device = host.match(r)
        assert with_device == 96  # the device still has everything
        kept = e.cache.index.find
        e.cache.index.find = lambda chain, tokens, k=kept: k([], tokens)
        found.append(host.match(r))
        e.cache.index.find = kept
    assert found == [0] * 6 + [32, 64, 96]


def test_a_state_deeper_than_the_blocks_does_not_count():
    """B4, I1: the host has blocks of 96 tokens and states up to 64; and the other way round."""
    e, host = tier()
    serve(e, "first")
    r = e.cache.request("again", PROMPT)
    found = e.cache.cached(r)
    for state in (*found.blocks, *found.checkpoints[:2]):
        assert host.store(state)
    blocks_only = HostTier(e.arena, e.cache, budget_bytes=1 << 20)
    for state in (*found.blocks[:5], *found.checkpoints):
        assert blocks_only.store(state)
    host.poll(), blocks_only.poll()
    e.cache.clear()
    assert (host.match(r), blocks_only.match(r)) == (64, 64)


def test_what_a_running_copy_reads_is_not_overwritten():
    """G3, I2: release and pressure during the copy; the old bytes travel, and reuse waits."""
    e, host = tier("s1", pages=48, copier=(late := Late()))
    serve(e, "first", PROMPT[:65], 2)
    r = e.cache.request("again", PROMPT[:65])
    started = host.store_prefix(r)
    e.cache.release(r)
    pressure(e)
    assert len(e.cache.leases) == started
    late.finish()
    host.poll()
    assert not e.cache.leases
    e.cache.clear()
    r = e.cache.request("third", PROMPT[:65])
    assert host.fetch(r).tokens == 64
    late.finish()
    host.poll()
    e.cache.release(r)
    assert exact(serve(e, "last", PROMPT[:65], 5), PROMPT[:65], 5) and e.hits["last"] == 64


def test_without_the_lease_other_bytes_travel(monkeypatch):
    """The twin of G3: the copy reads what the next request wrote."""
    e, host = tier("s1", pages=48, copier=(late := Late()))
    monkeypatch.setattr(e.cache, "lease", lambda state: None)
    monkeypatch.setattr(e.cache, "end_lease", lambda state: None)
    serve(e, "first", PROMPT[:65], 2)
    r = e.cache.request("again", PROMPT[:65])
    host.store_prefix(r)
    e.cache.release(r)
    pressure(e)
    late.finish()
    host.poll()
    e.cache.clear()
    r = e.cache.request("third", PROMPT[:65])
    assert not isinstance(host.fetch(r), Refused)
    late.finish()
    host.poll()
    e.cache.release(r)
    assert not exact(serve(e, "last", PROMPT[:65], 5), PROMPT[:65], 5)


def test_a_host_copy_that_is_read_back_is_not_evicted():
    """C6: references count in every tier."""
    e, host = tier(copier=(late := Late()))
    serve(e, "first")
    r = e.cache.request("again", PROMPT)
    host.store_prefix(r)
    late.finish()
    host.poll()
    host.budget_bytes = host.bytes  # full
    e.cache.clear()
    fetch = host.fetch(r)
    other = e.cache.request("other", [11] * 70)
    e.cache.release(other)
    serve(e, "pressure", [11] * 70, 2)
    other = e.cache.request("other", [11] * 70)
    host.store_prefix(other)  # only the states at 32 and 64 are idle
    assert set(fetch.copies) <= set(host._copies.values())
    late.finish()
    host.poll()
    assert fetch.done and e.cache.match(r).joint == 96
    assert host.store_prefix(other) > 0 and host.bytes <= host.budget_bytes
    assert not set(fetch.copies) <= set(host._copies.values())


def test_a_cancelled_fetch_gives_back_when_its_copy_has_ended():
    """The copy may still be writing: the storage is not anybody's until it is done (I2, I8)."""
    e, host = tier(copier=(late := Late()))
    serve(e, "first")
    r = e.cache.request("again", PROMPT)
    host.store_prefix(r)
    late.finish()
    host.poll()
    e.cache.clear()
    fetch = host.fetch(r)
    host.cancel(fetch)
    assert host.poll() == 1 and e.cache.running == 1
    late.finish()
    assert host.poll() == 0 and fetch.done and e.cache.running == 0
    assert e.cache.match(r).joint == 0
    assert sum(p.held for p in e.cache.stats().pools.values()) == 0


def test_the_device_keeps_what_it_has():
    """Only what lies behind the device's own hit travels back."""
    e, host = tier()
    serve(e, "first")
    r = e.cache.request("again", PROMPT)
    host.store_prefix(r)
    host.poll()
    assert host.fetch(r) is None
    deepest = e.cache.cached(r).checkpoints[-1]
    assert isinstance(deepest, Checkpoint) and deepest.position == 96
    e.cache.storage.lose(deepest)
    assert (e.cache.match(r).joint, host.match(r)) == (64, 96)
    fetch = host.fetch(r)
    assert len(fetch.copies) == 3 and host.poll() == 0
    e.cache.release(r)
    assert exact(serve(e, "second")) and e.hits["second"] == 96


def test_no_room_on_the_device_is_a_refusal():
    e, host = tier("s1", pages=33)
    serve(e, "first")
    r = e.cache.request("again", PROMPT)
    host.store_prefix(r)
    host.poll()
    e.cache.clear()
    e.submit("busy", [1] * 120, 20)
    e.step()
    before = e.cache.stats().pools
    assert isinstance(host.fetch(r), Refused)
    assert e.cache.stats().pools == before and len(e.cache.requests) == 2


def test_host_copies_leave_by_age():
    e, host = tier()
    serve(e, "first")
    r = e.cache.request("again", PROMPT)
    block, *rest = e.cache.cached(r).blocks
    assert host.store(block)
    host.budget_bytes = 2 * host.bytes
    assert host.store(rest[0]) and host.poll() == 0
    assert not host.store(block)  # there already; used now
    assert host.store(rest[1]) and host.poll() == 0
    assert not host.store(block) and host.store(rest[0])
    assert host.bytes <= host.budget_bytes


def test_wrong_use_is_refused():
    e, host = tier()
    with pytest.raises(UsageError, match="budget_bytes must be at least 1, got 0"):
        HostTier(e.arena, e.cache, budget_bytes=0)
    with pytest.raises(UsageError, match="state must be published, got Checkpoint"):
        host.store(Checkpoint(32, {}))
    assert Now().submit(lambda: None).done()


def test_a_copy_that_cannot_be_started_changes_nothing():
    """I6: no lease, no request and no bytes are left."""

    class Broken:
        def submit(self, work):
            raise MemoryError("no stream")

    e, host = tier()
    serve(e, "first")
    r = e.cache.request("again", PROMPT)
    good, host.copier = host.copier, Broken()
    with pytest.raises(MemoryError):
        host.store_prefix(r)
    assert host.bytes == 0 and not e.cache.leases and host.poll() == 0
    host.copier = good
    host.store_prefix(r)
    host.poll()
    e.cache.clear()
    host.copier = Broken()
    before = e.cache.stats()
    with pytest.raises(MemoryError):
        host.fetch(r)
    held = {name: (pool.free, pool.held) for name, pool in e.cache.stats().pools.items()}
    assert held == {name: (pool.free, pool.held) for name, pool in before.pools.items()}
    assert len(e.cache.requests) == 1 and e.cache.running == 0
    host.copier = good
    assert host.fetch(r).tokens == 96
