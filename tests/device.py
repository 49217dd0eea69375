"""A pretend device for planner tests: executes step plans on memory that holds token prefixes instead of numbers.

Before a row computes, every position below it, and its running state, must hold the row's own prefix; so wrong sharing,
early reuse, a lost copy and a read before the write show up where they would do harm (HK-P4, HK-P8, I2, I10).
"""

from hybridkv.alloc.organization import StateKind

ATTENTION = StateKind.ATTENTION


class Device:
    def __init__(self, planner, text):
        """`text(request)` gives the tokens that the request will have come to know."""
        self.planner, self.text = planner, text
        self.memory = {}
        self.last = {}  # by handle: the newest plan

    def run(self, step):
        for i, handle in enumerate(step.handles.tolist()):
            request = self.planner.cache.at(handle)
            plan = step.plans.get(i)
            if plan is None:
                assert step.in_place[i] or not self.planner.cache.growth.recurrent
                plan = self.last[handle]
                source = plan.destination
            else:
                source = plan.source
            self.last[handle] = plan
            self.row(self.text(request), plan, source, int(step.start[i]), int(step.stop[i]))

    def row(self, tokens, plan, source, start, stop):
        width = self.planner.cache.organization.block_tokens
        recurrent = self.planner.cache.growth.recurrent
        for p in range(start):
            for unit in plan.attention[:, p // width].tolist():
                assert self.memory.get((ATTENTION, unit, p % width)) == tokens[: p + 1], f"KV of position {p}"
        if recurrent:
            assert self.state(source) == tokens[:start], f"state at {start} of {plan}"
        for p in range(start, stop):
            for unit in plan.attention[:, p // width].tolist():
                self.memory[ATTENTION, unit, p % width] = tokens[: p + 1]
        if recurrent:
            for position, state in plan.writes:
                if start < position <= stop:
                    self.write(state, tokens[:position])
            self.write(plan.destination, tokens[:stop])

    def state(self, state):
        if state is None:
            return ()
        held = {self.memory.get((kind, unit, -1)) for kind, units in state for unit in units.ravel().tolist()}
        assert len(held) == 1, f"parts of {state} disagree: {held}"
        return held.pop()

    def write(self, state, prefix):
        for kind, units in state:
            for unit in units.ravel().tolist():
                self.memory[kind, unit, -1] = prefix
