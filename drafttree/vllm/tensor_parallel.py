"""Tensor parallelism: the first rank drafts, and the others verify its trees.

All ranks have the same logits, so they accept the same tokens. But a drafter's state may depend on
its process, for instance on tables primed in the background or on measured times, so ranks that
drafted independently could disagree.
"""

from __future__ import annotations

import torch
from vllm.distributed.parallel_state import get_tp_group

from drafttree.drafter import ModelFreeDrafter
from drafttree.tree import DraftTree


def is_drafting_rank() -> bool:
    """Whether this rank is the one that drafts."""
    return bool(get_tp_group().rank_in_group == 0)


def broadcast_trees(trees: DraftTree, num_draft_tokens: int) -> DraftTree:
    """The first rank's trees, sent between devices without waiting on the host.

    Args:
        trees: This rank's trees, which are ignored unless it is the first.
        num_draft_tokens: Greatest number of draft tokens of a tree.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return trees
    batch, width = trees.tokens.shape
    shape = batch, 2, num_draft_tokens + 1
    tensors = torch.full(shape, -1, dtype=torch.int32, device=trees.tokens.device)
    tensors[:, 0, :width] = trees.tokens
    tensors[:, 1, :width] = trees.parents
    tensors = torch.cat((tensors.flatten(1), trees.tree_size[:, None]), 1)
    group.broadcast(tensors)
    tokens, parents = tensors[:, :-1].view(shape).unbind(1)
    return DraftTree(tokens.contiguous(), parents.contiguous(), tensors[:, -1].contiguous())


class NonDraftingRank(ModelFreeDrafter):
    """The drafter of a rank that does not draft."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """No drafts: the first rank's trees replace these."""
        return DraftTree.of_roots(roots)
