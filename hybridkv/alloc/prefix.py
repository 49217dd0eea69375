"""Which states exist for which token prefix: hash chains, the index, the joint match.

Owns identity (I9) and discoverability. Does not know pages, references or requests; `HybridCache` publishes a state
here after the step that wrote it has completed (I7), and removes it before a page goes elsewhere (I3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.alloc.checkpoint import AttentionBlock, Checkpoint, Lifecycle
from hybridkv.errors import CorruptionError

Tokens = NDArray[np.int32]


class TokenHash(Protocol):
    """Digest of a block of tokens behind a prefix. Injected; the default is `Blake2b`.

    `collision_resistant`: whether equal digests may stand for equal tokens. Where it is False the cache compares
    tokens, block by block, along the whole prefix: identity never rests on a weak hash alone.
    """

    collision_resistant: bool

    def __call__(self, parent: bytes, tokens: bytes) -> bytes:
        """Digest of `tokens` (int32, little endian) behind the prefix whose digest is `parent`."""
        ...


class Blake2b:
    """256-bit BLAKE2b, the same on every machine, so that digests may travel with a saved checkpoint."""

    collision_resistant = True

    def __call__(self, parent: bytes, tokens: bytes) -> bytes:
        digest = hashlib.blake2b(parent, digest_size=32)
        digest.update(tokens)
        return digest.digest()


class ExactKey:
    """A weak digest with the tokens behind it: equal only if the whole prefix is equal."""

    __slots__ = ("digest", "parent", "tokens")

    def __init__(self, digest: bytes, parent: ExactKey | bytes, tokens: bytes) -> None:
        self.digest, self.parent, self.tokens = digest, parent, tokens

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        a: object = self
        b = other
        while isinstance(a, ExactKey) and isinstance(b, ExactKey):
            if a is b:
                return True
            if a.tokens != b.tokens:
                return False
            a, b = a.parent, b.parent
        return isinstance(a, bytes) and a == b  # one of them is still a key: prefixes of different lengths


Key = bytes | ExactKey


def root_key(hash_tokens: TokenHash, *identity: str) -> bytes:
    """The digest that every chain of one identity starts from: model fingerprint, salt, numerics, loop policy."""
    text = b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in identity)
    return hash_tokens(b"", text) if hash_tokens.collision_resistant else text


def extend_chain(
    chain: list[Key], root: bytes, tokens: Tokens, block_tokens: int, hash_tokens: TokenHash
) -> None:
    """Append the key of every full block of `tokens` that `chain` does not cover yet. O(tokens not covered)."""
    raw = tokens[len(chain) * block_tokens :].astype("<i4", copy=False).tobytes()
    width = 4 * block_tokens
    for start in range(0, len(raw) - width + 1, width):
        parent = chain[-1] if chain else root
        block = raw[start : start + width]
        chain.append(next_key(parent, block, hash_tokens))


def next_key(parent: Key, block: bytes, hash_tokens: TokenHash) -> Key:
    """The key of one more block behind `parent`."""
    if hash_tokens.collision_resistant:
        return hash_tokens(parent, block)  # type: ignore[arg-type]  # a chain holds one type of key
    digest = hash_tokens(parent.digest if isinstance(parent, ExactKey) else parent, block)
    return ExactKey(digest, parent, block)


class Match(NamedTuple):
    """How deep a prefix is cached, in tokens; all three are boundaries that leave a token to compute.

    `joint`: deepest complete checkpoint that attention reaches (J): where a request would start. `attention`:
    deepest boundary that attention alone reaches (A_max). `recurrent`: deepest complete checkpoint on the prefix,
    whether or not attention reaches it (R_max).
    """

    joint: int
    attention: int
    recurrent: int


class Found(NamedTuple):
    """A match with the states behind it: attention blocks as far as they reach, checkpoints usable at joint depths."""

    match: Match
    blocks: list[AttentionBlock]
    checkpoints: list[Checkpoint]


class PrefixIndex:
    """Published states by key. Lookups cost one dictionary access per block of the prefix."""

    def __init__(self, block_tokens: int, grid_tokens: int, *, attention: bool, recurrent: bool) -> None:
        self.block_tokens, self.grid_tokens = block_tokens, grid_tokens
        self._blocks_per_grid = grid_tokens // block_tokens
        self._attention, self._recurrent = attention, recurrent
        self.blocks: dict[Hashable, AttentionBlock] = {}
        self.checkpoints: dict[Hashable, Checkpoint] = {}

    def shared_keys(self, chain: Sequence[Key]) -> list[Key]:
        """Equal keys, as the objects that published states hold: one copy each, and lookups meet identical objects."""
        get = self.blocks.get
        return [key if (block := get(key)) is None else block.key for key in chain]  # type: ignore[misc]

    def find(self, chain: Sequence[Key], tokens: int) -> Found:
        """Match a prompt of `tokens` tokens whose chain is `chain`. Changes nothing."""
        grid, step = self.grid_tokens, self._blocks_per_grid
        usable = (tokens - 1) // grid if self._recurrent else (tokens - 1) // self.block_tokens
        blocks: list[AttentionBlock] = []
        if self._attention:
            limit = (tokens - 1) // self.block_tokens
            found = list(map(self.blocks.get, chain if len(chain) == limit else chain[:limit]))
            blocks = found if all(found) else found[: found.index(None)]  # type: ignore[assignment]
            if not self._recurrent:
                depth = len(blocks) * self.block_tokens
                return Found(Match(depth, depth, depth), blocks, [])
            reached = min(usable, len(blocks) // step)
        else:
            reached = usable
        get = self.checkpoints.get
        complete = [c for key in chain[step - 1 : usable * step : step] if (c := get(key)) is not None]
        joint = complete
        if complete and complete[-1].position > reached * grid:
            joint = [c for c in complete if c.position <= reached * grid]
        depth = joint[-1].position if joint else 0
        deepest = complete[-1].position if complete else 0
        return Found(Match(depth, reached * grid, deepest), blocks, joint)

    def publish(self, state: AttentionBlock | Checkpoint, key: Key) -> bool:
        """Make a reserved state discoverable; False where an equal one is already, which then stays the one."""
        table: dict[Hashable, AttentionBlock] | dict[Hashable, Checkpoint]
        table = self.blocks if isinstance(state, AttentionBlock) else self.checkpoints
        if key in table:
            return False
        state.key, state.stage = key, Lifecycle.PUBLISHED
        table[key] = state  # type: ignore[assignment]  # the table was chosen by the state's type
        return True

    def remove(self, state: AttentionBlock | Checkpoint) -> None:
        """The state is discoverable no more."""
        table = self.blocks if isinstance(state, AttentionBlock) else self.checkpoints
        if table.pop(state.key, None) is not state:
            raise CorruptionError("I3", f"{state!r} left an index that does not hold it")
        state.stage = Lifecycle.LOST
