"""LongRoPE, whose frequencies in SGLang depend on the longest position of a forward.

If any row is beyond the original context, all rows are rotated by the long frequencies. So a draft
beyond it must not share a forward with its root before it.
"""

from __future__ import annotations

from typing import Any

import torch


def last_short_position(model: torch.nn.Module) -> int | None:
    """The last position that is rotated by the short frequencies; None without LongRoPE."""
    # Its module is not the same in all versions.
    kind = "Phi3LongRoPEScaledRotaryEmbedding"
    found: list[Any] = [each for each in model.modules() if type(each).__name__ == kind]
    return min((each.original_max_position_embeddings for each in found), default=None)


def tokens_left(last: int, left: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """How many tokens requests may emit after their roots, so that these are rotated as without
    drafts.

    Args:
        last: The last position that is rotated by the short frequencies.
        left: `int64 [B]`, how many they may emit at most for other reasons.
        lengths: `int64 [B]`, the positions of the roots.

    Returns:
        Their numbers, `int64 [B]`, as for `drop_unusable`.
    """
    return torch.where(lengths <= last, torch.minimum(left, last + 1 - lengths), left)
