"""The target's embeddings and LM head without LoRA adapters, for a drafter's layer.

Where adapters are served, vLLM wraps both, and the wrappers compute each row with the adapter that
is set for it in the engine's step. A drafter embeds other tokens and reads logits of other rows.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import nn
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA

_WRAPPERS = (LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA)


def unadapted_target(runner: Any) -> Any:
    """The target, whose `embed_input_ids` and `compute_logits` use its own weights alone.

    Args:
        runner: The worker's model runner, V1 or V2, whose model is loaded.
    """
    model = runner.get_model()
    return unadapted(model) if runner.lora_config else model


def unadapted(model: nn.Module) -> nn.Module:
    """A model without the wrappers of its embeddings and its head; other layers keep theirs.

    Returns:
        `model` itself if neither is wrapped, and else a copy that shares everything with it.
    """
    if isinstance(model, _WRAPPERS):
        base: nn.Module = model.base_layer
        return base
    own = {name: child and unadapted(child) for name, child in model._modules.items()}
    if all(child is model._modules[name] for name, child in own.items()):
        return model
    copied = copy(model)
    copied._modules = own
    return copied
