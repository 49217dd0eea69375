"""Prefill attention stores its tile in one of two forms, by target: both write the same rows and no others."""

import pytest
import torch

from hybridkv import ops
from hybridkv.testing.exact import draw, indices, same
from hybridkv.triton import attention

CPU = torch.device("cpu")
LAYOUT = ops.KVLayout.token_major(2, 16, 8, 16)


@pytest.mark.parametrize("lengths", [(5, 9), (33, 1), (16, 40)])
def test_a_vector_and_a_tile_write_the_same_rows(lengths, monkeypatch):
    pool = draw(CPU, 12 * LAYOUT.extent, seed=0)
    step = LAYOUT.extent // LAYOUT.granule
    table = indices([[step * i for i in range(6)], [step * i for i in range(6, 12)]], CPU)
    counts = [min(3, lengths[0]), lengths[1]]  # the end of a prompt, and a whole one
    query, outs = (
        draw(CPU, sum(counts), 6, 16, seed=1),
        [],
    )  # 3 heads of a KV head: a tile of 16 rows has unused ones
    for flat in (False, True):
        monkeypatch.setattr(attention, "_flat", lambda _, flat=flat: flat)
        room = torch.full((sum(counts) + 1, 8, 16), float("nan"))
        ops.prefill_attention(
            pool, query, indices([0, counts[0], sum(counts)], CPU), table, indices([0, 1], CPU), indices(lengths, CPU),
            room[:-1, :6], layout=LAYOUT, max_query=max(counts), impl="triton",
        )  # fmt: skip
        assert not room[:-1, :6].isnan().any()
        assert room[-1].isnan().all() and room[:, 6:].isnan().all()
        outs.append(room)
    assert same(*outs)
