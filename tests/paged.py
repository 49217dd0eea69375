"""Sequences whose keys and values lie in scattered blocks of a poisoned pool, for the tests of attention and loops."""

from dataclasses import dataclass, field

import torch

from hybridkv import ops


def indices(*values):
    return torch.tensor(values, dtype=torch.int32)


def same(a, b):
    """Equal bits, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


@dataclass
class Sequences:
    """Random keys, values and queries, `[tokens, heads, dim]` each, of sequences of given lengths."""

    lengths: list[int]
    layout: ops.KVLayout
    group: int = 3
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    key: list[torch.Tensor] = field(init=False)
    value: list[torch.Tensor] = field(init=False)
    query: list[torch.Tensor] = field(init=False)

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)
        heads, dim = self.layout.kv_heads, self.layout.head_dim

        def draw(n, width):
            return torch.randn(n, width, dim, generator=g).to(self.dtype)

        self.key = [draw(n, heads) for n in self.lengths]
        self.value = [draw(n, heads) for n in self.lengths]
        self.query = [draw(n, heads * self.group) for n in self.lengths]

    @property
    def heads(self):
        return self.layout.kv_heads * self.group

    def place(self, rows, layout=None, seed=None, extra_blocks=1):
        """Write sequences `rows` into a pool of NaN; blocks are shuffled by `seed`. Returns pool and table."""
        layout = layout or self.layout
        blocks = [-(-self.lengths[r] // layout.block_tokens) for r in rows]
        wide = max(blocks, default=0) + extra_blocks
        order = list(range(sum(blocks) + 2))
        if seed is not None:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)).tolist()
        step = -(-layout.extent // layout.granule)
        pool = torch.full((len(order) * step * layout.granule,), float("nan"), dtype=self.dtype)
        table = torch.full((len(rows), wide), -1, dtype=torch.int32)
        for i, n in enumerate(blocks):
            table[i, :n] = indices(*(step * order.pop() for _ in range(n)))
        for i, r in enumerate(rows):
            positions = torch.arange(self.lengths[r], dtype=torch.int32)
            where = torch.full_like(positions, i)
            ops.write_kv(pool, self.key[r], self.value[r], table, where, positions, layout=layout)
        return pool, table

    def exact(self, row, position, window=0):
        """Attention of one position in fp64, `[heads, dim]`."""
        first = max(0, position + 1 - window) if window else 0
        k, v = (
            x[row][first : position + 1].double().repeat_interleave(self.group, 1)
            for x in (self.key, self.value)
        )
        scores = (
            torch.einsum("hd,nhd->hn", self.query[row][position].double(), k) * self.layout.head_dim**-0.5
        )
        return torch.einsum("hn,nhd->hd", scores.softmax(-1), v)


def decode(
    pool, table, sequences, rows, lengths, *, impl, layout=None, out_dtype=torch.float32, names=None, **kwargs
):
    """Decode the newest position of prefixes of sequences; `names` are the table's rows, in order if not given."""
    layout = layout or sequences.layout
    query = torch.stack([sequences.query[r][n - 1] for r, n in zip(rows, lengths, strict=True)])
    out = torch.full(query.shape, float("nan"), dtype=out_dtype)
    workspace = torch.full((ops.decode_workspace(len(rows), sequences.heads, table, layout),), float("nan"))
    names = indices(*range(len(rows))) if names is None else names
    ops.decode_attention(
        pool, query, table, names, indices(*lengths), out, workspace, layout=layout, impl=impl, **kwargs
    )
    return out


def prefill(
    pool, table, sequences, rows, spans, *, impl, layout=None, out_dtype=torch.float32, names=None, **kwargs
):
    """Prefill positions [begin, end) of sequences, packed in the given order; returns one output per sequence."""
    counts = [end - begin for begin, end in spans]
    query = torch.cat([sequences.query[r][b:e] for r, (b, e) in zip(rows, spans, strict=True)])
    out = torch.full(query.shape, float("nan"), dtype=out_dtype)
    start = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    names = indices(*range(len(rows))) if names is None else names
    ops.prefill_attention(
        pool, query, start, table, names, indices(*(e for _, e in spans)), out,
        layout=layout or sequences.layout, max_query=max(counts), impl=impl, **kwargs,
    )  # fmt: skip
    return out.split(counts)
