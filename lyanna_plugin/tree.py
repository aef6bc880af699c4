"""Building draft trees from the logits of all steps (Lyanna, algorithms 1 and 2).

All shapes are fixed, and the only loops are over the levels of a tree. B is the batch size, L the
number of steps, V the vocabulary size, H the number of hot tokens, C the number of logits: V, or
H + 1 where the hot tokens alone are drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from tree_kernels.expansion import ExpandedTrees
from tree_kernels.merge import merge_trees
from tree_kernels.selection import best_nodes
from tree_kernels.token_tree import expand_token_trees

from drafttree.tree import NO_TOKEN, DraftTree
from drafttree.tree_union import Candidates, unite
from lyanna_plugin.token_info import TokenInfo


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that are drafted, if these are not all.

    Attributes:
        columns: `int32 [V]`, the column of each token's logit.
        tokens: `int32 [C]`, the token of each column.
    """

    columns: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class TokenTable:
    """The collapsed token info.

    Attributes:
        table: `[H, H]`, row i is added to the hot tokens' logits after hot token i.
        row_of: `int32 [C]`, the row of each logit in the table; -1 for cold tokens.
        hot_tokens: `int32 [H]`, the column of each row's logit.
        drafted: The tokens of the columns; None if columns are tokens.
    """

    table: Tensor
    row_of: Tensor
    hot_tokens: Tensor
    drafted: DraftVocabulary | None = None

    @classmethod
    def of(cls, info: TokenInfo, embedded: Tensor, dtype: torch.dtype) -> TokenTable:
        """Collapse the low-rank form.

        Args:
            info: The low-rank form.
            embedded: `[H, d]`, the target's embeddings of the hot tokens.
            dtype: Data type of the table.
        """
        return cls(info.collapse(embedded, dtype), info.row_of, info.hot_tokens)

    def hot_alone(self) -> TokenTable:
        """The table, for logits of the hot tokens alone, in the order of the rows.

        Their last column stands for all cold tokens.
        """
        hot, row_of = self.hot_tokens, self.row_of
        columns = torch.arange(len(hot), dtype=torch.int32, device=hot.device)
        drafted = DraftVocabulary(row_of.masked_fill(row_of < 0, len(hot)), pad(hot, (0, 1)))
        return TokenTable(self.table, pad(columns, (0, 1), value=-1), columns, drafted)

    def columns_of(self, tokens: Tensor) -> Tensor:
        """The logits' columns of `tokens`, `int32`."""
        return tokens.int() if self.drafted is None else self.drafted.columns[tokens.long()]

    def tokens_of(self, columns: Tensor) -> Tensor:
        """The tokens of the logits' `columns`, `int32`; -1 where these are."""
        if self.drafted is None:
            return columns
        return self.drafted.tokens[columns.clamp(min=0).long()].masked_fill(columns < 0, NO_TOKEN)


def sample_tree(
    logits: Tensor,
    steps: Tensor,
    roots: Tensor,
    info: TokenTable,
    width: int,
    num_draft_tokens: int,
) -> DraftTree:
    """Token-info sampling (algorithm 1), pruned by joint probability.

    Args:
        logits: As in `expand_tree`.
        steps: As in `expand_tree`.
        roots: As in `expand_tree`.
        info: As in `expand_tree`.
        width: As in `expand_tree`.
        num_draft_tokens: Maximum number of nodes, excluding the root.
    """
    return prune(expand_tree(logits, steps, roots, info, width), num_draft_tokens)


def expand_tree(
    logits: Tensor, steps: Tensor, roots: Tensor, info: TokenTable, width: int
) -> ExpandedTrees:
    """Token-info sampling (algorithm 1) without pruning.

    Every expanded node gets its `width` most likely children. In each level the `width` most likely
    paths are expanded.

    Args:
        logits: `[B, L, C]`; step i, counted from 0, predicts the nodes of depth i + 1.
        steps: `int [B]`, number of valid steps of each request.
        roots: `int32 [B]`, the last accepted tokens.
        info: The token info.
        width: Number of children of a node, and of expanded nodes in a level.

    Returns:
        The trees, whose scores are joint probabilities.
    """
    columns, parents, scores = expand_token_trees(
        logits, steps, info.columns_of(roots), info.table, info.row_of, info.hot_tokens, width
    )
    tokens = info.tokens_of(columns)
    if info.drafted is not None:
        tokens[:, 0] = roots  # which need not be one of the drafted tokens
    return ExpandedTrees(tokens, parents, torch.zeros_like(tokens), scores)


def prune(expanded: ExpandedTrees, num_draft_tokens: int) -> DraftTree:
    """Keep the nodes of the highest scores, at most `num_draft_tokens` below each root."""
    count = min(num_draft_tokens, expanded.tokens.shape[1] - 1)
    tokens, parents, _, tree_size = best_nodes(expanded, count)
    return DraftTree(tokens, parents, tree_size)


def candidates(expanded: ExpandedTrees) -> Candidates:
    """The nodes of expanded trees, each with its probability given its parent."""
    scores, parents = expanded.scores, expanded.parents
    above = scores.gather(1, parents.clamp(min=0).long())
    chances = torch.where(scores > 0, scores / above, 0)
    return Candidates(expanded.tokens, parents, chances)


def united_steps(regular: Candidates, second: Candidates, steps: int) -> Candidates:
    """The candidates of a regular tree and of a second one, whose estimates are older."""
    union = unite(regular, second, steps)
    at, other = union.columns
    chances = torch.where(
        at >= 0,
        regular.chances.gather(1, at.clamp(min=0)),
        second.chances.gather(1, other.clamp(min=0)),
    ).masked_fill((at < 0) & (other < 0), 0)
    return Candidates(union.tokens, union.parents, chances)


def resample_logits(logits: Tensor, steps: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """The logits that remain for a second tree after a draft was rejected (algorithm 2).

    If `a` draft tokens were accepted, the bonus token is at depth `a + 1`. The logits of the later
    steps predict what follows it, and do not depend on any rejected token.

    Args:
        logits: `[B, L, C]`, of the tree that was verified.
        steps: `int [B]`, number of valid steps of each request.
        accepted: `int [B]`, number of accepted draft tokens.

    Returns:
        `[B, L - 1, C]`, the logits for `sample_tree` under the bonus token, and `int [B]`, the
        number of valid steps in them.
    """
    length = logits.shape[1]
    steps = (steps - 1 - accepted).clamp(min=0)
    at = accepted[:, None] + torch.arange(1, length, device=logits.device)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    return logits[rows, at.clamp(max=length - 1).long()], steps


def merge(first: DraftTree, second: DraftTree, depth: int) -> DraftTree:
    """The union of two trees under the same roots, in which equal paths occur once.

    Args:
        first: One tree of each request.
        second: Another tree of each request.
        depth: Maximum depth of a node in either tree.
    """
    one, other = ((tree.tokens, tree.parents, tree.tree_size) for tree in (first, second))
    return DraftTree(*merge_trees(one, other, depth))


def choose(condition: Tensor, first: DraftTree, second: DraftTree) -> DraftTree:
    """The trees of `first` where `condition`, `bool [B]`, is true, else those of `second`."""
    width = max(first.tokens.shape[1], second.tokens.shape[1])
    tokens, parents = (
        torch.where(
            condition[:, None],
            pad(one, (0, width - one.shape[1]), value=-1),
            pad(other, (0, width - other.shape[1]), value=-1),
        )
        for one, other in ((first.tokens, second.tokens), (first.parents, second.parents))
    )
    return DraftTree(tokens, parents, torch.where(condition, first.tree_size, second.tree_size))
