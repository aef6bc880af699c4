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


def _mistral(window: int) -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_shape(sliding_window=window))


def _gemma2() -> Any:
    from transformers import Gemma2Config

    # The activation under both names, as in the published models.
    changes = {"attn_logit_softcapping": 2.0, "tie_word_embeddings": True}
    changes |= {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    return Gemma2Config(**_shape(sliding_window=32, query_pre_attn_scalar=32, **changes))


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"]
    return Gemma3TextConfig(
        **_shape(sliding_window=32, query_pre_attn_scalar=32, layer_types=layers)
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    layers = ["sliding_attention", "full_attention"]
    return GptOssConfig(**_shape(sliding_window=32, layer_types=layers, **experts))


def _deepseek_v2() -> Any:
    from transformers import DeepseekV2Config

    heads = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    # As in the published models. The engine's CPU kernel for rotary positions without scaling
    # expects contiguous heads, which this family does not have.
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    # The engine's CPU kernel for latent attention has these sizes.
    return DeepseekV2Config(
        **_shape(
            kv_lora_rank=512,
            q_lora_rank=None,
            num_key_value_heads=4,
            first_k_dense_replace=1,
            rope_parameters=rope,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            **heads,
            **experts,
        )
    )


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig

    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    # The engine's CPU kernels for linear attention need heads of 128, and bfloat16.
    return Qwen3NextConfig(
        **_shape(
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            shared_expert_intermediate_size=64,
            layer_types=["linear_attention", "full_attention"],
            **heads,
            **experts,
        )
    )


def _minicpm3() -> Any:
    from transformers import MiniCPM3Config

    heads = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 48}
    ranks = {"kv_lora_rank": 64, "q_lora_rank": 96, "num_key_value_heads": 4}
    return MiniCPM3Config(**_shape(**heads, **ranks))


def _lfm2() -> Any:
    from transformers import Lfm2Config

    kinds = ["conv", "full_attention", "conv"]
    shape = _shape(num_hidden_layers=3, layer_types=kinds, block_auto_adjust_ff_dim=False)
    return Lfm2Config(**shape, conv_L_cache=3)


VISION: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "patch_size": 14}
"""What the vision towers of tiny models share."""


def _gemma3_vision() -> Any:
    from transformers import Gemma3Config

    tower = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56}
    return Gemma3Config(
        text_config=_gemma3().to_dict(),
        vision_config={**VISION, **tower},
        mm_tokens_per_image=4,
        image_token_index=511,
        boi_token_index=510,
        eoi_token_index=509,
        tie_word_embeddings=False,
    )


def _llava() -> Any:
    from transformers import CLIPVisionConfig, LlavaConfig

    tower = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56}
    return LlavaConfig(
        text_config=_llama(32),
        vision_config=CLIPVisionConfig(**VISION, **tower, projection_dim=64),
        image_token_index=IMAGE_BEYOND,
        image_seq_length=16,
        tie_word_embeddings=False,
    )


def _qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    tower = {"depth": 2, "num_heads": 2, "out_hidden_size": 128, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLConfig(
        text_config=_shape(rope_parameters=rope),
        vision_config={**VISION, **tower},
        image_token_id=IMAGE,
        video_token_id=IMAGE - 1,
        vision_start_token_id=IMAGE - 2,
        vision_end_token_id=IMAGE - 3,
        tie_word_embeddings=False,
    )


IMAGE = VOCABULARY - 1
"""The token in whose place a multimodal model sees a part of an image."""

IMAGE_BEYOND = VOCABULARY
"""The same for models whose embedding has no such token."""

FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "heads_of_80": lambda: _llama(80),
    "heads_of_112": lambda: _llama(112),
    "mistral": lambda: _mistral(24),
    "window_below_the_depth": lambda: _mistral(4),
    "wide_window": lambda: _mistral(4096),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
}
"""Configurations by name."""

MULTIMODAL: dict[str, Callable[[], Any]] = {
    "gemma3_vision": _gemma3_vision,
    "llava": _llava,
    "qwen2_5_vl": _qwen2_5_vl,
}
"""Configurations of models that also see."""

WITHOUT_TREES: dict[str, Callable[[], Any]] = {
    "deepseek_v2": _deepseek_v2,
    "qwen3_next": _qwen3_next,
}
"""Configurations of families of which vLLM verifies only chains of draft tokens."""

CHAINS_IN_SGLANG: dict[str, Callable[[], Any]] = {
    "lfm2": _lfm2,
    "minicpm3": _minicpm3,
}
"""Configurations of families of which SGLang verifies only chains of draft tokens."""


def make_tiny_family(
    name: str, folder: Path, *, sharpness: float = 12.0, embedding: float = 3.0, seed: int = 11
) -> Path:
    """Save a random model of a family by its name; the same arguments give the same weights.

    `sharpness` and `embedding` are the scales of the head and of the embedding, as in
    `make_tiny_llama`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    config = (FAMILIES | WITHOUT_TREES | CHAINS_IN_SGLANG | MULTIMODAL)[name]()
    kind = AutoModelForImageTextToText if name in MULTIMODAL else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        if head.weight is embeddings.weight:
            head.weight *= 2  # at more, such a model repeats its last token
        else:
            head.weight *= sharpness
            embeddings.weight *= embedding
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight *= 8
            elif name.endswith("mm_input_projection_weight"):
                weight.normal_(std=0.1)  # it begins with zeros, which show no image
    model.save_pretrained(folder)
    return folder
