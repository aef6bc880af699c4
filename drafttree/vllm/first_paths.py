"""Trees cut to a chain: their path of first children.

The V2 model runner needs them for requests whose logits depend on their text. It takes the draft
tokens before a row for the end of the row's text: penalties, bad words, thinking budgets and custom
logits processors read them so, which is right along a chain. Other engines verify chains alone.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from drafttree.tree import DraftTree


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
