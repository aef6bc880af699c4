"""The target's output head for the hot tokens alone.

A draft's logits cost one product with the whole head, which in small models and those of large
vocabularies is a good part of a forward. Drafts are nearly always frequent tokens, so a head of
these rows alone drafts nearly as well (FR-Spec, arXiv 2502.14856). What is verified stays whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttree.model_drafters import Head

_ROWS = 256
"""States whose logits are computed at once to read the head."""
_FACTOR = 1024.0
"""A power of two, by which no rounding changes; large enough for caps of logits to matter."""


class HotHead:
    """A copy of some rows of an output head.

    Args:
        tokens: Int `[H]`, the tokens of the rows.
        vocab_size: The number of tokens, V.
        width: The size of hidden states, d.
        dtype: Data type of the states.
        device: Where they are.
    """

    def __init__(
        self, tokens: Tensor, vocab_size: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tokens = tokens.long()
        self._vocab_size = vocab_size
        self._weight = torch.zeros(len(tokens), width, dtype=dtype, device=device)

    def read(self, head: Head) -> None:
        """Read the rows: the logits of unit vectors are the columns of a head's weights.

        It is so also where the weights are packed, quantized or spread over ranks. They are written
        where they were, as CUDA graphs may read them.

        Raises:
            ValueError: The logits are not linear in the states: they have a bias, or are capped.
        """
        weight = self._weight
        width = weight.shape[1]
        units = torch.eye(min(width, _ROWS), width, dtype=weight.dtype, device=weight.device)
        zero, one, many = head(torch.stack((0 * units[0], units[0], _FACTOR * units[0])))
        if bool((zero != 0).any()) or not torch.allclose(many, _FACTOR * one, rtol=0.02, atol=1e-3):
            raise ValueError("the target's logits have a bias or are capped")
        for first in range(0, width, _ROWS):
            units = torch.zeros(
                min(_ROWS, width - first), width, dtype=weight.dtype, device=weight.device
            )
            units[:, first:].fill_diagonal_(1)
            weight[:, first : first + _ROWS] = head(units)[:, self._tokens].T

    def logits(self, states: Tensor) -> Tensor:
        """Logits `[N, V]` of states `[N, d]`; -inf for all other tokens."""
        hot = states @ self._weight.T
        whole = hot.new_full((len(states), self._vocab_size), -torch.inf)
        return whole.index_copy_(1, self._tokens, hot)
