"""Copies between the host and the device that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def on_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A tensor of what the host knows; the host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


_ALIGNED = 16
"""Bytes: Triton compiles a kernel anew for a tensor that begins elsewhere."""


def all_on_device(
    arrays: Sequence[np.ndarray[Any, Any]], device: torch.device
) -> list[torch.Tensor]:
    """The same for many arrays, which travel together: a copy costs more than its bytes."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpacked(packed(arrays, pinned=True).to(device, non_blocking=True), arrays)


def _room(array: np.ndarray[Any, Any]) -> int:
    return -(-array.nbytes // _ALIGNED) * _ALIGNED


def packed(arrays: Sequence[np.ndarray[Any, Any]], *, pinned: bool = False) -> torch.Tensor:
    """The arrays' bytes one after another, `uint8`."""
    buffer = torch.empty(sum(map(_room, arrays)), dtype=torch.uint8, pin_memory=pinned)
    bytes_, start = buffer.numpy(), 0
    for array in arrays:
        bytes_[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        start += _room(array)
    return buffer


def unpacked(buffer: torch.Tensor, like: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
    """Views of `packed` arrays, wherever the buffer lies by now."""
    tensors, start = [], 0
    for array in like:
        dtype = torch.from_numpy(array).dtype
        view = buffer[start : start + array.nbytes].view(dtype)
        tensors.append(view.view(array.shape))
        start += _room(array)
    return tensors


@dataclass(frozen=True)
class AsyncHostCopy:
    """What the device is still sending, perhaps still making.

    Attributes:
        values: on the host; not to be read before `wait`.
        arrived: reached once they are there; None if they are.
    """

    values: torch.Tensor
    arrived: torch.Event | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> AsyncHostCopy:
        """Have a tensor sent to the host."""
        if tensor.device.type == "cpu":
            return cls(tensor, None)
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        values.copy_(tensor, non_blocking=True)
        arrived = torch.Event(tensor.device)
        arrived.record()
        return cls(values, arrived)

    def wait(self) -> torch.Tensor:
        """The values, once they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values
