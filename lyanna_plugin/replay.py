"""Decoding replayed over text that the target has written greedily: what a drafter would have had
accepted, without running the target again.

Every tree is built by the product's own code from the logits that the layer gives on that text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttree.drafter import DraftTree
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.drafter import LyannaTrees
from lyanna_plugin.model import Drafter
from lyanna_plugin.tree import TokenTable


@dataclass(frozen=True)
class Text:
    """A prompt with its greedy answer.

    Attributes:
        tokens: int64 `[T]`.
        hidden: float32 `[T, d]`, the target's.
        start: the place of the answer's first token.
    """

    tokens: Tensor
    hidden: Tensor
    start: int


@dataclass(frozen=True)
class Replayed:
    """What became of one text.

    Attributes:
        steps: of decoding, the prompt's own forward not counted.
        tokens: that these steps gave.
        nodes: draft nodes that were verified.
    """

    steps: int
    tokens: int
    nodes: int


Propose = Callable[[Tensor, Tensor, Tensor], DraftTree]
"""`(rows int64 [n], places int64 [n], roots int32 [n]) -> trees` under the roots, which stand at
those places of those texts."""


@torch.inference_mode()
def replay(
    texts: Sequence[Text],
    depth: int,
    propose: Propose,
    accepted: Callable[[Tensor, Tensor], None] = lambda rows, drafts: None,
) -> list[Replayed]:
    """Decode all texts side by side.

    Args:
        depth: the greatest of a node.
        accepted: told the texts, int64 `[n]`, and how many drafts of the last trees were right.
    """
    lengths = torch.tensor([len(text.tokens) for text in texts])
    padded = pad_sequence([text.tokens for text in texts], True)
    padded = torch.nn.functional.pad(padded, (0, depth + 1), value=-1)
    at = torch.tensor([text.start for text in texts])
    counts = torch.zeros(3, len(texts), dtype=torch.int64)
    while (rows := (at < lengths - 1).nonzero()[:, 0]).numel():
        places = at[rows]
        trees = propose(rows, places, padded[rows, places].int())
        node = torch.zeros_like(rows)
        drafts = torch.zeros_like(rows)
        going = torch.ones_like(rows, dtype=torch.bool)
        for ahead in range(1, depth + 1):
            right = (trees.parents == node[:, None]) & going[:, None]
            right &= trees.tokens == padded[rows, places + ahead][:, None]
            going = right.any(1)
            node = right.to(torch.int8).argmax(1)
            drafts += going
        accepted(rows, drafts)
        gained = torch.minimum(drafts + 1, lengths[rows] - 1 - places)
        counts[0, rows] += 1
        counts[1, rows] += gained
        counts[2, rows] += trees.num_nodes.long() - 1
        at[rows] += gained
    return [Replayed(*each) for each in counts.T.tolist()]


class LyannaReplay:
    """Lyanna's trees on texts.

    Args:
        embeddings, head: float32 `[V, d]`, the target's.
        steps: the most that any run will draft.
    """

    def __init__(
        self,
        texts: Sequence[Text],
        drafter: Drafter,
        embeddings: Tensor,
        head: Tensor,
        steps: int,
    ) -> None:
        self._texts = texts
        self._head = head
        info = drafter.token_info
        if info is None:
            self._table = TokenTable.empty(len(embeddings))
        else:
            hot = embeddings[info.hot_tokens.long()]
            self._table = TokenTable.of(info, hot, torch.float32)
        with torch.inference_mode():
            self._states = [
                torch.stack(
                    drafter.unroll(text.hidden[None], embeddings[text.tokens[1:]][None], steps)
                )[:, 0].transpose(0, 1)
                for text in map(_without_last, texts)
            ]

    def run(self, options: LyannaOptions) -> list[Replayed]:
        """Decode all texts."""
        trees = LyannaTrees(options, self._table, torch.float32)
        trees.allot(len(self._texts))

        def propose(rows: Tensor, places: Tensor, roots: Tensor) -> DraftTree:
            pairs = zip(rows.tolist(), places.tolist(), strict=True)
            states = torch.stack(
                [self._states[row][place - 1, : options.steps] for row, place in pairs]
            )
            steps = torch.full_like(rows, options.steps)
            return trees.propose(rows, roots, states @ self._head.T, steps)

        return replay(self._texts, options.steps, propose, trees.accepted)


def _without_last(text: Text) -> Text:
    """The hidden states that are followed by a known token."""
    return Text(text.tokens, text.hidden[:-1], text.start)
