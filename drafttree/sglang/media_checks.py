"""Refuses the ways of reading images, sound and video with which SGLang cannot serve trees."""

from __future__ import annotations

from typing import Any

import sglang

from drafttree.compatibility import is_refused
from drafttree.method import Method
from drafttree.sglang.target_config import recurrent_config, uses_latent_attention
from drafttree.sglang.versions import TESTED, is_tested

_READS_AGAIN = "reads media again wherever drafts are verified"

ARCHITECTURES = {
    "DiffusionGemmaForBlockDiffusion": "generates blocks of tokens at a time",
    "GlmImageForConditionalGeneration": "gives the tokens of an answer the positions of an image",
    "LlavaLlamaForCausalLM": _READS_AGAIN,
    "LlavaMistralForCausalLM": _READS_AGAIN,
    "LlavaQwenForCausalLM": _READS_AGAIN,
    "LlavaVidForCausalLM": _READS_AGAIN,
}
"""SGLang's multimodal models whose forwards over drafts differ from those of plain decoding."""

OPTIONS = ("enable_lora", "lora_paths", "language_only", "encoder_only", "rl_on_policy_target")
"""Options with which drafts of multimodal models cannot be verified, or never have been."""


LEAVE = "leave --speculative-algorithm out"


def check_media(method: Method[Any], server_args: Any, model: Any) -> None:
    """Refuse a multimodal model whose media are read in another way than in its prompt alone.

    Args:
        method: The requested method.
        server_args: SGLang's arguments.
        model: SGLang's configuration of the target.

    Raises:
        ValueError: The message names the model, what it does, and the fix.
    """
    if not model.is_multimodal or not is_refused("sglang", method.kind.name, "special-media"):
        return
    from sglang.srt.configs.model_config import is_multimodal_model

    version, architectures = sglang.__version__, model.hf_config.architectures
    # SGLang's code for models of transformers gives them media in all forwards but plain decoding.
    is_foreign = server_args.model_impl == "transformers" or not is_multimodal_model(architectures)
    values = {option: getattr(server_args, option, None) for option in OPTIONS}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value]
    for found, trait, fix in (
        (not is_tested(version), f"is multimodal, in SGLang {version}", f"install {TESTED}"),
        (given, f"is multimodal, and {' and '.join(given)}", f"leave {' and '.join(given)} out"),
        (is_foreign, f"runs in transformers' code, where it {_READS_AGAIN}", ""),
        (architectures[0] in ARCHITECTURES, ARCHITECTURES.get(architectures[0]), ""),
        (
            uses_latent_attention(model) or recurrent_config(model) is not None,
            "is multimodal where chains are drafted in place of trees",
            "",
        ),
    ):
        if found:
            raise ValueError(
                f"{method.title} does not work with --model-path={model.model_path}, which "
                f"{trait}: {text_alone(server_args, model)}{fix or LEAVE}"
            )


def text_alone(server_args: Any, model: Any) -> str:
    """How to serve the text of a multimodal model alone, for some of which SGLang has an option."""
    known = getattr(server_args, "LANGUAGE_MODEL_ONLY_ARCHITECTURES", ())
    if not model.is_multimodal or not {*known}.intersection(model.hf_config.architectures):
        return ""
    return "add --language-model-only to serve its text alone, or "
