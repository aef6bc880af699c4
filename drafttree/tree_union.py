"""One draft tree from the candidates of two drafters.

Nodes with the same path become one node, and the best nodes of the union are kept. How much a node
is worth, the probability that it is accepted, is estimated from what both drafters say of it; see
`tree_worth`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from tree_kernels.expansion import ExpandedTrees
from tree_kernels.mask import depths
from tree_kernels.selection import best_nodes

from drafttree.tree import NO_TOKEN, DraftTree

CERTAIN = 1 - 1e-3
"""Greatest probability that a node is accepted once its parent is. Rounding could otherwise give a
node a higher score than its parent."""


@dataclass(frozen=True)
class Candidates:
    """Trees of one drafter, from which nodes are chosen; F columns with the root first.

    Attributes:
        tokens: `int32 [B, F]`; -1 where there is no node.
        parents: `int32 [B, F]`, the column of each node's parent, which is an earlier one; -1 for
            roots and where there is no node.
        chances: `float32 [B, F]`, the drafter's own estimate of the probability that a node is
            accepted once its parent is; 0 where there is no node. Those of roots are not read.
    """

    tokens: Tensor
    parents: Tensor
    chances: Tensor


@dataclass(frozen=True)
class TreeUnion:
    """The union of two drafters' trees under the same roots, in breadth-first order; F columns.

    Attributes:
        tokens: `int32 [B, F]`; -1 where there is no node, which is after all nodes.
        parents: `int32 [B, F]`, the column of each node's parent; -1 for roots and where there is
            no node.
        levels: `int32 [B, F]`, the depth of each node; 0 where there is no node.
        columns: `int64 [B, F]` twice, the column of each node in either drafter's tree; -1 where
            it has none there.
    """

    tokens: Tensor
    parents: Tensor
    levels: Tensor
    columns: tuple[Tensor, Tensor]


def unite(first: Candidates, second: Candidates, depth: int) -> TreeUnion:
    """The union of two drafters' trees: equal paths become one node.

    Args:
        first: The one drafter's trees, N columns.
        second: The other's, M columns. Their roots are not read: they are those of `first`.
        depth: Greatest depth of a node in the trees of either, whichever is less.

    Returns:
        Trees of N + M - 1 columns.
    """
    width, further = first.tokens.shape[1], second.tokens.shape[1]
    device = first.tokens.device
    at = find_nodes(first, second, depth)
    here = torch.arange(further, device=device)
    new = (second.tokens >= 0) & (at < 0)
    new[:, 0] = False
    # Both trees side by side, with one root.
    place = torch.where(at >= 0, at, here + (width - 1))
    above = place.gather(1, second.parents.clamp(min=0).long()).int()
    tokens = torch.cat(
        (first.tokens, second.tokens[:, 1:].masked_fill(~new[:, 1:], NO_TOKEN)), dim=1
    )
    parents = torch.cat((first.parents, above[:, 1:].masked_fill(~new[:, 1:], -1)), dim=1)
    absent = tokens < 0
    absent[:, 0] = False
    total = width + further - 1
    own = torch.arange(total, device=device)
    mine = own.masked_fill(own >= width, -1).expand_as(tokens)
    theirs = torch.full_like(mine, -1).scatter(1, place, here.expand_as(place))
    return _breadth_first(tokens, parents, absent, (mine, theirs))


def find_nodes(first: Candidates, second: Candidates, depth: int) -> Tensor:
    """The column in `first` of each node of `second`, `int64 [B, M]`; -1 where it has none."""
    same = second.tokens[:, :, None] == first.tokens[:, None, :]
    same &= (first.tokens >= 0)[:, None, :]
    same[:, :, 0] = False
    same[:, 0] = False
    at = torch.full_like(second.tokens, -1, dtype=torch.int64)
    at[:, 0] = 0
    above = second.parents.clamp(min=0).long()
    for _ in range(depth):
        # No parent of a node is -1, which stands for parents that were not found.
        found = same & (first.parents[:, None, :] == at.gather(1, above)[:, :, None])
        is_found, where = found.to(torch.int8).max(2)
        at = torch.where(is_found > 0, where, at)
    return at


def _breadth_first(
    tokens: Tensor, parents: Tensor, absent: Tensor, columns: tuple[Tensor, Tensor]
) -> TreeUnion:
    """Sort the columns by depth; `absent` ones, `bool [B, F]`, come last."""
    total = tokens.shape[1]
    levels = depths(parents, torch.full_like(tokens[:, 0], total))
    order = levels.masked_fill(absent, total).sort(dim=1, stable=True).indices
    place = torch.empty_like(order)
    place.scatter_(1, order, torch.arange(total, device=tokens.device).expand_as(order))
    above = parents.gather(1, order)
    moved = place.gather(1, above.clamp(min=0).long()).int().masked_fill(above < 0, -1)
    gone = absent.gather(1, order)
    mine, theirs = (each.gather(1, order).masked_fill(gone, -1) for each in columns)
    return TreeUnion(tokens.gather(1, order), moved, levels.gather(1, order), (mine, theirs))


def scores_of(union: TreeUnion, chances: Tensor, depth: int) -> Tensor:
    """The probability that each node is accepted, `float32 [B, F]`; 0 where there is no node.

    Args:
        union: The trees.
        chances: `float32 [B, F]`, the probability that a node is accepted once its parent is.
        depth: Greatest depth of a node.
    """
    scores = chances.clamp(max=CERTAIN).masked_fill(union.parents < 0, 0)
    scores[:, 0] = 1
    above = union.parents.clamp(min=0).long()
    # After each round, the products run over twice as many nodes, and `above` leads twice as far.
    for _ in range(depth.bit_length()):
        scores = scores * scores.gather(1, above)
        above = above.gather(1, above)
    return scores


def best_of_union(
    union: TreeUnion, scores: Tensor, most: Tensor, num_draft_tokens: int
) -> tuple[DraftTree, Tensor]:
    """The nodes of highest score of each tree, breadth-first.

    Args:
        union: The trees, of more than `num_draft_tokens` columns.
        scores: What `scores_of` returns: those of a node are lower than its parent's, unless both
            are 0.
        most: `int64 [B]`, greatest number of draft tokens of each request.
        num_draft_tokens: The greatest of all requests, the number of columns of the result.

    Returns:
        The trees `[B, 1 + num_draft_tokens]`, and the column of each of their nodes in the union,
        `int64`; 0 where there is no node.
    """
    order = scores.sort(dim=1, descending=True, stable=True).indices
    own = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, own)
    scores = scores.masked_fill(rank > most[:, None], 0)
    return _best(union, scores, num_draft_tokens, by_score=False)


def best_first(union: TreeUnion, scores: Tensor, num_draft_tokens: int) -> tuple[DraftTree, Tensor]:
    """The nodes of highest score of each tree, from the highest to the lowest.

    The arguments and the result are otherwise those of `best_of_union`.
    """
    return _best(union, scores, num_draft_tokens, by_score=True)


def kept_first(union: TreeUnion, scores: Tensor, kept: Tensor) -> Tensor:
    """Scores by which all nodes of the first drafter come before the others.

    Args:
        union: The trees.
        scores: What `scores_of` returns.
        kept: `bool [B]`, the requests for which they do, in the order of their columns; the scores
            of the others stay.
    """
    columns = union.columns[0]
    first = kept[:, None] & (columns > 0)
    # Above all probabilities, and exact for as many columns as a tree can have.
    return torch.where(first, 2 - columns / 1024, scores)


def _best(
    union: TreeUnion, scores: Tensor, num_draft_tokens: int, *, by_score: bool
) -> tuple[DraftTree, Tensor]:
    own = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    trees = ExpandedTrees(
        union.tokens, union.parents, own.expand_as(scores).contiguous(), scores.contiguous()
    )
    tokens, parents, columns, tree_size = best_nodes(trees, num_draft_tokens, by_score=by_score)
    return DraftTree(tokens, parents, tree_size), columns.long()
