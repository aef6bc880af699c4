"""Trees in the columns that an engine scheduled for placeholders."""

from __future__ import annotations

import torch
from torch.nn.functional import pad
from vllm.distributed.parallel_state import get_tp_group

from drafttree.tensor_parallel import broadcast_trees
from drafttree.tree import NO_TOKEN, DraftTree


def as_scheduled(trees: DraftTree, tree_size: torch.Tensor, padding: torch.Tensor) -> DraftTree:
    """Truncate or pad trees to the columns that the engine scheduled, `[B, N]`.

    Args:
        trees: The trees as drafted, with fewer or more columns than were scheduled.
        tree_size: Number of columns of each request, the root's counted, `int [B]`.
        padding: Which columns a request does not have, `bool [B, N]`.
    """
    width = padding.shape[1]
    missing = width - trees.tokens.shape[1]
    tokens, parents = trees.tokens[:, :width], trees.parents[:, :width]
    if missing > 0:
        tokens, parents = (pad(each, (0, missing), value=-1) for each in (tokens, parents))
    return without_nodes(DraftTree(tokens, parents, tree_size), padding)


def of_first_rank(trees: DraftTree) -> DraftTree:
    """The trees of the first tensor-parallel rank, in as many columns as this rank's."""
    return broadcast_trees(trees, trees.tokens.shape[1] - 1, get_tp_group())


def without_nodes(trees: DraftTree, dropped: torch.Tensor) -> DraftTree:
    """Trees without some of their nodes; roots are kept.

    Args:
        trees: The trees.
        dropped: Which nodes to drop, all of their descendants included, `bool [B, N]`.
    """
    dropped = dropped.clone()
    dropped[:, 0] = False
    return DraftTree(
        tokens=trees.tokens.masked_fill(dropped, NO_TOKEN),
        parents=trees.parents.masked_fill(dropped, -1),
        tree_size=trees.tree_size,
    )
