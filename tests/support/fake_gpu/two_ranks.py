"""Two tensor-parallel ranks that run one after the other in one process."""

from __future__ import annotations

import torch

from fake_gpu.tensors import held


class Rank:
    """A rank; the second one receives what the first one has sent.

    Args:
        first: The first rank, which has finished; None for the first rank itself.

    Attributes:
        sent: What the first rank sent and no other has received, in order.
    """

    world_size = 2
    device_group = None

    def __init__(self, first: Rank | None = None) -> None:
        self.rank_in_group = 0 if first is None else 1
        self.sent: list[torch.Tensor] = [] if first is None else first.sent

    def broadcast(self, input_: torch.Tensor) -> torch.Tensor:
        """Send a tensor, or receive one."""
        values = held(input_)
        if self.rank_in_group == 0:
            self.sent.append(values.clone())
            return input_
        sent = self.sent.pop(0)
        assert values.shape == sent.shape, "ranks must send and receive tensors of one size"
        values.copy_(sent)
        return input_

    def barrier(self) -> None:
        """Nothing: the first rank is ahead."""
