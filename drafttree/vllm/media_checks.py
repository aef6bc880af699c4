"""Refuses the ways of reading images, sound and video with which vLLM cannot serve draft trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drafttree.compatibility import is_refused

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    from drafttree.method import Method


def check_media(
    method: Method[Any], engine: EngineArgs, model: ModelConfig, without_trees: Sequence[str]
) -> None:
    """Refuse a multimodal model that reads media in another way than by embeddings in its prompt.

    Args:
        method: The requested method.
        engine: The engine's arguments.
        model: The target.
        without_trees: Why chains are drafted in place of trees; empty if they are not.

    Raises:
        ValueError: The message names the model, what it does, and the fix.
    """
    if not model.is_multimodal_model:
        return
    media = model.multimodal_config
    leave = "leave the speculative method out"
    for feature, found, trait, fix in (
        (
            "attended-images",
            # Without images no token attends to later ones.
            model.supports_multimodal_inputs and model.is_mm_prefix_lm,
            "lets the tokens of an image attend to later ones",
            "serve text alone with limit_mm_per_prompt",
        ),
        (
            "special-media",
            model.requires_raw_input_tokens or model.is_multimodal_raw_input_only_model,
            "reads media while it generates",
            leave,
        ),
        # Older versions have no such positions under the name of M-RoPE.
        (
            "special-media",
            getattr(model, "uses_xdrope_dim", 0) > 0,
            "uses XD-RoPE positions",
            leave,
        ),
        (
            "special-media",
            getattr(media, "video_pruning_rate", None),
            "is to prune videos",
            "leave video_pruning_rate out",
        ),
        (
            "special-media",
            engine.enable_lora,
            "is multimodal and to be served with LoRA adapters",
            "leave them out",
        ),
        (
            "special-media",
            without_trees,
            "is multimodal where chains are drafted in place of trees "
            f"({' and '.join(without_trees)})",
            leave,
        ),
    ):
        if found and is_refused("vllm", method.kind.name, feature):
            raise ValueError(
                f"{method.title} does not work with model={model.model!r}, which {trait}: {fix}"
            )
