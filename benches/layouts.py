"""The layouts of the engines' table: one attention group, and N state groups beside it, on pages of one size."""

import numpy as np

from hybridkv import CachePolicy, HybridCache, ModelGeometry, Organization
from hybridkv.alloc.organization import Placement, Pool, StateKind
from hybridkv.geometry import AttentionSpec, RecurrentSpec

LAYOUTS = {"fa": 0, "fa+1": 1, "fa+3": 3}


def organization(layout, block_tokens):
    groups = LAYOUTS[layout]
    g = ModelGeometry(
        name=layout,
        layers=1 + groups,
        attention=AttentionSpec(layers=1, kv_heads=1, key_dim=8, value_dim=8),
        recurrent=RecurrentSpec.derived(kind="mamba2", layers=groups, state_shape=(8, 4, 8), conv_width=4)
        if groups
        else None,
        chunk_tokens=16,
    )
    placements = {StateKind.ATTENTION: Placement(pool="shared", payload_bytes=32 * block_tokens, pages=1)}
    if groups:
        placements[StateKind.SSM] = Placement(pool="shared", payload_bytes=g.ssm_bytes, pages=1)
        placements[StateKind.CONV] = Placement(
            pool="shared", payload_bytes=g.conv_bytes, within=StateKind.SSM, offset=1024
        )
    return Organization(
        name=layout,
        geometry=g,
        pools=(Pool(name="shared", page_bytes=1 << 16),),
        placements=placements,
        block_tokens=block_tokens,
        grid_tokens=32 * block_tokens if block_tokens == 16 else block_tokens,
    )


def cache(layout, block_tokens, pages=65_536, **policy):
    policy = CachePolicy(**({"decode": "update_shared"} | policy))
    return HybridCache(organization(layout, block_tokens), pages={"shared": pages}, policy=policy)


def prompt(r, blocks, block_tokens):
    """The table's prompts: token i of request r is (7919 r + i) mod 50000."""
    return (7919 * r + np.arange(blocks * block_tokens + 5)) % 50_000
