"""Chains of draft tokens, where trees cannot be verified, and trees cut to them.

A tree needs attention that applies its mask, and KV that can be moved after the verification. An
engine that has neither may still verify a chain, as it verifies the drafts of its own methods. Some
samplers need chains too: they take the draft tokens before a row for the end of the row's text,
which is right along a chain.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

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
    node = torch.zeros_like(trees.tree_size).long()
    path = [node]
    for _ in range(min(max_depth, width - 1)):
        child = (trees.parents == node[:, None]) & (trees.tokens >= 0) & (columns > 0)
        first = torch.where(child, columns, width).amin(1)
        # The parent of a column without a node is -1 too, but its token is not a token.
        node = first.masked_fill(first == width, -1)
        path.append(node)
    nodes = pad(torch.stack(path, 1), (0, width - len(path)), value=-1)
    gone = nodes < 0
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
