"""One torch op per kernel: schema, fake implementation, and the choice between the twins.

Owns the op library `hybridkv`. Does not know what an op computes: a name leads to `hybridkv.reference.<family>` and
`hybridkv.triton.<family>`, whose functions of that name have one signature, and the reference's annotations are the
schema. Tensors on a CPU go to the reference, tensors on a GPU to Triton, unless the caller says `impl=`.
"""

from __future__ import annotations

import enum
import functools
import importlib
import os
from typing import TYPE_CHECKING, Any

import torch

from hybridkv.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Defining the ops is the one thing that this library does to the process. The handle must live as long as they do.
_LIBRARY = torch.library.Library("hybridkv", "DEF")


class Impl(enum.StrEnum):
    """Which twin runs an op."""

    REFERENCE = "reference"
    TRITON = "triton"


def resolve(impl: str, device: str) -> Impl:
    """Return the twin to run on a device type; an empty `impl` means the device's own."""
    if not impl:
        return Impl.REFERENCE if device == "cpu" else Impl.TRITON
    if impl not in list(Impl):
        raise UsageError(f"impl must be one of {', '.join(Impl)}, got {impl!r}")
    if impl == Impl.TRITON and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError(
            "impl must be 'reference' for tensors on a CPU, got 'triton'; Triton's interpreter runs it on a CPU "
            "where TRITON_INTERPRET=1 was set before hybridkv.triton was imported"
        )
    return Impl(impl)


@functools.cache
def twin(impl: Impl, family: str, name: str) -> Callable[..., None]:
    """Import a twin on first use, so that the references need no Triton."""
    return getattr(importlib.import_module(f"hybridkv.{impl}.{family}"), name)


def register(
    family: str, name: str, *, mutates: Sequence[str], check: Callable[..., None] | None = None
) -> Callable[..., None]:
    """Define `torch.ops.hybridkv.<name>` and return it; it takes the reference's arguments, and `impl`.

    Args:
        family: module of the twins.
        name: function of the twins, and of the op.
        mutates: names of the tensors that it writes. It returns nothing.
        check: called with the arguments before every launch, on real tensors: the place for what only values can
            tell. It must not read a tensor on a GPU, which would wait for the device.
    """
    reference = twin(Impl.REFERENCE, family, name)
    schema = torch.library.infer_schema(reference, mutates_args=mutates).removesuffix(") -> ()")
    star = "" if "*" in schema else "*, "
    _LIBRARY.define(f'{name}{schema}, {star}str impl="") -> ()')

    def run(device: str, *args: Any, impl: str = "", **kwargs: Any) -> None:
        chosen = resolve(impl, device)
        if check is not None:
            check(*args, **kwargs)
        twin(chosen, family, name)(*args, **kwargs)

    _LIBRARY.impl(name, functools.partial(run, "cpu"), "CPU")
    _LIBRARY.impl(name, functools.partial(run, "cuda"), "CUDA")  # ROCm goes by this name too
    torch.library.register_fake(f"hybridkv::{name}", lambda *_, **__: None, lib=_LIBRARY)
    return getattr(torch.ops.hybridkv, name).default
