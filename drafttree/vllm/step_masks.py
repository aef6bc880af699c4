"""Attention masks of a step's draft trees, as the attention backends take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepMasks:
    """Attention masks of a step's T trees with drafts, on the device.

    Attributes:
        requests: Rows of the trees' requests in the batch, `int64 [T]`.
        tree_sizes: Number of nodes of each tree, the root counted, integers `[T]`. A tree's nodes
            are the last tokens of its request in the step.
        masks: `bool [T, N, N]`, whether node i attends to node j.
        first_nodes: The first node of each tree that has a row in the step, integers `[T]`: those
            before it have been read already. None for the roots.
    """

    requests: torch.Tensor
    tree_sizes: torch.Tensor
    masks: torch.Tensor
    first_nodes: torch.Tensor | None = None
