"""Draft trees from the logits of all steps (Lyanna, algorithms 1 and 2), and two of them in one.

Everything has fixed shapes and no loop over requests or nodes; levels are few.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from tree_kernels.merge import merge_trees
from tree_kernels.token_info import token_info_top

from drafttree.drafter import DraftTree
from lyanna_plugin.token_info import TokenInfo


@dataclass(frozen=True)
class TokenTable:
    """The collapsed token info.

    Attributes:
        table: `[H, H]`: what a hot token adds to the logits of the hot tokens after it.
        row_of: int32 `[V]`: a token's row and column; -1 for a cold one.
        hot_tokens: int32 `[H]`: the tokens of the rows.
    """

    table: Tensor
    row_of: Tensor
    hot_tokens: Tensor

    @classmethod
    def of(cls, info: TokenInfo, embedded: Tensor, dtype: torch.dtype) -> TokenTable:
        """Collapse the low-rank form, given the target's embeddings of the hot tokens `[H, d]`."""
        with torch.no_grad():
            return cls(info.collapse(embedded, dtype), info.row_of, info.hot_tokens)

    @classmethod
    def empty(cls, vocab_size: int) -> TokenTable:
        """For a drafter without token info: no token says anything."""
        row_of = torch.full((vocab_size,), -1, dtype=torch.int32)
        return cls(torch.zeros(1, 1), row_of, torch.zeros(1, dtype=torch.int32))


def sample_tree(
    logits: Tensor, steps: Tensor, roots: Tensor, info: TokenTable, width: int, budget: int
) -> DraftTree:
    """Token-info sampling (algorithm 1), cut to the budget by joint probability.

    Each live node has its `width` likeliest children; the `width` likeliest paths of a level live
    on.

    Args:
        logits: `[B, L, V]`, of each step: step i, from 0, predicts the nodes of depth i + 1.
        steps: int `[B]`: how many of the L steps there are for each request.
        roots: int32 `[B]`, the last accepted tokens.
        budget: the most nodes, the root not counted.
    """
    requests, length, _ = logits.shape
    live = roots[:, None].int()
    joint = logits.new_zeros(requests, 1, dtype=torch.float32)
    columns = torch.zeros_like(live)
    tokens, parents, scores = [], [], []
    known = 1
    for step in range(length):
        here = live.masked_fill((steps <= step)[:, None], -1)
        children, log_probs = token_info_top(
            logits[:, step], here, info.table, info.row_of, info.hot_tokens, width
        )
        # Rounding must not lift a child above its parent.
        joined = (joint[:, :, None] + log_probs.clamp(max=0)).flatten(1)
        tokens.append(children.flatten(1))
        parents.append(columns[:, :, None].expand_as(children).flatten(1))
        scores.append(joined)
        # A stable order, as in the cut below: a parent comes before its children even at a tie.
        order = joined.sort(dim=1, descending=True, stable=True)
        best = order.indices[:, :width]
        live, joint = children.flatten(1).gather(1, best), order.values[:, :width]
        columns = (known + best).int()
        known += joined.shape[1]
    return cut(roots, torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), budget)


def cut(roots: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, budget: int) -> DraftTree:
    """Keep the `budget` best nodes below each root.

    Args:
        tokens: int32 `[B, N]`, breadth-first; -1 for none.
        parents: int32 `[B, N]`, counting the root as 0.
        scores: float32 `[B, N]`; a node's is no higher than its parent's.
    """
    budget = min(budget, tokens.shape[1])
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :budget]
    kept = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, order, True) & (tokens >= 0)
    # Breadth-first as they were found; what is not kept goes to the end.
    order = (~kept).to(torch.int8).sort(dim=1, stable=True).indices[:, :budget]
    places = kept.cumsum(1).int()
    places = torch.cat([torch.zeros_like(places[:, :1]), places], 1)
    there = kept.gather(1, order)
    above = places.gather(1, parents.gather(1, order).long())
    root = torch.full_like(roots, -1).int()[:, None]
    return DraftTree(
        tokens=torch.cat([roots.int()[:, None], tokens.gather(1, order)], 1).masked_fill(
            torch.cat([root >= 0, ~there], 1), -1
        ),
        parents=torch.cat([root, above.masked_fill(~there, -1)], 1),
        num_nodes=(1 + there.sum(1)).int(),
    )


def left_of(logits: Tensor, steps: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """The logits that a rejected draft leaves for a second tree (algorithm 2).

    With a drafts accepted the bonus token stands at depth a + 1, and the steps after it say what
    follows: they depend on nothing that was rejected.

    Args:
        logits: `[B, L, V]`, of the tree that was verified.
        steps: int `[B]`, how many of the L steps there were.
        accepted: int `[B]`, its drafts that were accepted.

    Returns:
        `[B, L - 1, V]`, for `sample_tree` under the bonus token, and int `[B]`, the steps of it
        that there are.
    """
    length = logits.shape[1]
    steps = (steps - 1 - accepted).clamp(min=0)
    at = accepted[:, None] + torch.arange(1, length, device=logits.device)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    return logits[rows, at.clamp(max=length - 1).long()], steps


def merge(first: DraftTree, second: DraftTree, depth: int) -> DraftTree:
    """The union of two trees under the same roots, equal paths once.

    Args:
        depth: the greatest of a node.
    """
    ours, theirs = ((tree.tokens, tree.parents, tree.num_nodes) for tree in (first, second))
    return DraftTree(*merge_trees(ours, theirs, depth))
