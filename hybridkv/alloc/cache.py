"""`HybridCache`: what an engine drives. Match, admit, extend, run, commit.

Owns which request holds what, and when a state becomes discoverable. Does not move a byte, run a model or read a clock.
One writer; calls are sequential; the same calls give the same ids and plans (I12).

    request -> admit -> (commit | abandon) -> extend -> (commit | abandon) -> ... -> release
                  preempt: back to waiting, everything given back; admit again

Steps of one request may overlap: plan the next before the last is committed, at most `IN_FLIGHT` of them. Commits come
in order, abandons undo the newest. Refusals are values and change nothing; misuse raises `UsageError` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridkv.alloc import audit as auditing
from hybridkv.alloc import branch, planes
from hybridkv.alloc.checkpoint import AttentionBlock, Checkpoint, Lifecycle, State
from hybridkv.alloc.growth import ATTENTION, Growth
from hybridkv.alloc.organization import Organization
from hybridkv.alloc.plan import (
    Admitted,
    Extended,
    ExtendedMany,
    Forked,
    Plan,
    Refused,
    Stats,
    Truncated,
)
from hybridkv.alloc.policy.admission import exact_fraction, headroom_pages
from hybridkv.alloc.policy.placement import NEVER, Kept, Placement, resolve_placement
from hybridkv.alloc.prefix import Blake2b, Found, Match, PrefixIndex, TokenHash, root_key
from hybridkv.alloc.requests import Request, Status
from hybridkv.alloc.rows import IN_FLIGHT, ROW_MASK, Rows, RowTable, as_sampled, as_tokens
from hybridkv.alloc.storage import Storage
from hybridkv.errors import UnsupportedError, UsageError

T = TypeVar("T")

COUNTERS = (
    "admitted", "prompt_tokens", "cached_tokens", "attention_tokens", "published_blocks", "published_checkpoints",
    "reclaimed", "coupled_reclaims", "refused", "preempted",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """Decisions about lifetimes.

    `headroom`: f of section 3.1; admissions leave floor(f * pages) obtainable in every pool while something runs.
    `placement`: which boundaries keep a checkpoint (`policy.placement`).
    `decode`: how the engine decodes. `replay` makes decode-made states equal prefill-made ones and takes a window
    page per decoding request; `update` rewrites the state each token, so that states it made are kept apart: they
    are not published; `update_shared` publishes them all the same, as today's engines do.
    `hold_source`: keep the last passed checkpoint referenced until the next is passed (two live checkpoints a running
    request, research note 8.2), so that `truncate` can return to it; otherwise until the first step behind it.
    `loop_policy`: names how tokens of a looped model exit; states made under another one are never shared (I9).
    """

    headroom: float | str | Fraction = 0
    placement: str | Placement = "every_block"
    decode: Literal["replay", "update", "update_shared"] = "update"
    hold_source: bool = True
    loop_policy: str = ""

    def __post_init__(self) -> None:
        exact_fraction(self.headroom)
        resolve_placement(self.placement)
        if self.decode not in ("replay", "update", "update_shared"):
            raise UsageError(f"decode must be one of replay, update, update_shared, got {self.decode!r}")
        if not isinstance(self.loop_policy, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"loop_policy must be a string, got {self.loop_policy!r}")


class HybridCache:
    """Composite prefix cache over the pools of one organization.

    `pages`: page counts per pool, as `Organization.pages` gives them. `check`: 1 asserts O(1) facts per call, 3 audits
    everything after each call (tests). `token_hash`: see `TokenHash`.
    """

    def __init__(
        self,
        organization: Organization,
        *,
        pages: Mapping[str, int],
        policy: CachePolicy | None = None,
        check: int = 1,
        token_hash: TokenHash | None = None,
    ) -> None:
        self.organization, self.policy, self.check = organization, policy or CachePolicy(), check
        if check not in (0, 1, 2, 3):
            raise UsageError(f"check must be 0, 1, 2 or 3, got {check!r}")
        g = organization.geometry
        self.storage = Storage(organization, pages)
        self.storage.on_loss = self._lost
        replay = self.policy.decode == "replay" and g.recurrent is not None
        if replay and not self.storage.window:
            raise UnsupportedError(
                f"decode='replay' needs a window, which {g.name} ({organization.name}) has not"
            )
        if replay:
            self.storage.live = ()  # the running state is rounded at every end of a chunk, in the retained dtype (R3)
        self.rows = RowTable(organization.block_tokens)
        self.growth = Growth(self.storage, self.rows, replay=replay)
        self.index = PrefixIndex(
            organization.block_tokens,
            organization.grid_tokens,
            attention=bool(self.storage.attention),
            recurrent=g.recurrent is not None,
        )
        self.requests: dict[Hashable, Request] = {}
        self.running = 0
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.leases: list[State] = []
        self._by_row: list[Request | None] = []
        self._hash = token_hash or Blake2b()
        self._placement = resolve_placement(self.policy.placement)
        self._placement.keep(organization.grid_tokens, 1, Match(0, 0, 0))
        self._headroom = {
            n: headroom_pages(self.policy.headroom, p.size) for n, p in self.storage.pools.items()
        }
        decode = self.policy.decode if self.policy.decode == "replay" else "update"
        self._identity = (g.fingerprint, decode, self.policy.loop_policy)

    # ------------------------------------------------------------------------------------------- requests
    def request(
        self, request_id: Hashable, token_ids: Sequence[int] | NDArray[Any], salt: int | None = None
    ) -> Request:
        """A new waiting request; hashes its tokens once. O(tokens).

        `salt` isolates tenants: only requests with an equal salt share states; hash names to integers. A live `request_id` may not be used again.
        """
        if request_id in self.requests:
            raise UsageError(
                f"request_id must be new, got {request_id!r}, which is {self.requests[request_id].status.value}"
            )
        if salt is not None and type(salt) is not int:
            raise UsageError(f"salt must be an integer or None, got {salt!r}; hash a name to an integer")
        tokens = as_tokens(token_ids)
        if not len(tokens):
            raise UsageError("token_ids must hold at least one token, got none")
        root = root_key(self._hash, *self._identity, str(salt))
        r = Request(request_id, tokens, self.rows, root, salt)
        try:
            r.hash(self._hash)
            r.chain = self.index.shared_keys(r.chain)
        except BaseException:
            self.rows.remove(r.row)
            raise
        self.register(r)
        return r

    def match(self, r: Request) -> Match:
        """How deep the prompt is cached now. Changes nothing. One dictionary access per block."""
        return self.cached(r).match

    def cached(self, r: Request) -> Found:
        """The states behind `match`. Changes nothing, holds nothing: `lease` what is to be read."""
        self._alive(r)
        return self._find(r)

    def attention_reach(self, r: Request) -> int:
        """Tokens of the longest cached attention prefix, which may end between two boundaries. Changes nothing."""
        return len(self.cached(r).blocks) * self.organization.block_tokens

    def fits(self, tokens: int) -> Refused | None:
        """None if a lone request of `tokens` tokens in total can run here, else what can never be had."""
        return self.storage.never(self.growth.alone(tokens))

    def admit(
        self, r: Request, upto: int | None = None, *, budget: int | None = None, reserve: int = 0, cut: bool = False,
        arriving: bool = False,
    ) -> Admitted | Refused:  # fmt: skip
        """Start a waiting request: take references on its hit, reserve room for [cached, stop).

        `stop` is `upto` (default: all known tokens), or with `budget` at most that many tokens behind the hit; `cut` ends
        it at the first kept boundary. A hit never reaches `upto` and leaves a token to compute. `reserve`: take the
        attention blocks of that many tokens at once, and refuse unless the states up to there could be had too. A hit
        that is too dear falls back to a shallower one.

        `arriving`: the states of this step come from outside (a host copy, a dump), those at boundary `upto` only.
        """
        self._expect(r, Status.WAITING)
        length = r.length
        upto = length if upto is None else upto
        if not 0 < upto <= length:
            raise UsageError(f"upto must be in 1..{length} (tokens known), got {upto}")
        if budget is not None and (budget < 1 or arriving):
            raise UsageError(
                f"budget must be {'None for what arrives' if arriving else 'at least 1'}, got {budget}"
            )
        unit = self.organization.grid_tokens if self.growth.recurrent else self.organization.block_tokens
        if arriving and upto % unit:
            raise UsageError(f"upto must be a boundary (a multiple of {unit}) for what arrives, got {upto}")
        found = self._find(r)
        headroom = self._headroom if self.running else None
        refused: Refused | None = None
        for depth in self._depths(found, upto):
            stop = self._begin(r, found, depth, upto, budget, cut=cut)
            if arriving:
                r.kept = Kept(r.kept.step, (*(s for s in r.kept.single if s != upto), upto), since=upto)
            wanted = self.growth.wanted(r, depth, stop, reserve)
            refused = self.storage.shortage((*wanted, *self.growth.coming(r, depth, stop, reserve)), headroom)
            if refused is None:
                plan = self.growth.reserve(r, depth, stop, wanted, admitted=True)
                self._admitted(r, found, depth)
                if arriving and self.storage.live:
                    self.rows.opened_at[r.row] = upto  # the next step starts from the checkpoint
                return self._checked(Admitted(depth, plan))
            self._unpin(r)
        assert refused is not None
        self.counters["refused"] += 1
        never = self.storage.never(self.growth.wanted(r, 0, upto if budget is None else 1, reserve))
        return self._checked(never or refused)

    def extend(self, r: Request, upto: int) -> Extended | Refused:
        """Reserve room for a running request up to `upto`, which may lie behind the tokens known (drafts, decode)."""
        self._expect(r, Status.RUNNING)
        if upto <= r.planned:
            raise UsageError(f"upto must be above {r.planned} (tokens planned), got {upto}")
        self.rows.check_room(np.array([r.row]))
        answer = self._extend(r, r.planned, upto)
        return self._checked(Extended(answer) if isinstance(answer, Plan) else answer)

    def extend_many(
        self, rs: Sequence[Request] | NDArray[np.int64], upto: NDArray[np.int64] | Sequence[int]
    ) -> ExtendedMany:
        """`extend` for many requests, named by themselves or by an array of handles. The hot path.

        Where nothing is to be reserved this is a few array operations, whatever the layer groups; each row that
        crosses a block or a boundary adds O(groups).
        """
        rows, stop = self._rows(rs), np.asarray(upto, np.int64)
        if stop.shape != rows.shape:
            raise UsageError(f"upto must hold {len(rows)} positions, got shape {stop.shape}")
        t = self.rows
        start = t.planned[rows]
        if (stop <= start).any():
            raise UsageError(f"upto must be above {start.tolist()} (tokens planned), got {stop.tolist()}")
        t.check_room(rows)
        slow = stop > t.limit[rows]
        plans: dict[int, Plan] = {}
        refused: dict[int, Refused] = {}
        if slow.any():
            t.push(rows[~slow], stop[~slow])
            for i in np.flatnonzero(slow).tolist():
                answer = self._extend(self._at(int(rows[i])), int(start[i]), int(stop[i]))
                if isinstance(answer, Plan):
                    plans[i] = answer
                else:
                    refused[i] = answer
        else:
            t.push(rows, stop)
        folded = start if self.growth.chunk == 1 else start - start % self.growth.chunk
        return self._checked(ExtendedMany(start, stop, folded > t.opened_at[rows], plans, refused))

    def commit(self, r: Request, computed: int, new_tokens: Sequence[int] | NDArray[Any] = ()) -> None:
        """The oldest step in flight has completed: tokens [0, computed) are written. Publishes what that allows (I7).

        `computed` below the step's end (rejected drafts) needs that no later step is in flight. `new_tokens` become
        known: sampled ones, and drafts that were accepted.
        """
        self._expect(r, Status.RUNNING)
        end = self._oldest(r)
        added = as_tokens(new_tokens, "new_tokens")
        if not r.computed < computed <= end:
            raise UsageError(f"computed must be in {r.computed + 1}..{end} (end of the step), got {computed}")
        if computed < end and self.rows.flights(r.row) > 1:
            raise UsageError(
                f"computed must be {end} while later steps are in flight, got {computed}; abandon them first"
            )
        if computed > r.length + len(added):
            raise UsageError(
                f"computed must be at most {r.length + len(added)} (tokens known), got {computed}"
            )
        self._append(r, added, publishes=computed >= self.rows.next_publish[r.row])
        self._commit_short(r, computed) if computed < end else self._commit_rows(np.array([r.row]), computed)
        if computed >= self.rows.next_publish[r.row]:
            self._publish(r, computed)
        self._checked(None)

    def commit_many(
        self,
        rs: Sequence[Request] | NDArray[np.int64],
        computed: NDArray[np.int64] | Sequence[int],
        new_tokens: NDArray[Any] | Sequence[int] | None = None,
    ) -> None:
        """`commit` for many requests whose steps ran to their ends. At most one sampled token a request; None, or a
        negative one: no token became known (prefill went on). The hot path, as `extend_many`.
        """
        rows, done = self._rows(rs), np.asarray(computed, np.int64)
        t = self.rows
        if done.shape != rows.shape:
            raise UsageError(f"computed must hold {len(rows)} positions, got shape {done.shape}")
        if (t.head[rows] == t.tail[rows]).any():
            raise UsageError("requests must have a step in flight, got one that has none; extend first")
        ends = t.pending[rows, t.head[rows] % IN_FLIGHT]
        if (done != ends).any():
            raise UsageError(f"computed must be the ends of the steps, {ends.tolist()}, got {done.tolist()}")
        if (done > t.length[rows]).any():
            raise UsageError(
                f"computed must be at most the tokens known, {t.length[rows].tolist()}, got {done.tolist()}"
            )
        added = None if new_tokens is None else as_sampled(new_tokens, len(rows))
        full = [
            (self._at(int(rows[i])), int(done[i]))
            for i in np.flatnonzero(done >= t.next_publish[rows]).tolist()
        ]
        for r, _ in full:
            r.hash(self._hash)  # may raise: before anything changes
        self._commit_rows(rows, done)
        for r, computed_to in full:
            self._publish(r, computed_to)
        if added is not None:
            if (added < 0).any():
                rows, added = rows[added >= 0], added[added >= 0]
            length = t.length[rows]
            t.fresh[rows, length % t.block_tokens] = added
            t.length[rows] = length + 1
        self._checked(None)

    def abandon(self, r: Request) -> None:
        """The newest step in flight never ran: every count is as before it, and what it reclaimed is back where nobody
        used it since. Abandoning an admission makes the request wait again.
        """
        self._expect(r, Status.RUNNING)
        self._oldest(r)
        step = int(self.rows.tail[r.row]) - 1
        undo = r.journal.pop() if r.journal and r.journal[-1].step == step else None
        self.rows.tail[r.row] = step
        ends = self.rows.ends(r.row)
        self.rows.planned[r.row] = ends[-1] if ends else r.computed
        if undo is not None:
            self.growth.undo(r, undo)
            if undo.admitted:
                self._unpin(r)
                self._stop(r)
            for lost in reversed(undo.lost):
                if self.storage.intact(lost) and self.index.publish(lost.state, lost.key):  # type: ignore[arg-type]
                    self.storage.revive(lost)
        if r.status is Status.RUNNING:
            self.growth.renew(r)
        self._checked(None)

    def preempt(self, r: Request) -> None:
        """Give everything back and wait again; what is cached then will be hit. Steps in flight count as abandoned."""
        self._expect(r, Status.RUNNING)
        r.collect()
        self._leave(r)
        self._stop(r)
        r.preemptions += 1
        self.counters["preempted"] += 1
        self._checked(None)

    def release(self, r: Request) -> None:
        """The request ends, at any moment of its life. Its handle is stale from now on."""
        self._alive(r)
        if r.status is Status.RUNNING:
            self._leave(r)
            self._stop(r)
        r.status = Status.RELEASED
        self.rows.remove(r.row)
        self._by_row[r.row] = None
        del self.requests[r.id]
        self._checked(None)

    # ------------------------------------------------------------------------------- branches and rollback
    def fork(self, r: Request, request_id: Hashable) -> Forked | Refused:
        """A second running request with the same tokens (parallel sampling). Full blocks and the last checkpoint are
        shared; the block and the states in progress are copied first (I8). No step of `r` may be in flight.
        """
        self._settled(r)
        if request_id in self.requests:
            raise UsageError(f"request_id must be new, got {request_id!r}")
        return self._checked(branch.fork(self, r, request_id))

    def truncate(self, r: Request, tokens: int) -> Truncated | Refused:
        """Forget tokens from position `tokens` on (rejected drafts), in every part alike.

        Attention can return to any position; recurrent state only to the retained checkpoint below, or inside the
        replay window. Then `computed` falls below `tokens` and the tokens between are recomputed. Refused where no
        such state is held. No step of `r` may be in flight.
        """
        self._settled(r)
        if not 0 < tokens <= r.length:
            raise UsageError(f"tokens must be in 1..{r.length} (tokens known), got {tokens}")
        return self._checked(branch.truncate(self, r, tokens))

    def alias(self, r: Request, block: int, depth: int) -> Plan:
        """Planes `depth`.. of a block name the page of plane `depth` - 1: all its tokens left at `depth` (D42).

        Their own pages go back; the shared one keeps one reference. For layout `last_exited`, and a full block that
        is not published; no step of `r` in flight. Only `truncate` into the block undoes it: by a copy, all planes.
        """
        self._settled(r)
        return self._checked(planes.alias(self, r, block, depth))

    # ------------------------------------------------------------------------------------------ transfers
    def lease(self, state: State) -> None:
        """Hold a state while something outside reads it (a copy to the host); it is not reclaimed before `end_lease`."""
        state.check()
        self.storage.reference([state])
        self.leases.append(state)

    def end_lease(self, state: State) -> None:
        """The reader is done. A second time is refused."""
        for i, held in enumerate(self.leases):
            if held is state:
                del self.leases[i]
                self.storage.release([state])
                return
        raise UsageError(f"state must be leased, got {state!r}")

    def clear(self) -> int:
        """Forget every cached state that nobody holds; the number forgotten."""
        before = self.storage.reclaimed
        for state in [*self.index.blocks.values(), *self.index.checkpoints.values()]:
            if self.storage.idle(state):
                self.storage.lose(state)
        return self.storage.reclaimed - before

    def at(self, handle: int) -> Request:
        """The live request with this handle."""
        row = handle & ROW_MASK
        r = self._by_row[row] if 0 <= row < len(self._by_row) else None
        if r is None or r.handle != handle:
            raise UsageError(f"handle must name a live request, got {handle}")
        return r

    def stats(self) -> Stats:
        """A snapshot. O(pages)."""
        return auditing.snapshot(self)

    def audit(self) -> None:
        """Check I1-I5 over everything; `CorruptionError` names the broken one. O(pages + states)."""
        auditing.audit(self)

    # ---------------------------------------------------------------------------------------------- parts
    def _find(self, r: Request) -> Found:
        r.hash(self._hash)
        return self.index.find(r.chain, r.length)

    def _depths(self, found: Found, upto: int) -> list[int]:
        """Depths to start from, deepest first; each leaves a token below `upto`."""
        if self.growth.recurrent:
            return [*(c.position for c in reversed(found.checkpoints) if c.position < upto), 0]
        step = self.organization.block_tokens
        return list(dict.fromkeys((min(found.match.joint, (upto - 1) // step * step), 0)))

    def _begin(
        self, r: Request, found: Found, depth: int, upto: int, budget: int | None, *, cut: bool
    ) -> int:
        """Pin the hit at `depth` for `r`, and say where its first step ends."""
        r.kept = self._placement.keep(self.organization.grid_tokens, r.length, found.match)
        blocks = found.blocks[: depth // self.organization.block_tokens]
        r.source = next((c for c in found.checkpoints if c.position == depth), None)
        r.prompt_tokens = r.length
        r.kept_until = r.length if self.policy.decode == "update" else NEVER
        if blocks:
            r.table = np.stack([b.units[ATTENTION][:, 0] for b in blocks], axis=1)
            r.blocks = r.published = len(blocks)
            self.storage.by_kind[ATTENTION].reference(r.table.T.ravel())
        if r.source is not None:
            self.storage.reference([r.source])
        stop = upto if budget is None else min(upto, depth + budget)
        return min(stop, r.next_kept(depth)) if cut and self.growth.recurrent else stop

    def _unpin(self, r: Request) -> None:
        """Undo `_begin`, the reclaim order included."""
        if r.source is not None:
            self.storage.release([r.source], touch=False)
        if r.blocks:
            self.storage.by_kind[ATTENTION].release(r.table[:, : r.blocks].T.ravel(), touch=False)
        r.clear()

    def _admitted(self, r: Request, found: Found, depth: int) -> None:
        t, row = self.rows, r.row
        r.status, r.cached = Status.RUNNING, depth
        t.run(r.handle)
        t.computed[row] = depth
        if not self.storage.live and r.opened_at < depth:
            t.opened_at[row] = depth
        t.next_publish[row] = depth + t.block_tokens
        self.running += 1
        for name, count in (
            ("admitted", 1),
            ("prompt_tokens", r.length),
            ("cached_tokens", depth),
            ("attention_tokens", found.match.attention),
        ):
            self.counters[name] += count

    def _stop(self, r: Request) -> None:
        """`r` runs no more; it holds nothing."""
        r.status = Status.WAITING
        self.rows.reset(r.row)
        self.running -= 1

    def _extend(self, r: Request, start: int, upto: int) -> Plan | Refused:
        wanted = self.growth.wanted(r, start, upto)
        refused = self.storage.shortage(wanted)
        if refused is None:
            return self.growth.reserve(r, start, upto, wanted)
        self.counters["refused"] += 1
        return refused

    def _commit_rows(self, rows: Rows, computed: NDArray[np.int64] | int) -> None:
        self.rows.computed[rows] = computed
        self.rows.head[rows] += 1

    def _commit_short(self, r: Request, computed: int) -> None:
        """Only part of the step counts: what it would have kept behind `computed` is in progress again."""
        t = self.rows
        t.head[r.row] += 1
        t.computed[r.row] = t.planned[r.row] = computed
        self.growth.retreat(r, computed)
        self.growth.renew(r)

    def _append(self, r: Request, added: NDArray[np.int32], *, publishes: bool) -> None:
        """New tokens, hashed where blocks will be published; none where the hash raises."""
        length = r.length
        r.append(added)
        try:
            if publishes:
                r.hash(self._hash)
        except BaseException:
            r.cut(length)
            raise

    def _publish(self, r: Request, computed: int) -> None:
        """Blocks and boundaries up to `computed` are written, and hashed: make them discoverable, pass the boundaries."""
        width, shared = self.organization.block_tokens, self.policy.decode != "update"
        last = computed if shared else min(computed, r.prompt_tokens)
        if self.growth.attention:
            for k in range(r.published, last // width):
                self._publish_block(r, k)
            r.published = max(r.published, last // width)
        while r.boundaries and r.boundaries[0].position <= computed:
            self._pass(r, r.boundaries.pop(0))
        if not self.policy.hold_source and r.source and self.growth.fold(computed) > r.source.position:
            self.storage.release([r.source])
            r.source = None
        done = int(self.rows.head[r.row])
        r.journal = [undo for undo in r.journal if undo.step >= done]
        self.rows.next_publish[r.row] = (computed // width + 1) * width

    def _publish_block(self, r: Request, k: int) -> None:
        """Make block `k` discoverable, unless an equal one is."""
        if r.chain[k] not in self.index.blocks:
            block = AttentionBlock(
                (k + 1) * self.organization.block_tokens, {ATTENTION: r.table[:, k : k + 1].copy()}
            )
            self.index.publish(block, r.chain[k])
            self.storage.publish(block)
            self.counters["published_blocks"] += 1

    def _publish_checkpoint(self, r: Request, state: Checkpoint) -> None:
        """Make a written boundary discoverable, unless an equal one is."""
        if self.index.publish(state, r.chain[state.position // self.organization.block_tokens - 1]):
            self.storage.publish(state)
            self.counters["published_checkpoints"] += 1

    def _leave(self, r: Request) -> None:
        """Give everything back.

        Where an equal copy was published first and has been lost since, ours takes its place: else what we leave
        behind it could never be found (I11).
        """
        for k in range(r.published):
            self._publish_block(r, k)
        if r.source is not None and r.source.stage is Lifecycle.RESERVED:
            self._publish_checkpoint(r, r.source)
        self.growth.let_go(r)

    def _pass(self, r: Request, state: Checkpoint) -> None:
        """A kept boundary is written: publish it, and let the one before it go."""
        self._publish_checkpoint(r, state)
        if r.source is not None:
            self.storage.release([r.source])
        r.source = state

    def _lost(self, state: AttentionBlock | Checkpoint) -> None:
        self.index.remove(state)
        self.counters["reclaimed"] += 1

    def register(self, r: Request) -> None:
        """The request is live. For this package's modules."""
        self.requests[r.id] = r
        self._by_row += [None] * (r.row + 1 - len(self._by_row))
        self._by_row[r.row] = r

    def _at(self, row: int) -> Request:
        r = self._by_row[row]
        assert r is not None
        return r

    def _rows(self, rs: Sequence[Request] | NDArray[np.int64]) -> Rows:
        if isinstance(rs, np.ndarray):
            return self.rows.of(rs.astype(np.int64, copy=False))
        for r in rs:
            self._alive(r)
        return self.rows.of(np.fromiter((r.handle for r in rs), np.int64, len(rs)))

    def _oldest(self, r: Request) -> int:
        if not self.rows.flights(r.row):
            raise UsageError(f"request {r.id!r} must have a step in flight, got none; extend first")
        return self.rows.ends(r.row)[0]

    def _alive(self, r: Request) -> None:
        if self.requests.get(r.id) is not r:
            raise UsageError(
                f"request must be live, got {r.id!r}, which was released or belongs to another cache"
            )

    def _expect(self, r: Request, status: Status) -> None:
        self._alive(r)
        if r.status is not status:
            raise UsageError(f"request {r.id!r} must be {status.value}, got {r.status.value}")

    def _settled(self, r: Request) -> None:
        self._expect(r, Status.RUNNING)
        if self.rows.flights(r.row):
            raise UsageError(
                f"request {r.id!r} must have no step in flight, got {self.rows.flights(r.row)}; commit first"
            )

    def _checked(self, answer: T) -> T:
        if self.check >= 3:
            self.audit()
        return answer
