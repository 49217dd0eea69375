"""Two requests from one, and one request back to an earlier token: `fork` and `truncate` of `HybridCache`.

Both plan copies for what is in progress and cannot be shared (I8); both refuse before anything changes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.alloc.checkpoint import Checkpoint, State
from hybridkv.alloc.growth import ATTENTION
from hybridkv.alloc.plan import Copy, Forked, Refused, Truncated
from hybridkv.alloc.planes import is_aliased
from hybridkv.alloc.requests import Request, Status

if TYPE_CHECKING:
    from hybridkv.alloc.cache import HybridCache


def fork(cache: HybridCache, r: Request, request_id: Hashable) -> Forked | Refused:
    """`HybridCache.fork`. Takes the block in progress, the running state and the window anew; shares the rest."""
    s, rows = cache.storage, cache.rows
    full, partial = divmod(r.computed, cache.organization.block_tokens)
    shared_blocks = full if cache.growth.attention else 0
    wanted = (
        (s.attention, int(partial > 0) if cache.growth.attention else 0),
        (s.checkpoint, int(r.open is not None)),
        (s.live, int(r.live is not None)),
        (s.window, int(r.window is not None)),
    )
    if refused := s.shortage(wanted):
        return refused
    if shared_blocks:
        s.by_kind[ATTENTION].reference(cache.growth.once(r.table[:, :shared_blocks].T.ravel()))
    if r.source is not None:
        s.reference([r.source])
    attention, opened, live, window = s.take(wanted)
    child = Request(request_id, r.tokens, rows, r.root, r.salt)
    cache.register(child)
    child.chain, child.status, child.cached = r.chain[:], Status.RUNNING, r.computed
    child.prompt_tokens, child.kept, child.kept_until = r.prompt_tokens, r.kept, r.kept_until
    child.table, child.blocks, child.published = r.table[:, :shared_blocks].copy(), shared_blocks, r.published
    child.source = r.source
    copies: list[Copy] = []
    if attention:
        fresh = attention[ATTENTION][0]
        copies.append(Copy(ATTENTION, r.table[:, shared_blocks].copy(), fresh[:, 0]))
        child.table = np.concatenate([child.table.reshape(len(fresh), -1), fresh], axis=1)
        child.blocks += 1
    if opened:
        child.open = Checkpoint(0, {kind: ids[0] for kind, ids in opened.items()})
        if r.computed > r.opened_at:
            copies += _copies(r.open, child.open)
    if live:
        child.live = State(0, {kind: ids[0] for kind, ids in live.items()})
        copies += _copies(r.live, child.live)
    if window:
        child.window = State(0, {kind: ids[0] for kind, ids in window.items()})
        copies += _copies(r.window, child.window)
    for column in (rows.computed, rows.planned, rows.opened_at, rows.next_publish):
        column[child.row] = column[r.row]
    rows.run(child.handle)
    cache.running += 1
    cache.growth.renew(child)
    return Forked(child.handle, cache.growth.plan(child, r.computed, r.computed, tuple(copies)))


def truncate(cache: HybridCache, r: Request, tokens: int) -> Truncated | Refused:
    """`HybridCache.truncate`."""
    growth, width = cache.growth, cache.organization.block_tokens
    target = min(tokens, r.computed)
    if growth.recurrent and target < r.computed:
        target = _retained(cache, r, target)
        if target < 0:
            return Refused("retained states", tokens, r.source.position if r.source else 0)
    keep, partial = divmod(target, width)
    shared = (
        partial > 0
        and growth.attention
        and (r.published > keep or (growth.shared_planes and is_aliased(r, keep)))
    )
    if shared and (refused := cache.storage.shortage(((cache.storage.attention, 1),))):
        return refused
    copies: list[Copy] = []
    rolled_back = target < r.computed
    if growth.attention and rolled_back:
        copies = _cut_blocks(cache, r, keep, shared=shared, partial=partial > 0)
    r.cut(tokens)
    r.prompt_tokens = min(
        r.prompt_tokens, tokens
    )  # what comes behind is decoded, also where a prompt once was
    if cache.policy.decode == "update":
        r.kept_until = min(r.kept_until, tokens)
    t = cache.rows
    if rolled_back:
        t.computed[r.row] = t.planned[r.row] = target
        t.next_publish[r.row] = (target // width + 1) * width
        r.published = min(r.published, keep)
        r.cached = min(r.cached, target)
        if growth.recurrent and r.source is not None and target == r.source.position:
            t.opened_at[r.row] = target
    growth.renew(r)
    return Truncated(tokens, target, growth.plan(r, target, target, tuple(copies)))


def _retained(cache: HybridCache, r: Request, position: int) -> int:
    """The deepest position up to `position` whose recurrent state is still held, or -1."""
    if cache.growth.rolls_back and position >= cache.growth.fold(r.computed):
        return position  # replay decode: the window holds the inputs since the last end of a chunk
    if r.source is not None and r.source.position <= position:
        return r.source.position
    return -1


def _cut_blocks(cache: HybridCache, r: Request, keep: int, *, shared: bool, partial: bool) -> list[Copy]:
    """Drop blocks behind `keep`; one cut in its middle that others may read, or whose planes share pages, is copied."""
    s = cache.storage
    if not shared:
        cache.growth.drop_blocks(r, keep + partial)
        return []
    fresh = s.take(((s.attention, 1),))[0][ATTENTION][0]
    copy = Copy(ATTENTION, r.table[:, keep].copy(), fresh[:, 0])
    cache.growth.drop_blocks(r, keep)
    r.table = np.concatenate([r.table[:, :keep], fresh], axis=1)
    r.blocks += 1
    return [copy]


def _copies(source: State | None, destination: State) -> list[Copy]:
    assert source is not None
    return [Copy(kind, source.units[kind].ravel(), ids.ravel()) for kind, ids in destination]
