"""Tiny random models of families beside Llama, made from their configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_models import SHAPE

VOCABULARY = 512


def _shape(**changes: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "num_attention_heads": 4, **SHAPE, **changes}


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeConfig(**_shape(norm_topk_prob=True, **experts))


def _mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**_shape(num_local_experts=4, num_experts_per_tok=2))


def _llama(head_size: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_shape(head_dim=head_size))


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "heads_of_80": lambda: _llama(80),
    "heads_of_112": lambda: _llama(112),
}
"""Configurations by name."""


def make_tiny_family(
    name: str, folder: Path, *, sharpness: float = 12.0, embedding: float = 3.0, seed: int = 11
) -> Path:
    """Save a random model of one of `FAMILIES`; the same arguments give the same weights.

    `sharpness` and `embedding` are the scales of the head and of the embedding, as in
    `make_tiny_llama`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight *= embedding
        model.get_output_embeddings().weight *= sharpness
    model.save_pretrained(folder)
    return folder
