"""What transformers predicts after each single token, and a check of primed tables by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def top_tokens(folder: Path, k: int) -> torch.Tensor:
    """The k most likely tokens after each `[BOS, t]`, or `[t]` without BOS, `int32 [V, k]`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = json.loads((folder / "config.json").read_text())
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    target = kind.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(target.config.get_text_config().vocab_size)[:, None]
    bos = config.get("text_config", config)["bos_token_id"]
    if bos is not None:
        tokens = torch.cat((torch.full_like(tokens, bos), tokens), 1)
    with torch.inference_mode():
        best: torch.Tensor = target(tokens).logits[:, -1].topk(k).indices.int()
    return best


def check_primed(model: Path, k: int = 8, share: float = 0.995) -> None:
    """A model's file in the user's cache has the k most likely tokens after each token.

    Args:
        model: The model's folder.
        k: Tokens of a row.
        share: The least share of entries that must be equal, as nearly equal logits may swap ranks.
    """
    from recycle_plugin.storage.primed_files import load_primed, primed_file, primed_identity

    expected = top_tokens(model, k)
    rows = load_primed(primed_file(model, k), primed_identity(model, k), len(expected))
    assert (rows == expected).float().mean() > share
