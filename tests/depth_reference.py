"""A second implementation of the rules D1-D38, written down as they read: whole lists, no shortcuts, cases only.

Slow on purpose, and shares no code with the planner. Where both agree on every launch of every drawn case, they read
the rules the same way.
"""

from math import ceil


class Request:
    def __init__(self, item):
        self.id, self.prompt, self.depths = item["id"], item["prompt"], list(item["depths"])
        self.filled = self.kv = self.cursor = self.blocks = self.overtaken = self.loop = self.passed = 0
        self.offloaded = False


class Reference:
    def __init__(self, case):
        knobs, pool = case.get("knobs") or {}, case["kv"]
        self.mode, self.rmax, self.planes, self.pool = case["mode"], case["rmax"], case["planes"], pool
        self.M = case["M"]
        self.W = min(case["W"], self.M)
        self.K = min(case["K"], self.W)
        self.S = max(1, self.W // 8) if case["S"] is None else min(case["S"], self.W)
        self.rho = case["rho"] or 0.0
        self.age_bound, self.lag = knobs.get("age_bound", 8), knobs.get("retire_lag", 0)
        self.coda_first = knobs.get("idle_order", "prefill_first") == "coda_first"
        self.run_limit = knobs.get("max_prefill_run")
        self.reserve = bool(pool) and pool.get("admission") == "reserve"
        self.N = pool["blocks"] if pool else 0
        self.free = self.N
        self.waiting, self.residents, self.pre, self.stalled, self.ready, self.core, self.coda = (
            [] for _ in range(7)
        )
        self.drain, self.launches, self.prefill_run, self.retiring, self.trace = False, 0, 0, [], []
        requests = [Request(item) for item in case["requests"]]
        if case["resident"]:
            for r in requests[: self.W]:
                r.filled = r.kv = r.prompt
                self.residents.append(r)
                self.pre.append(r)
            requests = requests[self.W :]
        arrive = {item["id"]: item.get("arrive", 0) for item in case["requests"]}
        self.coming = sorted(((arrive[r.id], i, r) for i, r in enumerate(requests)), key=lambda t: t[:2])

    def run(self):
        while self.waiting or self.residents or self.coming:  # D11
            self.tick()
        return self.trace

    def tick(self):
        now = self.launches
        if not self.waiting and not self.residents and self.coming:
            now = max(now, self.coming[0][0])
        while self.coming and self.coming[0][0] <= now:  # D9
            self.waiting.append(self.coming.pop(0)[2])
        while self.retiring and self.launches >= self.retiring[0][0] + 1:  # D12, D37
            self.leave(self.retiring.pop(0)[1])
        while self.stalled and self.take(self.stalled[0], self.stalled[0].kv + 1):  # D13
            self.ready.append(self.stalled.pop(0))
        for r in list(self.pre):  # D14
            self.pre.remove(r)
            if self.take(r, r.kv + 1):
                self.ready.append(r)
            else:
                self.stalled.append(r)
                self.event("stall", r)
        if not self.drain:  # D15
            for r in [r for r in self.waiting if r.offloaded]:
                if len(self.residents) >= self.W or not self.take(r, r.kv + 1):
                    break
                self.waiting.remove(r)
                r.offloaded = False
                self.residents.append(r)
                self.ready.append(r)
                self.event("restore", r)
        if any(step() for step in self.steps()):
            return
        if self.retiring:  # D37
            while self.retiring:
                self.leave(self.retiring.pop(0)[1])
            return
        if self.waiting or self.residents:
            self.preempt()

    def steps(self):
        when = lambda test, launch: lambda: bool(test()) and launch()  # noqa: E731
        prefill, prelude = self.prefill, when(lambda: self.ready, self.prelude)
        recurrent, coda = when(lambda: self.core, self.recurrent), when(lambda: self.coda, self.coda_launch)
        if self.mode == "refill":
            full = when(lambda: len(self.coda) >= self.K, self.coda_launch)
            early = when(lambda: self.coda_first and not self.core and self.coda, self.coda_launch)
            return [prelude, full, early, prefill, recurrent, coda]
        if self.mode == "norefill":
            return [recurrent, coda, prefill, prelude]
        return [prefill, when(lambda: self.ready, self.decode)]

    # blocks

    def take(self, r, tokens):  # D10
        if not self.pool:
            return True
        missing = max(0, ceil(tokens / self.pool["block_tokens"]) - r.blocks)
        if missing > self.free:
            return False
        self.free -= missing
        r.blocks += missing
        return True

    def leave(self, r):
        self.residents.remove(r)
        self.free += r.blocks
        r.blocks = 0
        self.drain = False

    def finish(self, r):  # D32
        if self.lag:
            self.retiring.append((self.launches, r))
        else:
            self.leave(r)

    # prefill

    def allowed(self):  # D19, D36
        others = self.core if self.mode == "refill" else self.ready
        if self.run_limit is not None and self.prefill_run >= self.run_limit and others:
            return False
        decoding = [r for r in self.residents if r.filled == r.prompt]
        if self.pool and not self.reserve and decoding and not self.free > self.rho * self.N:
            return False
        return self.middle() or (self.new() and self.W - len(self.residents) >= self.S)

    def middle(self):
        return [r for r in self.residents if 0 < r.filled < r.prompt]

    def new(self):  # D20
        return [] if self.drain or any(r.offloaded for r in self.waiting) else self.waiting[:64]

    def need(self, r):  # D38
        tokens = r.prompt + len(r.depths) + 1
        return ceil(min(tokens, self.pool.get("max_tokens") or tokens) / self.pool["block_tokens"])

    def prefill(self):
        if not self.allowed():
            return False
        left, rows, blocked, middle = self.M, [], [], self.middle()
        for r in middle + self.new():  # D21
            is_new = r not in middle
            if left == 0 or (is_new and len(self.residents) == self.W):
                break
            if rows and self.pool and not self.reserve and self.free < self.rho * self.N:
                break
            if is_new and self.reserve and sum(map(self.need, self.residents)) + self.need(r) > self.N:
                break
            k = min(left, r.prompt - r.filled)
            if not self.take(r, r.filled + k):  # D22
                if not is_new or r.overtaken == 8:
                    break
                blocked.append(r)
                continue
            if is_new:  # D23
                self.waiting.remove(r)
                self.residents.append(r)
                for b in blocked:
                    b.overtaken += 1
            r.filled += k
            r.kv += k
            left -= k
            rows.append((r, k))
            if any(b.overtaken == 8 for b in blocked):
                break
        if not rows:
            return False
        self.launches += 1
        self.prefill_run += 1
        done, emitted = [], 0
        for r, _ in rows:  # D25
            if r.filled == r.prompt:
                emitted += 1
                done += self.emitted(r)
        shown = [{"request": r.id, "loop": None, "tokens": k} for r, k in rows]
        self.entry("prefill", shown, done=done, tokens=sum(k for _, k in rows), emitted=emitted)
        return True

    # decode launches

    def emitted(self, r):
        if r.cursor == len(r.depths):
            self.finish(r)
            return [r.id]
        self.pre.append(r)
        return []

    def prelude(self):  # D26
        self.launches += 1
        rows, self.ready = self.ready, []
        for r in rows:
            r.loop = r.passed = 0
        self.core = [r for r in rows if r.cursor] + self.core + [r for r in rows if not r.cursor]
        self.entry("prelude", [{"request": r.id, "loop": None} for r in rows])
        return True

    def recurrent(self):  # D27, D28
        self.launches += 1
        self.prefill_run = 0
        loop = None if self.planes == "mixed" else self.plane()
        rows = [r for r in self.core if loop is None or r.loop == loop]
        over = [r for r in self.core if r not in rows]
        for r in over:
            r.passed += 1
        for r in rows:
            r.loop += 1
            r.passed = 0
        shown = [{"request": r.id, "loop": r.loop} for r in rows]
        gone = [r for r in rows if r.loop == r.depths[r.cursor]]
        self.core = [r for r in rows if r not in gone] + over
        self.coda += gone
        self.entry("recurrent", shown, exits=[r.id for r in gone], loops=1)
        return True

    def plane(self):
        if self.planes == "fifo":
            return self.core[0].loop
        oldest = max(r.passed for r in self.core)
        if oldest >= self.age_bound:
            return next(r.loop for r in self.core if r.passed == oldest)
        most = max(sum(q.loop == r.loop for q in self.core) for r in self.core)
        return next(r.loop for r in self.core if sum(q.loop == r.loop for q in self.core) == most)

    def coda_launch(self):  # D30
        self.launches += 1
        rows, self.coda = self.coda, []
        self.tokens_out("coda", rows, [{"request": r.id, "loop": None} for r in rows], 0)
        return True

    def decode(self):  # D31
        self.launches += 1
        self.prefill_run = 0
        rows, self.ready = self.ready, []
        self.tokens_out("decode", rows, [{"request": r.id, "loop": self.rmax} for r in rows], self.rmax)
        return True

    def tokens_out(self, stage, rows, shown, loops):
        done = []
        for r in rows:
            r.kv += 1
            r.cursor += 1
            done += self.emitted(r)
        self.entry(stage, shown, done=done, loops=loops, emitted=len(rows))

    # preemption and trace

    def preempt(self):  # D33-D35; drawn cases allow semantic change
        smallest = min(r.kv for r in self.stalled)
        r = [r for r in self.stalled if r.kv == smallest][-1]
        self.stalled.remove(r)
        self.leave(r)
        self.drain = True
        self.waiting.append(r)
        kv, more = r.kv, {}
        if self.pool["preemption"] == "offload":
            r.offloaded = True
        else:
            r.prompt, r.depths = r.kv + 1, r.depths[r.cursor + 1 :]
            r.filled = r.kv = r.cursor = r.overtaken = 0
            more = {"prompt": r.prompt, "depths_left": r.depths}
        self.entry("preempt", [{"request": r.id, "loop": None, "kv_tokens": kv, **more}])

    def event(self, stage, r):
        self.entry(stage, [{"request": r.id, "loop": None, "kv_tokens": r.kv}])

    def entry(self, stage, rows, *, exits=(), done=(), tokens=0, loops=0, emitted=0):  # D43
        counts = {
            "rows": len(rows), "tokens": tokens, "loops": loops, "emitted": emitted,
            "q_r": len(self.core), "q_c": len(self.coda), "q_p": len(self.waiting),
        }  # fmt: skip
        if self.pool:
            counts["free"] = self.free
        self.trace.append(
            {"stage": stage, "rows": rows, "exits": list(exits), "done": list(done), "counts": counts}
        )


def reference_trace(case):
    return Reference(case).run()
