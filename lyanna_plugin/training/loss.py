"""The loss over the unrolled steps (Lyanna, section 4.3): the mean squared error of the hidden
states, and the cross-entropy of the next token with token info added.

The cross-entropy is computed over a part of the vocabulary: the most frequent tokens, the target's
most likely tokens in the batch, and a random sample of the others. N is the number of positions, K
the number of the target's most likely tokens that are stored, C the number of columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lyanna_plugin.model import LyannaModel
from lyanna_plugin.training.batches import Batch


@dataclass(frozen=True)
class LossWeights:
    """The weights of the parts of the loss.

    Attributes:
        hidden: Weight of the mean squared error (alpha in the paper).
        token: Weight of the cross-entropy (beta in the paper).
        decay: Weight of each step relative to the step before.
    """

    hidden: float = 1.0
    token: float = 1.0
    decay: float = 0.8


class Columns:
    """Chooses the part of the vocabulary over which each batch's cross-entropy is computed.

    Args:
        frequent: `int64 [F]`, tokens that are always included.
        vocab_size: Vocabulary size of the target.
        sampled: Number of other tokens that are sampled.
    """

    def __init__(self, frequent: Tensor, vocab_size: int, sampled: int) -> None:
        self._frequent = frequent
        self._vocab_size = vocab_size
        self._sampled = sampled

    def draw(self, top_tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Choose columns.

        Args:
            top_tokens: `int64 [N, K]`, tokens that must be included.
            generator: Source of the random sample.

        Returns:
            `int64 [C]`, the columns; `float [C]`, additions to the logits that correct for the
            tokens left out; and `int64 [N, K]`, the indices of `top_tokens` in the columns.
        """
        device = top_tokens.device
        certain = torch.zeros(self._vocab_size, dtype=torch.bool, device=device)
        certain[self._frequent.to(device)] = True
        certain[top_tokens.flatten()] = True
        included, others = certain.nonzero()[:, 0], (~certain).nonzero()[:, 0]
        count = min(self._sampled, len(others))
        order = torch.randperm(len(others), generator=generator)[:count].to(device)
        columns = torch.cat([included, others[order]])
        correction = torch.zeros(len(columns), device=device)
        if count:
            correction[len(included) :] = torch.tensor(len(others) / count).log()
        index_of = torch.full((self._vocab_size,), -1, device=device)
        index_of[columns] = torch.arange(len(columns), device=device)
        return columns, correction, index_of[top_tokens]


class DrafterLoss(nn.Module):
    """A draft model with its loss.

    Args:
        drafter: The draft model.
        embeddings: `[V, d]`, the target's embeddings, which are not trained.
        head: `[V, d]`, the target's output head, which is not trained.
        columns: Chooses the part of the vocabulary for the cross-entropy.
        weights: The weights of the parts of the loss.
    """

    embeddings: Tensor
    head: Tensor

    def __init__(
        self,
        drafter: LyannaModel,
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
        """Compute the loss of a batch.

        Args:
            batch: The batch.
            generator: Source of the sample of the vocabulary.

        Returns:
            The loss, and `[2, steps]`: the cross-entropy and the accuracy of each step.
        """
        drafter, steps = self.drafter, self.drafter.config.steps
        # The padding is only read at positions that are not in the loss.
        tokens = F.pad(batch.tokens, (0, steps))
        embedded = self.embeddings[tokens[:, 1:]]
        states = drafter.unroll(batch.hidden, embedded, steps)
        in_loss = batch.in_answer.clone()
        in_loss[:, :steps] = False
        rows, at = in_loss.nonzero(as_tuple=True)
        drafted = torch.stack([state[rows, at - 1 - i] for i, state in enumerate(states)])
        truth = batch.hidden[rows, at]
        columns, correction, indices = self._columns.draw(batch.top_tokens[rows, at], generator)
        # The loss needs float32 even if the layer runs in bfloat16.
        with torch.autocast(drafted.device.type, enabled=False):
            drafted = drafted.float()
            logits = drafted @ self.head[columns].T + correction
            logits = logits + self._token_info(batch.tokens[rows, at], columns)
        probs = batch.top_probs[rows, at]
        probs = probs / probs.sum(-1, keepdim=True)
        chosen = logits.gather(2, indices.expand(steps, -1, -1))
        # A batch of short texts may have no position in the loss.
        count = max(len(rows), 1)
        entropy = (logits.logsumexp(-1) - (chosen * probs).sum(-1)).sum(1) / count
        error = (drafted - truth).square().mean(2).sum(1) / count
        weights = self._weights.decay ** torch.arange(steps, device=error.device)
        loss = (weights * (self._weights.hidden * error + self._weights.token * entropy)).sum()
        hits = (logits.detach().argmax(-1) == indices[:, 0]).float().sum(1) / count
        return loss, torch.stack([entropy.detach(), hits])

    def _token_info(self, parents: Tensor, columns: Tensor) -> Tensor:
        """The token info that the tokens `parents`, `int [N]`, add to the columns, `[N, C]`."""
        info = self.drafter.token_info
        rows = info.row_of[columns].long()
        added = info.columns()[:, rows.clamp(min=0)] * (rows >= 0)
        return info.codes(parents, self.embeddings[parents]) @ added
