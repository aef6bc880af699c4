"""The grammars of SGLang's requests in steps with draft trees.

A worker runs in the scheduler's process. When it drafts a step, the scheduler has advanced the
requests' grammars over all tokens of earlier steps, also where it overlaps the steps of other
requests. Trees under a grammar are read on the host, which waits for a device to draft them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sglang
import torch

from drafttree.grammar import (
    NO_JUMP_FORWARD,
    JumpForward,
    JumpForwardTokenizer,
    bind_tree,
    fill_masks,
    found_text,
)
from drafttree.grammar.forced_tokens import ForcedTokens
from drafttree.grammar.masks import ALL
from drafttree.proposed import as_proposed
from drafttree.sglang.versions import is_tested
from drafttree.transfer import AsyncHostCopy, all_on_device, on_device
from drafttree.tree import DraftTree, Verified

WALKS = ("XGrammarGrammar", "GuidanceGrammar")
"""SGLang's classes of grammars that can undo tokens and whose masks have a bit for each token."""


def follows_trees(grammar: Any) -> bool:
    """Whether a request's grammar can be walked through a tree."""
    if type(grammar).__name__ == "ReasonerGrammarObject":
        grammar = grammar.grammar
    return type(grammar).__name__ in WALKS and is_tested(sglang.__version__)


def has_grammars(batch: Any) -> bool:
    """Whether a batch has requests with a grammar, which in this server can follow trees."""
    if not batch.has_grammar:
        return False
    return any(each.grammar is not None and follows_trees(each.grammar) for each in batch.reqs)


class RequestMatcher:
    """Follows a request's grammar, as a `drafttree.grammar.Matcher`.

    A token that ends the grammar is not allowed in a tree, though it is in the masks: SGLang drops
    whatever comes after it.

    Args:
        grammar: SGLang's grammar of the request.
        tokenizer: Tokenizes jump-forward strings; None if they are not asked for.
    """

    def __init__(self, grammar: Any, tokenizer: JumpForwardTokenizer | None = None) -> None:
        self._grammar = grammar
        self._tokenizer = tokenizer
        # SGLang's grammars of reasoning models count tokens up to the end of the thoughts, and undo
        # across it one token at a time alone. Others copy the answer each time.
        self._by_token = type(grammar).__name__ == "ReasonerGrammarObject"

    def accept(self, token: int) -> bool:
        """Go on to the state after one more token; False if the grammar does not allow it."""
        if self._grammar.is_terminated():
            return False
        self._grammar.accept_token(token)
        if not self._grammar.is_terminated():
            return True
        self._grammar.rollback(1)
        return False

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens that were accepted."""
        for part in [1] * count if self._by_token else [count]:
            self._grammar.rollback(part)

    def fill(self, masks: torch.Tensor, row: int) -> None:
        """Write the tokens that may follow into a row of `masks`, `int32 [rows, W]`."""
        masks[row] = ALL  # a reasoning model's thoughts leave it as it is
        if not self._grammar.finished and not self._grammar.is_terminated():
            self._grammar.fill_vocab_mask(masks, row)

    def jump_forward(self) -> JumpForward:
        """The tokens of the text that must come next; empty if none is known."""
        if self._tokenizer is None or self._grammar.finished or self._grammar.is_terminated():
            return NO_JUMP_FORWARD
        return self._tokenizer.encode(found_text(self._found))

    def _found(self) -> str:
        # With llguidance there is no text.
        _, text = self._grammar.try_jump_forward(None) or ([], "")
        return str(text)


@dataclass(frozen=True)
class BoundTrees:
    """The trees of a step some of whose requests have a grammar.

    Attributes:
        trees: The trees, N columns.
        masks: The tokens that may follow each node, `int32 [B, N, W]`, a bit for each.
        grammar: SGLang's grammar of one of the requests, which applies masks for all.
        columns: Column of each node in the tree as it was proposed, `int64 [B, N]`; -1 for padding
            and for nodes that were not proposed. None if they are those of the nodes.
        width: Number of columns of the trees as proposed.
        forced: Whether a grammar leaves no token but that of the node, `bool [B, N]`; None if it
            does for no node.
        given: Whether a grammar adds the node whatever was proposed, `bool [B, N]`; None if it
            adds none.
    """

    trees: DraftTree
    masks: torch.Tensor
    grammar: Any
    columns: torch.Tensor | None = None
    width: int = 0
    forced: torch.Tensor | None = None
    given: torch.Tensor | None = None

    def of_nodes(self, requests: torch.Tensor, nodes: torch.Tensor) -> Any:
        """SGLang's mask of some nodes, integers `[R]`, of `requests`, `int64 [R]`."""
        from sglang.srt.constrained.base_grammar_backend import GrammarMask

        return GrammarMask(self.grammar, self.masks[requests, nodes.long()])

    def count_forced(self, counts: ForcedTokens, trees: DraftTree, verified: Verified) -> None:
        """Count the tokens of a step that grammars have forced."""
        if self.columns is not None:
            width = trees.tokens.shape[1]
            forced = None if self.forced is None else self.forced[:, :width]
            counts.add_step(self.columns[:, :width], forced, trees, verified)

    def as_proposed(self, drafts: DraftTree, verified: Verified) -> tuple[DraftTree, Verified]:
        """A step's trees and their outcome with each node in the column in which it was proposed.

        Args:
            drafts: The trees as verified, of at most N columns; some nodes may have been dropped.
            verified: The outcome.
        """
        if self.columns is None:
            return drafts, verified
        width = drafts.tokens.shape[1]
        columns = self.columns[:, :width].masked_fill(drafts.tokens < 0, -1)
        rows = drafts.tokens.numel()
        forced, given = (
            None if each is None else each[:, :width] for each in (self.forced, self.given)
        )
        return as_proposed(drafts, verified, columns, self.width, rows, forced, given)


