"""Lyanna's drafters for the tiny targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drafttree.model_files import first_rows_fingerprint
from lyanna_plugin.checkpoint import layer_config
from lyanna_plugin.model import LyannaConfig, LyannaModel


def drafter_for(
    target: Path,
    seed: int = 0,
    hot_tokens: int = 64,
    model: type[LyannaModel] = LyannaModel,
    **shape: Any,
) -> LyannaModel:
    """A drafter with random weights."""
    torch.manual_seed(seed)
    config = LyannaConfig(
        target=target.name,
        fingerprint=first_rows_fingerprint(target),
        **{"token_info_rank": 8, "num_hot_tokens": hot_tokens, **shape},
    )
    return model(layer_config(target), config, torch.arange(hot_tokens))
