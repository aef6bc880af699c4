"""The loss over the unrolled steps (Lyanna, section 4.3): the target's hidden states by their mean
squared error, and its next token by the cross-entropy, with token info.

The cross-entropy is taken over a part of the vocabulary: the most frequent tokens, the target's own
likeliest in the batch, and a random sample that stands for all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lyanna_plugin.model import Drafter
from lyanna_plugin.training.batches import Batch


@dataclass(frozen=True)
class LossWeights:
    """What each part of the loss weighs.

    Attributes:
        hidden: the mean squared error (the paper's alpha).
        token: the cross-entropy (its beta).
        decay: each step against the one before.
    """

    hidden: float = 1.0
    token: float = 1.0
    decay: float = 0.8


class Columns:
    """A part of the vocabulary, another for each batch.

    Args:
        frequent: int64, the tokens that are always in it.
        vocab_size: of the target.
        sampled: how many of the others are drawn.
    """

    def __init__(self, frequent: Tensor, vocab_size: int, sampled: int) -> None:
        self._frequent = frequent
        self._vocab_size = vocab_size
        self._sampled = sampled

    def draw(self, likeliest: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Choose columns so that all of `likeliest`, int64 `[N, K]`, are among them.

        Returns:
            int64 `[C]`, the columns; float `[C]`, what makes up for those left out; and
            int64 `[N, K]`, the places of `likeliest` among them.
        """
        device = likeliest.device
        certain = torch.zeros(self._vocab_size, dtype=torch.bool, device=device)
        certain[self._frequent.to(device)] = True
        certain[likeliest.flatten()] = True
        sure, others = certain.nonzero()[:, 0], (~certain).nonzero()[:, 0]
        count = min(self._sampled, len(others))
        order = torch.randperm(len(others), generator=generator)[:count].to(device)
        columns = torch.cat([sure, others[order]])
        makes_up = torch.zeros(len(columns), device=device)
        if count:
            makes_up[len(sure) :] = torch.tensor(len(others) / count).log()
        places = torch.full((self._vocab_size,), -1, device=device)
        places[columns] = torch.arange(len(columns), device=device)
        return columns, makes_up, places[likeliest]


class DrafterLoss(nn.Module):
    """A drafter with its loss.

    Args:
        embeddings: `[V, d]`, the target's; not trained.
        head: `[V, d]`, the target's; not trained.
    """

    embeddings: Tensor
    head: Tensor

    def __init__(
        self,
        drafter: Drafter,
        embeddings: Tensor,
        head: Tensor,
        columns: Columns,
        weights: LossWeights,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self._columns = columns
        self._weights = weights
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("head", head, persistent=False)

    def forward(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and a `[2, steps]` of its cross-entropy and accuracy by step."""
        drafter, steps = self.drafter, self.drafter.config.steps
        # A padded end stands for tokens that only rows without a loss would read.
        tokens = F.pad(batch.tokens, (0, steps))
        embedded = self.embeddings[tokens[:, 1:]]
        states = drafter.unroll(batch.hidden, embedded, steps)
        wanted = batch.wanted.clone()
        wanted[:, :steps] = False
        rows, at = wanted.nonzero(as_tuple=True)
        drafted = torch.stack([state[rows, at - 1 - i] for i, state in enumerate(states)])
        truth = batch.hidden[rows, at]
        columns, makes_up, places = self._columns.draw(batch.likeliest[rows, at], generator)
        # Logits want float32 whatever the layer is multiplied in.
        with torch.autocast(drafted.device.type, enabled=False):
            drafted = drafted.float()
            logits = drafted @ self.head[columns].T + makes_up
            if drafter.token_info is not None:
                logits = logits + self._token_info(batch.tokens[rows, at], columns)
        probs = batch.probs[rows, at]
        probs = probs / probs.sum(-1, keepdim=True)
        chosen = logits.gather(2, places.expand(steps, -1, -1))
        entropy = (logits.logsumexp(-1) - (chosen * probs).sum(-1)).mean(1)
        error = (drafted - truth).square().mean((1, 2))
        weights = self._weights.decay ** torch.arange(steps, device=error.device)
        loss = (weights * (self._weights.hidden * error + self._weights.token * entropy)).sum()
        hits = (logits.detach().argmax(-1) == places[:, 0]).float().mean(1)
        return loss, torch.stack([entropy.detach(), hits])

    def _token_info(self, parents: Tensor, columns: Tensor) -> Tensor:
        """What the parents add to the columns, `[N, C]`."""
        info = self.drafter.token_info
        assert info is not None
        rows = info.row_of[columns].long()
        added = info.columns()[:, rows.clamp(min=0)] * (rows >= 0)
        return info.codes(parents, self.embeddings[parents]) @ added
