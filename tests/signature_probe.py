"""Count the signatures that launches would compile, without a GPU; print {kernel: how many} twice as JSON.

Run without TRITON_INTERPRET. Launchers run as they are, on CPU tensors: a stand-in for the driver names a target, and
Triton's own cache hook, called with the key of every signature that is not compiled yet, declines to compile it.
"""

import itertools
import json

import torch
import triton
from triton.backends.compiler import GPUTarget

from hybridkv.kv_layout import KVLayout
from hybridkv.triton import attention, conv, delta, kv, loops, moves, ssd, ssu

BF16 = torch.bfloat16
BATCHES = (1, 2, 16, 17)
FUSED = 8 * 835  # Falcon-H1-7B's in_proj: no multiple of 16 elements


class Driver:
    """What a launch asks of a driver before it compiles."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def strided(shape, dtype, pad, shift):
    """A tensor whose rows are `pad` elements apart and whose first element lies `shift` behind an aligned address."""
    *outer, last = shape
    size = last + pad
    for n in outer:
        size *= n
    flat = torch.zeros(size + pad * (size // max(1, last)) + shift, dtype=dtype)
    strides = [last + pad]
    for n in reversed(outer[1:]):
        strides.insert(0, strides[0] * n)
    return flat[shift:].as_strided(shape, (*strides[-len(outer) :], 1) if outer else (1,))


def launch_all(batch, odd, data=0, fused=0):
    """Launch everything for `batch` rows: tables, lengths and per-head scalars as `odd`, rows of data as `data` says.

    `fused`: rows of data that fit are slices of rows of so many elements.
    """

    def ints(*shape):
        return strided(shape, torch.int32, odd, odd)

    def heads(*shape, dtype=BF16):
        return strided(shape, dtype, odd, odd)

    def rows(*shape):
        inner = 1
        for n in shape[1:]:
            inner *= n
        base = strided((shape[0], inner), BF16, fused - inner if fused >= inner else data, 0)
        return base.as_strided(shape, (base.stride(0), *torch.empty(shape[1:]).stride()))

    pool, work = torch.zeros(64, dtype=BF16), torch.zeros(64)
    layout = KVLayout.token_major(2, 128, 16, 8192)
    ids, blocks = ints(batch), ints(batch, 16)
    kv.write_kv(pool, rows(batch, 2, 128), rows(batch, 2, 128), blocks, ids, ids, layout=layout)
    query, attend = rows(batch, 12, 128), {"layout": layout, "scale": 0.1, "window": 0}
    attention.decode_attention(
        pool, query, blocks, ids, ids, rows(batch, 12, 128), work, None, None, **attend
    )
    attention.prefill_attention(
        pool, query, ints(batch + 1), blocks, ids, ids, rows(batch, 12, 128), None, None, max_query=batch, **attend
    )  # fmt: skip
    loops.fill_exited(pool, ints(batch, 4, 16), ids, ids, ints(batch, 256), layout=layout)
    unit = {"granule": 16384, "unit": 262144}
    moves.copy_units(pool, ids, ids, **unit)
    moves.zero_units(pool, ids, **unit)
    moves.gather_units(pool, ints(batch, 3), rows(batch, 786432), **unit)
    moves.scatter_units(pool, ints(batch, 3), rows(batch, 786432), **unit)
    for members in (ints(batch, 3), ints(batch, 1)):
        window = {"granule": 8, "heads_per_member": 8}
        gates = {name: heads(24, dtype=torch.float32) for name in ("A", "D", "bias")}
        inputs = (
            rows(batch, 24, 128),
            heads(batch, 24),
            gates["A"],
            rows(batch, 1, 256),
            rows(batch, 1, 256),
        )
        rest = (gates["D"], gates["bias"], rows(batch, 24, 128))
        ssu.state_update(pool, members, members, *inputs, *rest, **window)
        for tokens, scratch in (
            (1, None),
            (64, None),
            (200, torch.zeros(batch, 1, 24, 128, 256, dtype=BF16)),
        ):
            ssd.ssd(
                pool, members, members[:, None], scratch, pool, ids, ints(batch + 1), ids, *inputs, *rest,
                window_granule=8, chunk=64, max_tokens=tokens, **window,
            )  # fmt: skip
        keys = (
            rows(batch, 16, 128),
            rows(batch, 16, 128),
            rows(batch, 32, 128),
            heads(batch, 32),
            heads(batch, 32),
        )
        rest = (gates["A"], gates["bias"], rows(batch, 32, 128))
        delta.delta_update(pool, members, members, *keys, *rest, scale=0.1, **window)
        for tokens in (1, 40):
            delta.delta_rule(
                pool, members, members[:, None], pool, ids, ints(batch + 1), ids, *keys, *rest,
                window_granule=8, scale=0.1, max_tokens=tokens, **window,
            )  # fmt: skip
    weight, line = torch.zeros(4, 3584, dtype=BF16), ints(batch, 1)
    x = rows(batch, 3584)
    conv.conv_update(pool, line, line, x, weight, weight[0], rows(batch, 3584), granule=16384)
    for kept in (1, 2, 16):
        conv.conv_prefill(
            pool, line, ints(batch, kept, 1), ints(batch, kept), ints(batch + 1), x, weight, weight[0],
            rows(batch, 3584), granule=16384, max_tokens=batch,
        )  # fmt: skip


def main():
    seen = {}

    def hook(*, key, fn, **_):
        seen.setdefault(fn.name.rpartition(".")[2].strip("_").removesuffix("_kernel"), set()).add(key)
        return True

    triton.runtime.driver.set_active(Driver())
    triton.knobs.runtime.jit_cache_hook = hook
    for batch, odd in itertools.product(BATCHES, (0, 1)):
        launch_all(batch, odd)
    metadata = {name: len(keys) for name, keys in seen.items()}
    for batch, odd in itertools.product(BATCHES, (0, 1)):
        launch_all(batch, odd, data=8)
        launch_all(batch, odd, fused=FUSED)
    print(json.dumps([metadata, {name: len(keys) for name, keys in seen.items()}]))


if __name__ == "__main__":
    main()
