"""Asynchronous copies between the host and the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def on_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device, without waiting for the copy."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


_ALIGNED = 16
"""Alignment in bytes; Triton compiles another kernel for tensors that are not aligned to it."""


def all_on_device(
    arrays: Sequence[np.ndarray[Any, Any]], device: torch.device
) -> list[torch.Tensor]:
    """Copy several arrays to a device in one transfer, because each transfer has a fixed cost."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpacked(packed(arrays, pinned=True).to(device, non_blocking=True), arrays)


def _aligned_size(array: np.ndarray[Any, Any]) -> int:
    return -(-array.nbytes // _ALIGNED) * _ALIGNED


def packed(arrays: Sequence[np.ndarray[Any, Any]], *, pinned: bool = False) -> torch.Tensor:
    """Concatenate the arrays' bytes, each array aligned to 16 bytes: `uint8 [bytes]`."""
    buffer = torch.empty(sum(map(_aligned_size, arrays)), dtype=torch.uint8, pin_memory=pinned)
    bytes_, start = buffer.numpy(), 0
    for array in arrays:
        bytes_[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        start += _aligned_size(array)
    return buffer


def unpacked(buffer: torch.Tensor, like: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
    """Views of the arrays in a buffer made by `packed`, on the buffer's device.

    Args:
        buffer: The buffer, or a copy of it on another device.
        like: The arrays that were packed, for their shapes and data types.
    """
    tensors, start = [], 0
    for array in like:
        dtype = torch.from_numpy(array).dtype
        view = buffer[start : start + array.nbytes].view(dtype)
        tensors.append(view.view(array.shape))
        start += _aligned_size(array)
    return tensors


@dataclass(frozen=True)
class AsyncHostCopy:
    """A device-to-host copy in flight.

    Attributes:
        values: The copy on the host, which must not be read before `wait`.
        arrived: Event that completes with the copy; None if there is nothing to wait for.
    """

    values: torch.Tensor
    arrived: torch.Event | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> AsyncHostCopy:
        """Start to copy a tensor to the host."""
        if tensor.device.type == "cpu":
            return cls(tensor, None)
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        values.copy_(tensor, non_blocking=True)
        arrived = torch.Event(tensor.device)
        arrived.record()
        return cls(values, arrived)

    def wait(self) -> torch.Tensor:
        """Wait for the copy and return its values."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values
