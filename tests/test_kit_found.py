"""What the kit has found in the allocator: one trace each, as short as the search left it.

Every entry broke the rule of its name when it was found; `World` raises if any rule breaks again.
"""

from typing import Any

import pytest

from hybridkv.testing import World
from hybridkv.testing.cache_adapter import CacheSpec, make_cache


def shape(**fields: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(fields.items())


S2 = CacheSpec(organization="s2", pages=(5,))
FIVE, THREE, TWO = (0, 0, 0, 0, 1), (0, 0, 1), (0, 0)

FOUND: dict[str, tuple[CacheSpec, list[tuple[Any, ...]]]] = {
    # HK-G5: a held page that reclaim met on its way lost its place in the reclaim order for good
    "reclaim forgets the place of a pinned hit": (
        CacheSpec(organization="d0", pages=(4, 3)),
        [
            ("admit", TWO, None, None),
            ("commit", 0, None, 1),
            ("release", 0),
            ("admit", THREE, None, 2),
            ("commit", 0, None, 1),
            ("admit", THREE, None, 3),
            ("round", 1),
            ("preempt", 0),
            ("probe", ("admit", THREE, None, 1)),
        ],
    ),
    # HK-G5: a state that was lost with its page, not met by reclaim itself, came back with two entries and too early
    "a coupled loss comes back twice": (
        S2,
        [
            ("admit", (0, 0, 0, 0, 1, 1, 0), None, 2),
            ("preempt", 0),
            ("admit", TWO, None, 2),
            ("admit", THREE, None, 1),
            ("commit", 2, None, 1),
            ("round", 1),
            ("preempt", 2),
            ("probe", ("resume", 2, 2)),
        ],
    ),
    # HK-G5: a slab whose page had been met while it was held came back with a parked stamp, ahead of all others
    "a parked slab comes back too early": (
        CacheSpec(organization="nested", pages=(6,), decode="update"),
        [
            ("serve", (1, 1, 0, 0, 1), None),
            ("lease", 0),
            ("serve", TWO, None),
            ("end_lease", 0),
            ("probe", ("admit", (0, 0, 0, 0, 1, 1, 0), 7, None)),
        ],
    ),
    # HK-A0: a block of several layer groups with two slots in one slab was lost twice, which raised CorruptionError
    "several slots of one state in a slab": (
        CacheSpec(organization="nested", pages=(14,), shape=shape(groups=(2, 3))),
        [
            ("admit", (1, 1, 0, 0, 1), None, 3),
            ("release", 0),
            ("admit", (0, 0, 0, 0, 1, 1, 0), None, 2),
            ("commit", 0, 1, 1),
            ("round", 1),
            ("fork", 0),
            ("lease", 0),
            ("preempt", 1),
            ("release", 0),
            ("admit", TWO, None, 2),
            ("end_lease", 0),
            ("admit", (0, 0, 0, 0, 1, 1, 0), None, 3),
        ],
    ),
    # HK-A0: after a short commit on a boundary the batched step had neither a plan nor a state to work in place on
    "short commit on a boundary, then a batch": (
        CacheSpec(organization="s0", pages=(5,)),
        [("admit", THREE, None, 3), ("commit", 0, 2, 1), ("round", 1)],
    ),
    # HK-G6: a token hash that raised left the commit half done
    "the hash raises in commit": (
        CacheSpec(organization="s0", pages=(5,)),
        [("admit", THREE, None, 3), ("fail", ("commit", 0, None, 1), 0), ("commit", 0, None, 1)],
    ),
    # HK-G6: a token hash that raised in `request` lost a row
    "the hash raises in request": (S2, [("fail", ("admit", FIVE, None, None), 1)]),
    # HK-D4: without `hold_source`, the state of a request that stopped on a boundary was given back as it was written
    "the running state is given back on its boundary": (
        CacheSpec(organization="s2", pages=(6,), hold_source=False),
        [("admit", TWO, None, None), ("commit", 0, None, 1), ("round", 1)],
    ),
    # HK-B6: decode-made states were published as the prompt's after a truncation below the prompt
    "truncated below the prompt, then decoded": (
        CacheSpec(organization="nested", pages=(6,), decode="update"),
        [
            ("admit", TWO, None, 2),
            ("commit", 0, 1, 1),
            ("fork", 0),
            ("truncate", 1, 1),
            ("extend", 1, 2),
            ("commit", 1, None, 1),
        ],
    ),
    # HK-B5: the same mistake with replay decode: no window for inputs behind the truncated prompt
    "truncated below the prompt, then replayed": (
        CacheSpec(
            organization="s0",
            pages=(8,),
            shape=shape(window=True, chunk_tokens=2, grid_tokens=4),
            decode="replay",
        ),
        [
            ("admit", FIVE, None, 3),
            ("commit", 0, None, 1),
            ("truncate", 0, 4),
            ("round", 1),
            ("round", 1),
        ],
    ),
    # HK-D4: without `hold_source`, a checkpoint that replay decode still reads is held until a chunk has ended behind it
    "the checkpoint is read until the first end of a chunk": (
        CacheSpec(
            organization="s0",
            pages=(9,),
            shape=shape(window=True, chunk_tokens=4, grid_tokens=4),
            decode="replay",
            hold_source=False,
        ),
        [("admit", FIVE, None, None), ("commit", 0, None, 1), ("round", 1), ("round", 1)],
    ),
    # HK-E2: without recurrent state a hit that was too dear was refused, where a miss would have fit
    "attention only: no fall-back to a miss": (
        CacheSpec(organization="s1", pages=(4,), shape=shape(groups=(1, 0))),
        [
            ("admit", TWO, None, 2),
            ("commit", 0, None, 1),
            ("preempt", 0),
            ("admit", (1, 1, 0, 0), None, None),
            ("admit", (1, 1), None, 1),
            ("resume", 0, 2),
        ],
    ),
    # HK-A0: weak digests of prefixes of different lengths collided, and comparing the keys never ended
    "keys of different depths collide": (
        CacheSpec(organization="s0", pages=(10,), buckets=1),
        [("admit", (0, 0, 1, 0, 0), None, 3), ("admit", (0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1), None, 2)],
    ),
    # HK-D5: a batched step reached into blocks that were reserved, but that the last plan did not name
    "reserved blocks that no plan names": (
        CacheSpec(organization="s1", pages=(4,), shape=shape(groups=(1, 0))),
        [
            ("admit", FIVE, None, None),
            ("commit", 0, 3, 1),
            ("truncate", 0, 4),
            ("round", 1),
            ("round", 1),
        ],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    spec, trace = FOUND[name]
    world = World(make_cache, spec)
    for operation in trace:
        world.do(operation)
        world.check()
    world.drain()


def test_a_second_copy_takes_the_place_of_a_lost_first() -> None:
    """Two requests compute one prefix; the published copy goes while the other is held. What the second leaves behind
    was a tail behind a hole, cached and never found (I11)."""
    for organization, pages in (("s2", (12,)), ("nested", (8,))):
        world = World(make_cache, CacheSpec(organization=organization, pages=pages))
        for operation in (
            ("admit", FIVE, None, 3),
            ("admit", FIVE, None, 3),
            ("commit", 0, None, 1),
            ("commit", 1, None, 1),
            ("release", 0),
            ("clear",),
            ("extend", 0, 2),
            ("commit", 0, None, 1),
            ("release", 0),
            ("admit", FIVE, None, None),
        ):
            world.do(operation)
            world.check()
        assert world.live[0].computed == 4
