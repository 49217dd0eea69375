"""The functions that several references need, once each (rule R5)."""

from __future__ import annotations

import torch
from torch import Tensor


def softplus(v: Tensor) -> Tensor:
    """log(1 + e**v) in fp32, by the same steps as the kernels; good to 1e-7 relative at every v."""
    e = torch.exp(v)
    u = 1.0 + e
    small = torch.where(u == 1.0, e, torch.log(u) * e / (u - 1.0))
    return torch.where(v > 20.0, v, small)


def sigmoid(v: Tensor) -> Tensor:
    """1 / (1 + e**-v) in fp32."""
    return 1.0 / (1.0 + torch.exp(-v))


def silu(v: Tensor) -> Tensor:
    """Return v * sigmoid(v) in fp32, with one division."""
    return v / (1.0 + torch.exp(-v))


def unit(pool: Tensor, entry: int, granule: int, size: int) -> Tensor:
    """View `size` elements of raw storage at a mapping table's entry. The entry must not be negative."""
    return pool[entry * granule : entry * granule + size]
