"""Inputs of multimodal targets in vLLM: embeddings, placeholders of images and M-RoPE positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch


def text_inputs(runner: Any, ids: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
    """The inputs of a forward over text alone, in the form of the engine's own forwards.

    The target may be compiled, and then it takes no other form.

    Args:
        runner: The worker's model runner, V1 or V2. No step may be in preparation.
        ids: Tokens, `int32 [n]`.
        positions: Their positions, `int64 [n]`.

    Returns:
        Keyword arguments of the target.
    """
    embeddings = None
    if runner.supports_mm_inputs:
        embeddings = runner.model.embed_input_ids(ids)
    rope = rope_positions(runner)
    if rope is not None:
        # The engine writes this buffer anew in each step.
        rope = rope[:, : len(positions)]
        rope.copy_(positions)
    return {
        "input_ids": ids if embeddings is None else None,
        "positions": positions if rope is None else rope,
        "inputs_embeds": embeddings,
    }


def without_placeholders(runner: Any, ids: torch.Tensor) -> torch.Tensor:
    """Tokens that a drafter may read, `int32 [n]`.

    Some models mark images by placeholders beyond their vocabulary. 0 stands for them.
    """
    if not runner.supports_mm_inputs:
        return ids
    return ids.masked_fill(ids >= runner.model_config.get_vocab_size(), 0)


def text_without_placeholders(runner: Any, text: Sequence[int]) -> Sequence[int]:
    """The same for a text on the host."""
    if not runner.supports_mm_inputs:
        return text
    ids: Any = np.asarray(text)
    ids = np.where(ids < runner.model_config.get_vocab_size(), ids, 0)
    return cast(Sequence[int], ids)


def rope_positions(runner: Any) -> torch.Tensor | None:
    """The engine's buffer of M-RoPE positions, `int64 [dimensions, tokens]`; None without them."""
    state = rope_state(runner)
    positions: torch.Tensor | None = None
    if state is not None:
        positions = state.positions
    elif getattr(runner, "uses_mrope", False):
        positions = runner.mrope_positions.gpu
    return positions


def rope_state(runner: Any) -> Any:
    """The state of M-RoPE positions on the V2 model runner; None on V1, and without them."""
    return getattr(getattr(runner, "model_state", None), "rope_state", None)
