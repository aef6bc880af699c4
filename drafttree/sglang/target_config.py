"""The target as SGLang's configuration describes it, before anything is loaded."""

from __future__ import annotations

from typing import Any


def target_config(server_args: Any) -> Any:
    """SGLang's `ModelConfig` of the target.

    Args:
        server_args: SGLang's arguments, or the recorder of changes that wraps them for plugins.
    """
    try:
        from sglang.srt.arg_groups.model_override_base import model_config_of
    except ImportError:
        return server_args.get_model_config()  # up to 0.5.18
    return model_config_of(getattr(server_args, "_cfg", server_args))


def uses_latent_attention(model: Any) -> bool:
    """Whether a model's KV are latent vectors, from which each head computes its own (MLA)."""
    return bool(model.attention_arch.name == "MLA")


def recurrent_config(model: Any) -> Any:
    """SGLang's configuration of a model's recurrent layers; None if it has none."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model)
