"""An output head for the hot tokens alone.

A draft's logits cost one product with the whole head, which in small models and those of large
vocabularies is a good part of a forward. Drafts are nearly always frequent tokens, so a head of
these rows alone drafts nearly as well (FR-Spec, arXiv 2502.14856). What is verified stays whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttree.linear import Linear
from drafttree.model_drafters import Head

_ROWS = 64
"""States whose logits are computed at once to read the head."""
_FACTOR = 4096.0
"""A power of two, by which no rounding changes; large enough for caps of logits to matter."""


class HotHead:
    """A copy of the hot tokens' rows of an output head.

    Args:
        tokens: Int `[H]`, the hot tokens.
        width: The size of hidden states, d.
        dtype: Data type of the states.

    Attributes:
        tokens: `int64 [H]`, the hot tokens.
    """

    def __init__(self, tokens: Tensor, width: int, dtype: torch.dtype) -> None:
        self.tokens = tokens.long()
        # On a CPU the product has a copy of its own.
        rows = 0 if tokens.device.type == "cpu" else len(tokens)
        self._weight = torch.zeros(rows, width, dtype=dtype, device=tokens.device)

    def check(self, head: Head) -> None:
        """Check that the logits are a product with weights.

        Raises:
            ValueError: They have a bias, or are capped.
        """
        states = self._weight.new_zeros(3, self._weight.shape[1])
        states[:, 0] = torch.tensor([0, 1, _FACTOR])
        zero, one, many = head(states)
        if bool((zero != 0).any()) or not torch.allclose(many, _FACTOR * one, rtol=0.02, atol=1e-3):
            raise ValueError("its logits have a bias or are capped")

    def read(self, head: Head) -> None:
        """Read the rows: the logits of unit vectors are the columns of a head's weights.

        It is so also where the weights are packed, quantized or spread over ranks. On a GPU they
        are written where they were, as graphs may read them.
        """
        weight = self._weight
        if not len(weight):
            weight = weight.new_empty(len(self.tokens), weight.shape[1])
        for first in range(0, weight.shape[1], _ROWS):
            columns = weight[:, first : first + _ROWS]
            units = weight.new_zeros(columns.shape[1], weight.shape[1])
            units[:, first:].fill_diagonal_(1)
            columns.copy_(head(units)[:, self.tokens].T)
        self._product = Linear(weight)

    def logits(self, states: Tensor) -> Tensor:
        """Logits `[N, H]` of states `[N, d]`."""
        return self._product(states)
