"""The rules that hold between operations, and those of usefulness and availability: derived from contents and ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.testing import _checks as checks
from hybridkv.testing._adapter import (
    Copy,
    Owned,
    Place,
    Refused,
    Step,
    View,
)
from hybridkv.testing._ghost import Meaning
from hybridkv.testing._running import Running

if TYPE_CHECKING:
    from collections.abc import Hashable

    from hybridkv.testing._bench import Live


class Judging(Running):
    """Looks at everything, and changes nothing."""

    def check(self) -> None:
        """The rules that hold between any two operations."""
        owned = self.sut.owned()
        self._grow_older(owned)
        if self.quiet:
            return
        found = [self.sut.view(live.handle) for live in self.live]
        users = {place for view in found for place in view.places()}
        users.update(place for _, lease in self.leases for _, place in lease.state)
        self._all(checks.views(found, owned, self.ghost))
        self._all(checks.partition(owned, self.capabilities.pools, users, cancelled=self._cancelled))
        for live, view in zip(self.live, found, strict=True):
            self._check_request(live, view, owned)
        self._check_published(owned)
        for _, lease in self.leases:
            for part, place in lease.state:
                offset = self.capabilities.block_tokens - 1 if lease.attention else 0
                got = self.ghost.read(place, offset)
                ok = place in owned.held and got == Meaning(part, lease.namespace, lease.tokens)
                self._expect(ok, "HK-G3", f"leased {place} holds {got}")

    def _grow_older(self, owned: Owned) -> None:
        """Since when each reclaimable unit is idle."""
        for place in owned.cached - owned.held:
            self._idle_since.setdefault(place, len(self.trace))
        for place in [p for p in self._idle_since if p not in owned.cached or p in owned.held]:
            self._was_idle[place] = self._idle_since.pop(place)

    def _check_request(self, live: Live, view: View, owned: Owned) -> None:
        if not live.running:
            self._expect(not view.places(), "HK-A1", f"a waiting request holds {sorted(view.places())}")
            return
        for p in range(live.computed):
            for part, place, offset in self._cells(view.tables, p):
                got = self.ghost.read(place, offset)
                want = Meaning(part, live.namespace, live.marks[: p + 1])
                self._expect(
                    got == want, live.origin or "HK-B1", f"position {p} holds {got} at {place}, not {want}"
                )
        if self.capabilities.grid_tokens and live.computed:
            fold = self._fold(live.computed)
            self._expect(live.home or not fold, live.origin or "HK-B3", f"no state at {live.computed}")
            for part, place in live.home or ():
                got = self.ghost.read(place)
                want = Meaning(part, live.namespace, live.marks[: self._absorbed(part, live.computed)])
                same = got is not None and (got.namespace, got.tokens) == want[1:] and got.part == part
                self._expect(
                    same, live.origin or "HK-B3", f"the state at {live.computed} holds {got}, not {want}"
                )
                self._expect(place in owned.held, "HK-D4", f"the running state's {place} is not held")
            for p in range(fold, live.computed):
                self._expect_window(live, live.window, p)
        for step in live.steps:
            states = [step.source, step.destination, step.window, *(s for _, s in step.writes)]
            places = {p for s in states if s for _, p in s} | {p for row in step.tables for p in row}
            self._expect(
                places <= owned.held, "HK-D4", f"a plan relies on {sorted(places - owned.held)}, not held"
            )

    def check_plan(self, step: Step, stop: int) -> None:
        """D5: ids exist, and the plan covers its tokens."""
        states = [step.source, step.destination, step.window, *(s for _, s in step.writes)]
        places = {p for s in states if s for _, p in s} | {p for row in step.tables for p in row}
        outside = sorted(p for p in places if not self.ghost.inside(p))
        self._expect(not outside, "HK-D5", f"a plan names {outside}, which do not exist")
        need = -(-stop // self.capabilities.block_tokens)
        for line in self.capabilities.attention:
            rows = len(step.tables) == line.groups and all(len(row) >= need for row in step.tables)
            self._expect(
                rows,
                "HK-D5",
                f"a plan to {stop} has tables {step.tables}, not {line.groups} of {need} blocks",
            )

    def _check_hit(self, live: Live, step: Step, hit: int) -> None:
        """B2, C1, C2, C5, D3, F1-F3: the hit holds what was promised, in every group and part."""
        c = self.capabilities
        wrong: dict[int, tuple[str, str]] = {}
        for p in range(hit):
            for part, place, offset in self._cells(step.tables, p):
                got, want = (
                    self.ghost.read(place, offset),
                    Meaning(part, live.namespace, live.tokens[: p + 1]),
                )
                if got != want:
                    width = c.block_tokens - (c.block_tokens - 1 - offset)
                    rule = checks.wrong_hit(got, want, "HK-B2", weak_hash=c.weak_hash, width=width)
                    wrong.setdefault(
                        part.group, (rule, f"hit {hit}, but position {p} holds {got} in group {part.group}")
                    )
        if wrong:
            some = 0 < len(wrong) < len(step.tables)
            rule, message = next(iter(wrong.values()))
            self._broken("HK-C5" if some and rule == "HK-B2" else live.origin or rule, message)
        if not c.grid_tokens:
            return
        if not hit:
            cleared = {op.destination for op in step.before if not isinstance(op, Copy)}
            zero = cleared.issuperset(place for _, place in step.source or ())
            self._expect(zero, live.origin or "HK-D3", f"a miss starts from {step.source}")
            return
        self._expect(step.source is not None, "HK-C2", f"hit {hit} without a state")
        pairs = [
            (self.ghost.read(p), Meaning(part, live.namespace, live.tokens[:hit]))
            for part, p in step.source or ()
        ]
        bad = [(got, want) for got, want in pairs if got != want]
        if bad:
            rule = "HK-C2" if len(bad) == len(pairs) else "HK-C1"
            rule = checks.wrong_hit(*bad[0], rule, weak_hash=c.weak_hash, width=c.block_tokens)
            self._broken(live.origin or rule, f"hit {hit}, but a part of its state is {bad[0][0]}")

    def _check_published(self, owned: Owned) -> None:
        """B6, C1: everything that can be found holds what its key says."""
        for entry in self.sut.published():
            offset = self.capabilities.block_tokens - 1 if entry.attention else 0
            cells = [(part, place, self.ghost.read(place, offset)) for part, place in entry.state]
            bad = [
                (place, got)
                for part, place, got in cells
                if got != Meaning(part, entry.namespace, entry.tokens)
            ]
            if bad:
                rule = "HK-C1" if len(bad) < len(cells) and not entry.attention else "HK-B6"
                c, want = self.capabilities, Meaning(cells[0][0], entry.namespace, entry.tokens)
                rule = checks.wrong_hit(bad[0][1], want, rule, weak_hash=c.weak_hash, width=c.block_tokens)
                self._broken(
                    rule, f"published for {entry.tokens} in {entry.namespace}: {bad[0][0]} holds {bad[0][1]}"
                )
            missing = [place for _, place, _ in cells if place not in owned.cached]
            self._expect(not missing, "HK-C1", f"found in the index, but {missing} are not marked so")

    def _refused(self, before: Hashable, refused: Refused, *, possible: bool) -> None:
        self.events.append("refused")
        self._expect(self._print() == before, "HK-A4", "a refused call left traces")
        if self.capabilities.promises_room:
            self._expect(not possible, "HK-E2", f"{refused} though enough can be had")

    def _reclaimed(self, before: Owned, taken: set[Place]) -> None:
        """E3, E4: what the index lost in a call that took `taken`."""
        after = self.sut.owned()
        lost = set(before.cached - after.cached)
        if not lost:
            return
        self.events.append("reclaim")
        self._due.clear()
        for pool in {p.pool for p in lost}:
            enough = checks.free_suffices(before, taken, pool)
            self._expect(not enough, "HK-E3", f"reclaimed {sorted(lost)} although enough of {pool} was free")
        if self.capabilities.reclaim_order == "lru":
            survivors = set(after.cached - after.held) & set(before.cached - before.held)
            whole = {p for p in survivors if p.slots == 1}
            self._all(checks.order({p for p in lost if p.slots == 1}, whole, self._idle_since))

    # ----------------------------------------------------------------------------------------------- usefulness
    def _best(self, live: Live, budget: int | None, owned: Owned) -> tuple[int, bool]:
        """The deepest hit that is cached whole and affordable, and whether admission is possible at all."""
        c = self.capabilities
        if self.quiet:
            return 0, False
        possible = self._affordable(live, 0, budget, owned)
        if not c.prefix_cache:
            return 0, possible
        unit = c.grid_tokens or c.block_tokens
        contents = checks.Contents(c, self.ghost, owned.cached)
        for depth in range((len(live.tokens) - 1) // unit * unit, 0, -unit):
            places = contents.whole(live.namespace, live.tokens, depth)
            if places is not None:
                if checks.fits(c.pools, owned, self._cost(live, depth, budget), places):
                    return depth, True
                break
        return 0, possible

    def _affordable(self, live: Live, depth: int, budget: int | None, owned: Owned) -> bool:
        c = self.capabilities
        if not depth:
            return checks.fits(c.pools, owned, self._cost(live, 0, budget))
        places = checks.Contents(c, self.ghost, owned.cached).whole(live.namespace, live.tokens, depth)
        return places is None or checks.fits(c.pools, owned, self._cost(live, depth, budget), places)

    def _cost(self, live: Live, depth: int, budget: int | None) -> checks.Demand:
        stop = len(live.tokens) if budget is None else min(len(live.tokens), depth + budget)
        return checks.cost(self.capabilities, depth, stop, self._boundaries(depth, stop), fresh=True)

    def _boundaries(self, start: int, stop: int) -> int:
        grid = self.capabilities.grid_tokens
        return stop // grid - start // grid if grid else 0

    def _room_for(self, live: Live, view: View, stop: int, owned: Owned) -> bool:
        c = self.capabilities
        have = max((len(row) for row in view.tables), default=0) * c.block_tokens
        kept = self._boundaries(live.planned, stop)
        blocks = checks.cost(c, have, max(have, stop), kept, fresh=False)
        return checks.fits(c.pools, owned, blocks)

    def _last_due(self, live: Live) -> int:
        """The deepest boundary that everything committed so far, and nothing reclaimed since, promises to hit."""
        c = self.capabilities
        if not c.every_boundary or not c.prefix_cache:
            return 0
        unit = c.grid_tokens or c.block_tokens
        for depth in range((len(live.tokens) - 1) // unit * unit, 0, -unit):
            wanted = {("blocks", live.namespace, live.tokens[:b]) for b in range(unit, depth + 1, unit)}
            if c.grid_tokens:
                wanted.add(("state", live.namespace, live.tokens[:depth]))
            if wanted <= self._due:
                return depth
        return 0
