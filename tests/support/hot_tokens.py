"""Random hot tokens, as the token-info kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor


def random_hot_tokens(vocab: int, hot: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The row of each token in the table, `int32 [vocab]`, and the hot tokens, `int32 [hot]`."""
    hot_tokens = torch.randperm(vocab, generator=generator)[:hot].sort().values.int()
    row_of = torch.full((vocab,), -1, dtype=torch.int32)
    row_of[hot_tokens.long()] = torch.arange(hot, dtype=torch.int32)
    return row_of, hot_tokens
