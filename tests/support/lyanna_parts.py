"""Drafters for the tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lyanna_plugin.checkpoint import fingerprint, layer_config
from lyanna_plugin.config_file import DrafterConfig
from lyanna_plugin.model import Drafter


def drafter_for(target: Path, seed: int = 0, hot_tokens: int = 64, **shape: Any) -> Drafter:
    """A drafter with random weights."""
    torch.manual_seed(seed)
    config = DrafterConfig(
        target=target.name,
        fingerprint=fingerprint(target),
        **{"token_info_rank": 8, "num_hot_tokens": hot_tokens, **shape},
    )
    return Drafter(layer_config(target), config, torch.arange(hot_tokens))
