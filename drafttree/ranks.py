"""Tensor-parallel ranks, as engines have them."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Group(Protocol):
    """An engine's group of tensor-parallel ranks.

    Attributes:
        world_size: Number of ranks.
        rank_in_group: Number of this process among them.
    """

    world_size: int
    rank_in_group: int

    def broadcast(self, input_: torch.Tensor) -> Any:
        """Overwrite a tensor with the first rank's, between devices without waiting on the host."""
