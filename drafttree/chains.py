"""Chains of draft tokens, where trees cannot be verified, and trees cut to them.

A tree needs attention that applies its mask, and KV that can be moved after the verification. An
engine that has neither may still verify a chain, as it verifies the drafts of its own methods. Some
samplers need chains too: they take the draft tokens before a row for the end of the row's text,
which is right along a chain.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from drafttree.tree import DraftTree

LONGEST = 31
"""Greatest number of draft tokens of a chain. Longer ones are rarely accepted to the end."""

LONGEST_RECURRENT = 7
"""Greatest number with recurrent layers, which keep a state for each draft token of a request."""

ANNOUNCEMENT = "%s drafts chains of up to %d tokens and no trees, because %s"
"""What is logged, once, of the method's title, the number of draft tokens and the reason."""


class Chains(NamedTuple):
    """The chains that are drafted in place of trees.

    Attributes:
        reason: Why there are no trees.
        longest: Greatest number of draft tokens of a chain.
    """

    reason: str
    longest: int


def first_paths(
    trees: DraftTree, which: torch.Tensor, max_depth: int
) -> tuple[DraftTree, torch.Tensor]:
    """The trees, some of them cut to their path of first children.

    Args:
        trees: Trees whose first children are their most probable ones.
        which: The trees to cut, `bool [B]`.
        max_depth: Greatest depth of a node.

    Returns:
        Trees of as many columns, in which a node's parent is in the column before if they were cut;
        and `int64 [B, N]`, the columns that the nodes had; -1 where there is none any more.
    """
    width = trees.tokens.shape[1]
    columns = torch.arange(width, device=trees.tokens.device)
    # Column `width` stands for the child of a node that has none.
    is_node = (trees.tokens >= 0) & (columns > 0)
    above = trees.parents.long().masked_fill(~is_node, width)
    child = above.new_full((len(above), width + 1), width)
    child.scatter_reduce_(1, above, columns.expand_as(above), "amin")
    child[:, width] = width
    # After each round, `child` leads twice as far down; column d takes as many steps as d says.
    nodes = torch.zeros_like(above)
    for bit in range((width - 1).bit_length()):
        nodes = torch.where((columns >> bit) & 1 > 0, child.gather(1, nodes), nodes)
        child = child.gather(1, child)
    gone = (nodes == width) | (columns > max_depth)
    nodes = nodes.masked_fill(gone, -1)
    tokens = trees.tokens.gather(1, nodes.clamp(min=0)).masked_fill(gone, -1)
    parents = (columns - 1).int().masked_fill(gone, -1)
    cut = DraftTree(
        torch.where(which[:, None], tokens, trees.tokens),
        torch.where(which[:, None], parents, trees.parents),
        trees.tree_size,
    )
    return cut, torch.where(which[:, None], nodes, columns)


def as_chains(trees: DraftTree) -> DraftTree:
    """The path of first children of each tree; trees that are chains stay as they are.

    A drafter that knows `Target.longest_chain` drafts chains by itself.
    """
    if not trees.drafted:
        return trees
    size = trees.tree_size
    paths, _ = first_paths(trees, size > 0, trees.tokens.shape[1] - 1)
    drafts = (paths.tokens[:, 1:] >= 0).sum(1, dtype=size.dtype)
    return DraftTree(paths.tokens, paths.parents, 1 + drafts)
