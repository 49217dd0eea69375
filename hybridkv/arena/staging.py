"""One copy a step from the host to the device: rotating host buffers, one persistent device buffer.

Owns where sections lie in the buffers, and when a host buffer may be filled again. Does not know what sections mean.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Shapes = Mapping[str, tuple[int, ...]]

ALIGNED = 4  # int32 in 16 bytes: sections keep one alignment, whatever their sizes
REMEMBERED = 256  # shapes: those that steps of decoding have, and many of prompts
HOST_BUFFERS = 2  # a step is filled while the copy of the last one may still run


def length(shapes: Shapes) -> int:
    """Int32 elements that sections of these shapes take."""
    return sum(-(-prod(shape) // ALIGNED) * ALIGNED for shape in shapes.values())


class _Sections(NamedTuple):
    """Where sections of some shapes lie: in each host buffer, and on the device."""

    length: int
    hosts: list[dict[str, NDArray[np.int32]]]
    device: dict[str, Tensor]


class Staging:
    """Sections of int32, and behind them changes of one persistent table. The same shapes lie at the same addresses."""

    def __init__(self, capacity: int, updates: int, device: torch.device) -> None:
        self.updates = updates
        pinned = device.type == "cuda"
        size = capacity + 3 * updates + ALIGNED
        self._device = torch.empty(size, dtype=torch.int32, device=device)
        self._hosts = [torch.empty(size, dtype=torch.int32, pin_memory=pinned) for _ in range(HOST_BUFFERS)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._events = [torch.cuda.Event() if pinned else None for _ in self._hosts]
        self._known: dict[tuple[tuple[int, ...], ...], _Sections] = {}
        self._turn = 0
        self.copies = 0

    def begin(self, shapes: Shapes, value: int) -> dict[str, NDArray[np.int32]]:
        """Host sections for the next step, filled with `value`; waits until the copy that last read them is done."""
        self._turn = (self._turn + 1) % HOST_BUFFERS
        self._wait()
        self._now = self._cut(shapes)
        self._arrays[self._turn][: self._now.length] = value
        return self._now.hosts[self._turn]

    def send(self, table: Tensor, where: NDArray[np.int64], what: NDArray[np.int32]) -> dict[str, Tensor]:
        """Copy the sections, and write `what` at flat positions `where` of `table`. Device views of the sections."""
        at, first = self._now.length, min(len(where), self.updates)
        self._copy(at, table, where[:first], what[:first])
        for more in range(first, len(where), self.updates):
            self._wait()
            self._copy(at, table, where[more : more + self.updates], what[more : more + self.updates])
        return self._now.device

    def _cut(self, shapes: Shapes) -> _Sections:
        key = tuple(shapes.values())
        if (found := self._known.get(key)) is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            hosts: list[dict[str, NDArray[np.int32]]] = [{} for _ in self._arrays]
            device: dict[str, Tensor] = {}
            at = 0
            for name, shape in shapes.items():
                end = at + prod(shape)
                device[name] = self._device[at:end].view(shape)
                for sections, array in zip(hosts, self._arrays, strict=True):
                    sections[name] = array[at:end].reshape(shape)
                at += length({name: shape})
            found = self._known[key] = _Sections(at, hosts, device)
        return found

    def _copy(self, at: int, table: Tensor, where: NDArray[np.int64], what: NDArray[np.int32]) -> None:
        count, array = len(where), self._arrays[self._turn]
        array[at : at + 2 * count].view(np.int64)[:] = where
        array[at + 2 * count : at + 3 * count] = what
        end = at + 3 * count
        self._device[:end].copy_(self._hosts[self._turn][:end], non_blocking=True)
        self.copies += 1
        if (event := self._events[self._turn]) is not None:
            event.record(torch.cuda.current_stream(self._device.device))
        if count:
            indices = self._device[at : at + 2 * count].view(torch.int64)
            table.view(-1).index_put_((indices,), self._device[at + 2 * count : end])

    def _wait(self) -> None:
        if (event := self._events[self._turn]) is not None:
            event.synchronize()
