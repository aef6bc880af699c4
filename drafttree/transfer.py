"""Copies between the host and the device that nobody waits for."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Coming:
    """What the device is still sending, perhaps still making.

    Attributes:
        values: on the host; not to be read before `wait`.
        arrived: reached once they are there; None if they are.
    """

    values: torch.Tensor
    arrived: torch.Event | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Coming:
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
