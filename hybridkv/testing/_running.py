"""Steps run on ghost memory: source, blocks and window are read and compared, then written.

Knows one step at a time; which operations there are is the business of `_world`.
"""

from __future__ import annotations

from hybridkv.testing._adapter import (
    Copy,
    Operations,
    Part,
    Place,
    State,
    Step,
    Tokens,
)
from hybridkv.testing._bench import DECODED, ZERO, Bench, Live
from hybridkv.testing._ghost import Meaning

CONV = "conv"


def _recurrent(state: State | None) -> State:
    return tuple(item for item in state or () if item[0].kind != CONV)


def _lines(state: State | None) -> State:
    return tuple(item for item in state or () if item[0].kind == CONV)


class Running(Bench):
    """A bench on which plans run."""

    def _fresh(self, step: Step, held: set[Place], hit: int = 0) -> set[Place]:
        """Units that the step was newly given."""
        first = hit // self.capabilities.block_tokens
        found = {place for row in step.tables for place in row[first:]}
        states = [s for _, s in step.writes] + [s for s in (step.destination, step.window) if s]
        found.update(place for state in states for _, place in state)
        return found - held

    def _run(self, live: Live, computed: int, token: int) -> tuple[Step, Tokens]:
        """Execute the oldest step of a request up to `computed`; the tokens that become known with it."""
        step = live.steps[0]
        unknown = max(0, computed - len(live.tokens))
        sampled = computed >= len(live.tokens)
        new = (token,) * (unknown + sampled)
        for place in live.fresh[0]:
            self.ghost.poison(place)
        self._operate(step.before)
        self._read_state(live, step)
        tokens = live.tokens + new
        marks = live.marks + tuple(
            self._mark(live, p, tokens[p]) for p in range(len(live.marks), len(tokens))
        )
        self._read_blocks(live, step, marks)
        self._write_blocks(live, step, computed, marks)
        self._write_states(live, step, computed, marks)
        live.marks = marks
        return step, new

    def _committed(self, live: Live, step: Step, computed: int, new: Tokens) -> None:
        c = self.capabilities
        live.steps.pop(0)
        live.fresh.pop(0)
        live.tokens += new
        live.home, live.target = self._home(step, computed), step.destination
        live.window, live.tables = step.window, step.tables
        unit = c.grid_tokens or c.block_tokens
        last = computed if c.decode_published else min(computed, live.prompt)
        for b in range((live.computed // unit + 1) * unit, last + 1, unit):
            self._due |= {(what, live.namespace, live.tokens[:b]) for what in ("blocks", "state")}
        live.computed = computed
        if live.steps and computed < step.stop:
            self._broken("HK-A0", "a short commit was accepted with later steps in flight")

    def _home(self, step: Step, computed: int) -> State | None:
        """Where the state at `computed` is: where it went, or where it was read if no end of a chunk was passed."""
        moved = self._fold(computed) > self._fold(step.start)
        recurrent = self._target(step, self._fold(computed)) if moved else step.source
        lines = self._target(step, computed)
        return _recurrent(recurrent) + _lines(lines) or None

    def _target(self, step: Step, position: int) -> State | None:
        """Where the state at `position` goes: into the first write not before it, else the destination.

        A running state of its own is always the destination; what is written at boundaries are copies of it.
        """
        if self.capabilities.live:
            return step.destination
        return next((state for p, state in step.writes if p >= position), step.destination)

    def _mark(self, live: Live, position: int, token: int) -> int:
        own = not self.capabilities.decode_published and position >= live.prompt
        return token + DECODED if own else token

    def _fold(self, position: int) -> int:
        """What a recurrent state at `position` has absorbed: replay decode advances it at chunk ends only."""
        return position - position % self.capabilities.chunk_tokens if self.capabilities.replay else position

    def _absorbed(self, part: Part, position: int) -> int:
        return position if part.kind == CONV else self._fold(position)

    def _read_state(self, live: Live, step: Step) -> None:
        if not self.capabilities.grid_tokens:
            return
        fold = self._fold(step.start)
        kinds = {line.kind for line in self.capabilities.checkpoint}
        needed = (fold and kinds - {CONV} and not _recurrent(step.source)) or (
            step.start and CONV in kinds and not _lines(step.source)
        )
        self._expect(not needed, "HK-B5", f"a step from {step.start} reads no state")
        for part, place in step.source or ():
            got = self.ghost.read(place)
            want = live.marks[: self._absorbed(part, step.start)]
            rule = "HK-B5" if got is None else "HK-B3" if want else "HK-D3"
            ok = got == (Meaning(part, live.namespace, want) if want else ZERO)
            self._expect(
                ok, rule, f"a step from {step.start} reads {part} at {place} and finds {got}, not {want}"
            )
        for p in range(fold, step.start):
            self._expect_window(live, step.window, p)

    def _expect_window(self, live: Live, window: State | None, position: int) -> None:
        offset = position % self.capabilities.chunk_tokens
        for part, place in window or ():
            got = self.ghost.read(place, offset)
            want = Meaning(part, live.namespace, live.marks[: position + 1])
            self._expect(
                got == want, live.origin or "HK-B3", f"the window holds {got} for position {position}"
            )
        self._expect(bool(window), "HK-B5", f"no window holds the inputs of position {position}")

    def _read_blocks(self, live: Live, step: Step, marks: Tokens) -> None:
        for p in range(step.start):
            for part, place, offset in self._cells(step.tables, p):
                got = self.ghost.read(place, offset)
                want = Meaning(part, live.namespace, marks[: p + 1])
                rule = "HK-B5" if got is None else "HK-B1"
                self._expect(got == want, rule, f"a step reads {place} for position {p} and finds {got}")

    def _write_blocks(self, live: Live, step: Step, computed: int, marks: Tokens) -> None:
        relied = self._relied(live)
        for p in range(step.start, step.stop):
            known = marks[: p + 1] if p < computed else (*marks[:computed], -1 - p)
            for part, place, offset in self._cells(step.tables, p):
                self._expect(place not in relied, "HK-D2", f"a step writes {place}, which others rely on")
                self.ghost.write(place, Meaning(part, live.namespace, known), offset)

    def _write_states(self, live: Live, step: Step, computed: int, marks: Tokens) -> None:
        relied = self._relied(live)
        if not self.capabilities.grid_tokens:
            return
        target, fold = self._target(step, computed), self._fold(computed)
        self._expect(target is not None, "HK-D5", f"a step to {computed} has no destination")
        chunk = self.capabilities.chunk_tokens
        for part, place in step.window or ():
            for p in range(step.start, computed):
                self.ghost.write(place, Meaning(part, live.namespace, marks[: p + 1]), p % chunk)
        self._expect(
            fold == computed or step.window is not None,
            "HK-B5",
            f"a step to {computed} has no window for its inputs",
        )
        moved = fold > self._fold(step.start)
        written = [(position, state) for position, state in step.writes if position <= computed]
        written += [(fold, _recurrent(self._target(step, fold)) if moved else ()), (computed, _lines(target))]
        for position, state in written:
            for part, place in state:
                self._expect(place not in relied, "HK-D2", f"a step writes {place}, which others rely on")
                self.ghost.write(place, Meaning(part, live.namespace, marks[:position]))

    def _cells(self, tables: tuple[tuple[Place, ...], ...], p: int) -> list[tuple[Part, Place, int]]:
        k, offset = divmod(p, self.capabilities.block_tokens)
        return [(Part("attention", g), row[k], offset) for g, row in enumerate(tables)]

    def _relied(self, live: Live) -> set[Place]:
        """What others rely on: published units, other requests' units, leases."""
        relied = set(self.sut.owned().cached)
        for other in self.live:
            if other is not live:
                relied |= self.sut.view(other.handle).places()
        return relied.union(place for _, lease in self.leases for _, place in lease.state)

    def _operate(self, operations: Operations) -> None:
        """Execute copies and clears in order (D1)."""
        written: set[Place] = set()
        for op in operations:
            self._expect(self.ghost.inside(op.destination), "HK-D5", f"{op} writes outside its pool")
            cached = self.sut.owned().cached
            self._expect(op.destination not in cached, "HK-D2", f"{op} overwrites what is published")
            if isinstance(op, Copy):
                self._expect(op.source != op.destination, "HK-D1", f"{op} copies a unit onto itself")
                self._expect(op.source not in written, "HK-D1", f"{op} reads what an earlier one overwrote")
                self.ghost.copy(op.source, op.destination)
            else:
                self.ghost.write(op.destination, ZERO)
            written.add(op.destination)
