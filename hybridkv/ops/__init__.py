"""The public ops: checked, then run by the Triton kernels on a GPU and by the PyTorch references on a CPU.

Each is a torch op (`torch.ops.hybridkv.*`), works under `torch.compile(fullgraph=True)`, reads no device memory on the
host and allocates nothing, so it can be captured in a CUDA graph. Mapping tables hold one int32 per unit: its offset in
the pool divided by `granule`; negative means absent.
"""

from hybridkv.kv_layout import KVLayout
from hybridkv.ops.attention import decode_attention, decode_workspace, prefill_attention, write_kv
from hybridkv.ops.conv import conv_prefill, conv_update
from hybridkv.ops.delta import delta_rule, delta_update
from hybridkv.ops.loops import fill_exited
from hybridkv.ops.moves import copy_units, gather_units, scatter_units, zero_units
from hybridkv.ops.state import ssd, state_update

__all__ = [
    "KVLayout",
    "conv_prefill",
    "conv_update",
    "copy_units",
    "decode_attention",
    "decode_workspace",
    "delta_rule",
    "delta_update",
    "fill_exited",
    "gather_units",
    "prefill_attention",
    "scatter_units",
    "ssd",
    "state_update",
    "write_kv",
    "zero_units",
]
