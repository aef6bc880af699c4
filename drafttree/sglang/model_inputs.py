"""Inputs of multimodal targets in SGLang: what stands for images, and M-RoPE positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def without_placeholders(config: Any, ids: torch.Tensor) -> torch.Tensor:
    """Tokens that a drafter may read, `int32 [n]`.

    In place of an image SGLang puts hashes of it, which name it in the cache of prefixes. They are
    beyond every vocabulary; 0 stands for them.

    Args:
        config: SGLang's configuration of the target.
        ids: Tokens of a prompt, `int64 [n]`, before the forward, which writes others over hashes.
    """
    if config.is_multimodal:
        ids = ids.masked_fill(ids >= config.vocab_size, 0)
    return ids.int()


def text_without_placeholders(config: Any, request: Any) -> list[int]:
    """The same for a request's prompt and what was generated after it."""
    text = [*request.origin_input_ids, *request.output_ids]
    if not config.is_multimodal:
        return text
    ids = np.array(text)
    tokens: list[int] = np.where(ids < config.vocab_size, ids, 0).tolist()
    return tokens


def use_text_positions(runner: Any, batch: Any) -> None:
    """Give a batch that drafttree makes itself, of text alone, the positions that M-RoPE reads.

    Args:
        runner: The target's model runner.
        batch: SGLang's forward batch, with its positions.
    """
    # Versions before 0.5.23, with which multimodal models are refused, may not have it here.
    if getattr(runner.model_config, "model_is_mrope", False):
        batch.mrope_positions = batch.positions.expand(3, -1)
