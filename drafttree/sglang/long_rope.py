"""LongRoPE, whose frequencies in SGLang depend on the longest position of a forward.

If any row is beyond the original context, all rows are rotated by the long frequencies. So drafts
beyond it must not share a forward with a root before it: in plain decoding no row does.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding


def last_short_position(model: torch.nn.Module) -> int | None:
    """The last position that is rotated by the short frequencies; None without LongRoPE."""
    kind = Phi3LongRoPEScaledRotaryEmbedding
    found = [each for each in model.modules() if isinstance(each, kind)]
    return min((each.original_max_position_embeddings for each in found), default=None)


def up_to(last: int, left: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """How deep trees may be, so that they do not change how their roots are rotated.

    Args:
        last: The last position that is rotated by the short frequencies.
        left: `int64 [B]`, least depth that is too deep for other reasons.
        lengths: `int64 [B]`, the positions of the roots.

    Returns:
        Least depth that is too deep, `int64 [B]`.
    """
    return torch.where(lengths <= last, torch.minimum(left, last + 1 - lengths), left)
