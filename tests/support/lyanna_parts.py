"""Lyanna's drafters for the tiny targets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from drafttree.model_files import first_rows_fingerprint
from drafttree.target import Target
from lyanna_plugin.checkpoint import layer_config
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.drafter import LyannaDrafter
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


def serve(
    target: Path,
    drafter: Path,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> LyannaDrafter:
    """The drafter of a folder, as an engine makes it for a tiny target."""
    described = Target(
        model=str(target),
        vocab_size=512,
        device=torch.device(device),
        dtype=dtype,
        logger=logging.getLogger(__name__),
        embed=torch.nn.Embedding(512, 128, dtype=dtype).requires_grad_(False),
    )
    return LyannaDrafter(LyannaOptions(model=str(drafter), **options), described)


def predict_embeddings(module: LyannaModel) -> None:
    """Let a drafter predict that the next hidden state is, nearly, the last token's embedding."""
    with torch.no_grad():
        hidden, embedded = module.fuse_proj.weight.chunk(2, 1)
        hidden.zero_()
        embedded.copy_(torch.eye(len(embedded)))
        for projection in (module.self_attn.o_proj, module.mlp.down_proj):
            projection.weight *= 0.1
        module.token_info.gain *= 0.1