def mask_trees(requests: Sequence[Any], trees: DraftTree, vocab_size: int) -> BoundTrees:
    """Mask trees that are verified as they are.

    Args:
        requests: SGLang's requests, of which at least one has a grammar.
        trees: Their trees, N columns.
        vocab_size: Size of the vocabulary.
    """
    batch, width = trees.tokens.shape
    grammar, masks = _room(requests, batch * width, vocab_size)
    by_row = masks.view(batch, width, -1)
    tokens, parents = _read(trees.tokens, trees.parents)
    for row, request in enumerate(requests):
        if request.grammar is not None:
            matcher = RequestMatcher(request.grammar)
            fill_masks(matcher, tokens[row], parents[row], by_row[row])
    return BoundTrees(trees, on_device(by_row.numpy(), trees.tokens.device), grammar)


def bind_trees(
    requests: Sequence[Any],
    trees: DraftTree,
    proposed: torch.Tensor,
    rooms: Sequence[int],
    num_draft_tokens: int,
    vocab_size: int,
    tokenizer: JumpForwardTokenizer | None,
    *,
    chains: bool,
) -> BoundTrees:
    """Drop the nodes that grammars forbid, and add the texts that they force.

    Args:
        requests: SGLang's requests, of which at least one has a grammar.
        trees: Their trees, nodes of those with a grammar from the most to the least probable one.
        proposed: Greatest number of proposed nodes to verify, by request, `int32 [B]`.
        rooms: Greatest depth of a node, by request; 0 for requests that are not drafted for.
        num_draft_tokens: Greatest number of draft tokens.
        vocab_size: Size of the vocabulary.
        tokenizer: Tokenizes jump-forward strings; None without a tokenizer.
        chains: Whether the trees must be chains.
    """
    device, (batch, width) = trees.tokens.device, trees.tokens.shape
    size = 1 + num_draft_tokens
    grammar, masks = _room(requests, batch * size, vocab_size)
    by_row = masks.view(batch, size, -1)
    all_tokens, all_parents, all_sizes, all_proposed = _read(
        trees.tokens, trees.parents, trees.tree_size[:, None], proposed[:, None]
    )
    tokens, parents = np.full((2, batch, size), -1, np.int32)
    columns = np.full((batch, size), -1, np.int64)
    forced, given = np.zeros((2, batch, size), np.bool_)
    sizes = np.minimum(np.array(all_sizes, np.int32)[:, 0], size)
    for row, request in enumerate(requests):
        if request.grammar is None:
            taken = min(width, size)
            tokens[row, :taken] = all_tokens[row][:taken]
            parents[row, :taken] = all_parents[row][:taken]
            columns[row, :taken] = np.where(tokens[row, :taken] < 0, -1, np.arange(taken))
            continue
        tree = bind_tree(
            RequestMatcher(request.grammar, tokenizer),
            all_tokens[row],
            all_parents[row],
            by_row[row],
            most_proposed=all_proposed[row][0],
            most=size if rooms[row] else 1,
            max_depth=rooms[row],
            chain=chains,
        )
        sizes[row] = count = len(tree.tokens)
        tokens[row, :count] = all_tokens[row][0], *tree.tokens[1:]
        parents[row, :count] = tree.parents
        columns[row, :count] = tree.columns
        forced[row, :count] = tree.forced
        given[row, :count] = tree.given
    arrays = columns, tokens, parents, sizes, by_row.numpy(), forced, given
    sent = all_on_device(arrays, device)
    bound = DraftTree(sent[1], sent[2], sent[3])
    return BoundTrees(
        bound,
        sent[4],
        grammar,
        sent[0],
        width,
        sent[5] if bool(forced.any()) else None,
        sent[6] if bool(given.any()) else None,
    )


def _read(*tensors: torch.Tensor) -> list[list[list[int]]]:
    """The rows of `int32 [B, n]` tensors on the host, which waits for them, in one copy."""
    rows = AsyncHostCopy.of(torch.cat(tensors, 1)).wait().numpy()
    ends = np.cumsum([each.shape[1] for each in tensors])
    return [each.tolist() for each in np.split(rows, ends[:-1], 1)]


def _room(requests: Sequence[Any], rows: int, vocab_size: int) -> tuple[Any, torch.Tensor]:
    """A grammar of these requests, and masks that allow everything, `int32 [rows, W]`."""
    grammar = next(each.grammar for each in requests if each.grammar is not None)
    return grammar, grammar.allocate_vocab_mask(
        vocab_size=vocab_size, batch_size=rows, device="cpu"
    )
