"""The masks of a tree that is verified as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafttree.grammar.masks import ALL, allows
from drafttree.grammar.matcher import Matcher, Walk


def fill_masks(
    matcher: Matcher, tokens: Sequence[int], parents: Sequence[int], masks: torch.Tensor
) -> int:
    """Fill the masks of all nodes, each that of the node's own path.

    No text goes through a node that the grammar does not allow, so the rows of such nodes and of
    all below them allow everything, as do those of columns without a node.

    Args:
        matcher: The grammar's state at the root.
        tokens: The token of each node; -1 where there is no node. That of the root is not used.
        parents: The parent of each node, which comes before it; -1 for the root at 0.
        masks: The nodes' masks, `int32 [N, W]`.

    Returns:
        How many draft tokens the grammar allows.
    """
    rows = masks.numpy()
    allowed = [True] + [False] * (len(tokens) - 1)
    with Walk(matcher, parents, tokens) as walk:
        matcher.fill(masks, 0)
        for node in range(1, len(tokens)):
            token, parent = tokens[node], parents[node]
            allowed[node] = (
                token >= 0 and allowed[parent] and allows(rows[parent], token) and walk.enter(node)
            )
            if allowed[node]:
                matcher.fill(masks, node)
            else:
                rows[node] = ALL
    return sum(allowed) - 1
