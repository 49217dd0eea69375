"""Requests: the rows `cache.*`, and joint lookups `tree.match`."""

from benches.harness import measure, row
from benches.layouts import cache, prompt

SHAPES = (("fa", 16), ("fa+1", 16), ("fa+3", 16), ("fa+3", 528))
BLOCKS = 128


def rows():
    for layout, block in SHAPES:
        yield from one_layout(layout, block)
    yield from lookups()


def one_layout(layout, block):
    shape = f"{layout} block={block} blocks={BLOCKS}"
    count = 64 if block == 16 else 16
    prompts = [prompt(r, BLOCKS, block) for r in range(count)]
    pages = 65_536 if block == 16 else 16_384

    def fresh():
        return (cache(layout, block, pages),)

    def waiting():
        c = cache(layout, block, pages)
        return c, [c.request(r, p) for r, p in enumerate(prompts)]

    def admitted():
        c, rs = waiting()
        for r in rs:
            c.admit(r)
        return c, rs

    def committed():
        c, rs = admitted()
        for r in rs:
            c.commit(r, r.length, [1])
        return c, rs

    def warm():
        c, rs = committed()
        for r in rs:
            c.release(r)
        return c, [c.request(1000 + r, p) for r, p in enumerate(prompts)]

    def decode(c, rs):
        c.extend_many(rs, [r.planned + 1 for r in rs])

    actions = {
        "cache.hash_prompt": (lambda c: [c.request(r, p) for r, p in enumerate(prompts)], fresh),
        "cache.admit_cold": (lambda c, rs: [c.admit(r) for r in rs], waiting),
        "cache.extend_decode": (decode, committed),
        "cache.release": (lambda c, rs: [c.release(r) for r in rs], committed),
        "cache.admit_warm": (lambda c, rs: [c.admit(r) for r in rs], warm),
    }
    for name, (action, setup) in actions.items():
        yield row(name, shape, "request", measure(action, setup=setup, rounds=5), count)
    c, rs = warm()
    yield row("cache.match_hit", shape, "request", measure(lambda: [c.match(r) for r in rs], inner=20), count)


def lookups():
    """2,048 tokens, 64 chains cached, hashed before: blocks of 16 and of 512 tokens."""
    for block in (16, 512):
        c = cache("fa+1", block)
        for r in range(64):
            q = c.request(r, prompt(r, 2048 // block, block))
            c.admit(q)
            c.commit(q, q.length)
            c.release(q)
        rs = [c.request(100 + r, prompt(r, 2048 // block, block)) for r in range(64)]
        shape = f"tokens=2048 chains=64 page={block}"
        yield row(
            "tree.match", shape, "request", measure(lambda c=c, rs=rs: [c.match(r) for r in rs], inner=50), 64
        )
