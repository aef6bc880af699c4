"""Decoding replayed over text that the target has written greedily.

It counts the draft tokens that would have been accepted, without running the target again. Every
tree is built by the drafter's own code from the layer's logits on that text. n is the number of
texts that are still being decoded, d the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttree.tree import DraftTree, Verified
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.drafter import LyannaTrees
from lyanna_plugin.model import LyannaModel
from lyanna_plugin.tree import TokenTable
from scripts.experiments.common import Replayed


@dataclass(frozen=True)
class Text:
    """A prompt with its greedy answer.

    Attributes:
        tokens: `int64 [T]`, prompt and answer.
        hidden: `float32 [T, d]`, the target's hidden states.
        start: Position of the answer's first token.
    """

    tokens: Tensor
    hidden: Tensor
    start: int


Propose = Callable[[Tensor, Tensor, Tensor], DraftTree]
"""`(rows int64 [n], positions int64 [n], roots int32 [n]) -> trees`: drafts under the roots, which
are at these positions of these texts."""

OnVerified = Callable[[Tensor, DraftTree, Verified], None]
"""`(rows int64 [n], trees, verified)`: called after each verification."""


@torch.inference_mode()
def replay(
    texts: Sequence[Text],
    depth: int,
    propose: Propose,
    on_verified: OnVerified = lambda rows, trees, verified: None,
) -> list[Replayed]:
    """Decode all texts side by side.

    Args:
        texts: The texts.
        depth: Maximum depth of a draft token.
        propose: Drafts trees.
        on_verified: Called after each verification.
    """
    lengths = torch.tensor([len(text.tokens) for text in texts])
    padded = pad_sequence([text.tokens for text in texts], True)
    padded = torch.nn.functional.pad(padded, (0, depth + 1), value=-1)
    at = torch.tensor([text.start for text in texts])
    counts = torch.zeros(3, len(texts), dtype=torch.int64)
    while (rows := (at < lengths - 1).nonzero()[:, 0]).numel():
        positions = at[rows]
        trees = propose(rows, positions, padded[rows, positions].int())
        follows = padded[rows[:, None], positions[:, None] + torch.arange(1, depth + 2)]
        verified = _verify(trees, follows)
        on_verified(rows, trees, verified)
        emitted = torch.minimum(verified.num_emitted.long(), lengths[rows] - 1 - positions)
        counts[0, rows] += 1
        counts[1, rows] += emitted
        counts[2, rows] += trees.tree_size.long() - 1
        at[rows] += emitted
    return [Replayed(*each) for each in counts.T.tolist()]


def _verify(trees: DraftTree, follows: Tensor) -> Verified:
    """Verify trees against the tokens that follow their roots, `int64 [n, D + 1]`."""
    node = torch.zeros(len(follows), dtype=torch.int64)
    accepted = torch.zeros_like(node)
    alive = torch.ones_like(node, dtype=torch.bool)
    path = torch.full_like(follows, -1)
    path[:, 0] = 0
    for depth, token in enumerate(follows.T[:-1], start=1):
        matches = (trees.parents == node[:, None]) & (trees.tokens == token[:, None])
        matches &= alive[:, None]
        alive = matches.any(1)
        node = matches.to(torch.int8).argmax(1)
        accepted += alive
        path[:, depth] = torch.where(alive, node, -1)
    emitted = follows.masked_fill(path < 0, -1)
    return Verified(path.int(), emitted.int(), (accepted + 1).int())


class LyannaReplay:
    """Replays decoding with Lyanna's trees.

    Args:
        texts: The texts.
        drafter: The draft model.
        embeddings: `float32 [V, d]`, the target's embeddings.
        head: `float32 [V, d]`, the target's output head.
        steps: Maximum number of drafting steps of any run.
    """

    def __init__(
        self,
        texts: Sequence[Text],
        drafter: LyannaModel,
        embeddings: Tensor,
        head: Tensor,
        steps: int,
    ) -> None:
        self._texts = texts
        self._head = head
        hot = embeddings[drafter.token_info.hot_tokens.long()]
        self._table = TokenTable.of(drafter.token_info, hot, torch.float32)
        with torch.inference_mode():
            self._states = [
                torch.stack(
                    drafter.unroll(text.hidden[None], embeddings[text.tokens[1:]][None], steps)
                )[:, 0].transpose(0, 1)
                for text in map(_without_last, texts)
            ]

    def run(self, options: LyannaOptions) -> list[Replayed]:
        """Decode all texts with the given options."""
        trees = LyannaTrees(options, self._table, torch.float32)
        trees.allocate(len(self._texts), max(len(text.tokens) for text in self._texts))

        def propose(rows: Tensor, positions: Tensor, roots: Tensor) -> DraftTree:
            pairs = zip(rows.tolist(), positions.tolist(), strict=True)
            states = torch.stack(
                [self._states[row][position - 1, : options.steps] for row, position in pairs]
            )
            steps = torch.full_like(rows, options.steps)
            return trees.propose(rows, roots, states @ self._head.T, steps)

        return replay(self._texts, options.steps, propose, trees.on_verified)


def _without_last(text: Text) -> Text:
    """The text without the hidden state of its last token, which has no next token."""
    return Text(text.tokens, text.hidden[:-1], text.start)
