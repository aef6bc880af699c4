"""A draft model beside the target, whose layers join the engine's KV cache groups."""

from __future__ import annotations

import copy
from typing import Any

from vllm.compilation.backends import set_model_tag
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model

from drafttree.model_drafters import DraftModelDrafter
from drafttree.vllm.checks import check_full_attention

PREFIX = "draft_model"
"""Prefix of the draft model's layers in the engine's registry of layers."""


def load_draft_model(
    path: str, engine: VllmConfig, load: LoadConfig, drafter: DraftModelDrafter
) -> Any:
    """Load a draft model as the engine loads a target; the target must be loaded already.

    Args:
        path: The draft model's folder.
        engine: The engine's configuration, in which the layers are registered.
        load: How the engine loads models.
        drafter: The drafter, which reads the model's output head.

    Returns:
        vLLM's model.

    Raises:
        ValueError: The engine cannot serve the two models together.
    """
    target = engine.model_config
    config = copy.copy(engine)
    config.model_config = ModelConfig(
        model=path,
        tokenizer=target.tokenizer,
        trust_remote_code=target.trust_remote_code,
        dtype=target.dtype,
        seed=target.seed,
        max_model_len=target.max_model_len,
        enforce_eager=target.enforce_eager,
        skip_tokenizer_init=True,
    )
    check_full_attention("drafting", config.model_config)
    config.quant_config = VllmConfig.get_quantization_config(config.model_config, load)
    with set_model_tag(PREFIX):
        model = get_model(vllm_config=config, prefix=PREFIX)
    _check_heads(path, engine.compilation_config.static_forward_context)
    hidden_size = config.model_config.get_hidden_size()
    drafter.read_head(model.compute_logits, hidden_size, config.model_config.dtype)
    return model


def _check_heads(path: str, layers: dict[str, Any]) -> None:
    """Refuse a draft model whose layers cannot share a metadata builder with the target's.

    Layers with KV of the same shape share one, which has a single number of query heads.
    """
    heads: dict[tuple[int, int], set[int]] = {}
    for layer in layers.values():
        if isinstance(layer, Attention):
            shape = layer.num_kv_heads, layer.head_size
            heads.setdefault(shape, set()).add(layer.num_heads)
    for (kv_heads, size), counts in heads.items():
        if len(counts) > 1:
            raise ValueError(
                f"model={path!r} and the target both have {kv_heads} KV heads of size {size} but "
                f"{sorted(counts)} query heads, which vLLM cannot serve together: use another "
                "draft model"
            )
