"""The best path of a dynamic tree, for engines that verify a chain of draft tokens only.

The best path is the one of which most tokens are expected to be accepted. A path's tokens are
accepted from its beginning, and the score of a node is the probability that all tokens down to it
are, so that number is the sum of the scores along the path.
"""

from __future__ import annotations

import torch
from tree_kernels.expansion import ExpandedTrees

from drafttree.tree import MAX_DEPTH


def best_paths(trees: ExpandedTrees, longest: int) -> ExpandedTrees:
    """The path of each tree with the greatest sum of scores.

    Args:
        trees: The trees; the scores of their nodes never rise along a path.
        longest: Greatest number of nodes of a path, the root excluded.

    Returns:
        `[B, 1 + longest]`: each node's parent is in the column before; columns after the end of a
        path hold no node.
    """
    above = trees.parents.long().clamp(min=0)
    columns = torch.arange(trees.tokens.shape[1], device=above.device)
    sums = trees.scores * (columns > 0)
    depths = (sums > 0).long()
    # After each round, the sums run over twice as many nodes, and `above` leads twice as far up.
    hops = []
    for _ in range(MAX_DEPTH.bit_length()):
        hops.append(above)
        sums = sums + sums.gather(1, above)
        depths = depths + depths.gather(1, above)
        above = above.gather(1, above)
    ends = sums.masked_fill(depths > longest, 0).argmax(1, keepdim=True)
    place = torch.arange(longest + 1, device=above.device)
    up = depths.gather(1, ends) - place
    gone = up < 0
    nodes = ends.expand(-1, longest + 1)
    for bit, hop in enumerate(hops):
        nodes = torch.where((up >> bit) & 1 > 0, hop.gather(1, nodes), nodes)
    return ExpandedTrees(
        trees.tokens.gather(1, nodes).masked_fill(gone, -1),
        (place - 1).int().masked_fill(gone, -1),
        trees.sources.gather(1, nodes).masked_fill(gone, 0),
        trees.scores.gather(1, nodes).masked_fill(gone, 0),
    )
