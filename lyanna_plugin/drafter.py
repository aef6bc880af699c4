"""Lyanna's drafter between the steps: from the logits of all steps to the tree to verify.

A host runs the layer and keeps its KV; this keeps what a rejected draft leaves, by the host's slot
of each request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttree.drafter import DraftTree
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.tree import TokenTable, left_of, merge, sample_tree


class LyannaDrafter:
    """Builds the trees.

    Args:
        slots: that the host has for requests.
        head: `[V, d]`, the target's.
    """

    def __init__(self, options: LyannaOptions, info: TokenTable, head: Tensor, slots: int) -> None:
        self._options = options
        self._info = info
        self._head = head
        shape = slots, options.steps, len(head)
        self._logits = head.new_zeros(shape if options.resample else (slots, 0, 0))
        # So many steps accepted leave none: there is nothing of a request that has just begun.
        self._used = torch.full((slots,), options.steps, dtype=torch.int64, device=head.device)
        self._alone = torch.zeros(slots, dtype=torch.bool, device=head.device)

    def forget(self, slots: Tensor) -> None:
        """Requests begin in `slots`, int64 `[B]`."""
        self._used[slots] = self._options.steps

    def propose(self, slots: Tensor, roots: Tensor, states: Tensor) -> DraftTree:
        """The trees to verify.

        Args:
            slots: int64 `[B]`, the requests'.
            roots: int32 `[B]`, their last accepted tokens.
            states: `[B, L, d]`, the drafter's hidden states, of all steps.
        """
        options = self._options
        logits = states @ self._head.T
        steps = torch.full_like(slots, options.steps)
        regular = sample_tree(logits, steps, roots, self._info, options.width, options.nodes)
        if not options.resample:
            return regular
        left, steps = left_of(self._logits[slots], self._used[slots])
        steps = steps.masked_fill(steps <= options.resample_min_steps, 0)
        second = sample_tree(left, steps, roots, self._info, options.width, options.resample_nodes)
        # A second tree that goes alone uses up what was left, and the regular one is drafted anew
        # from the tokens that it wins.
        alone = (steps > 0) & (not options.fusion)
        self._alone[slots] = alone
        self._logits[slots] = torch.where(alone[:, None, None], self._logits[slots], logits)
        if options.fusion:
            return merge(regular, second, options.steps)
        return _either(alone, second, regular)

    def accepted(self, slots: Tensor, drafts: Tensor) -> None:
        """What verification made of the last trees: int `[B]`, the drafts that were accepted."""
        everything = torch.full_like(slots, self._options.steps)
        self._used[slots] = torch.where(self._alone[slots], everything, drafts.long())


def _either(choice: Tensor, one: DraftTree, other: DraftTree) -> DraftTree:
    """The trees of `one` where `choice [B]` is true, else those of `other`."""
    width = max(one.tokens.shape[1], other.tokens.shape[1])
    pad = torch.nn.functional.pad
    tokens, parents = (
        torch.where(
            choice[:, None],
            pad(mine, (0, width - mine.shape[1]), value=-1),
            pad(theirs, (0, width - theirs.shape[1]), value=-1),
        )
        for mine, theirs in ((one.tokens, other.tokens), (one.parents, other.parents))
    )
    return DraftTree(tokens, parents, torch.where(choice, one.num_nodes, other.num_nodes))
