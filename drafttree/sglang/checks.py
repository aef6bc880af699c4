"""Refuses SGLang servers that cannot verify draft trees, before anything is started."""

from __future__ import annotations

import logging
from typing import Any

from drafttree.compatibility import is_refused
from drafttree.method import Method
from drafttree.model_files import check_draft_model
from drafttree.sglang.patches import take_corpora
from drafttree.sglang.target_config import (
    recurrent_config,
    target_config,
    uses_latent_attention,
)
from drafttree.sglang.versions import (
    CPU_BACKEND,
    CUDA_BACKENDS,
    TESTED,
    is_supported,
    is_tested,
)

# A child of SGLang's logger: other loggers are not printed.
logger = logging.getLogger(f"sglang.{__name__}")


def check_server(method: Method[Any], server_args: Any) -> None:
    """Refuse a server that cannot verify a method's trees.

    Raises:
        ValueError: The message names the option, its value and the fix.
    """
    _check_version(method)
    _check_device(method, server_args)
    kind = method.kind.name
    for feature, option, served, fix in (
        ("tensor-parallelism", "tp_size", 1, "set it to 1"),
        ("pipeline-parallelism", "pp_size", 1, "set it to 1"),
        ("data-parallelism", "dp_size", 1, "set it to 1"),
        ("data-parallel-experts", "enable_dp_attention", False, "leave it out"),
        ("disaggregated-prefill", "disaggregation_mode", "null", "leave it out"),
        ("disaggregated-prefill", "enable_pdmux", False, "leave it out"),
        ("kv-offloading", "enable_hierarchical_cache", False, "leave it out"),
        ("two-batches", "enable_two_batch_overlap", False, "leave it out"),
        ("compilation", "enable_torch_compile", False, "leave it out"),
        ("hidden-states", "enable_return_hidden_states", False, "leave it out"),
        # SGLang records experts by slot, and the rows of a tree move to other slots.
        ("hidden-states", "enable_return_routed_experts", False, "leave it out"),
        ("watermarks", "enable_watermark", False, "leave it out"),
        ("lora", "enable_lora", False, "leave it out"),
        # SGLang turns LoRA on for these, but only after this check.
        ("lora", "lora_paths", [], "leave it out"),
        # SGLang does not load its plugins in these processes, so there is no such algorithm there.
        ("tokenizer-workers", "tokenizer_worker_num", 1, "set it to 1"),
        ("quantised-kv", "kv_cache_dtype", "auto", "leave it at auto"),
        ("quantised-weights", "quantization", None, "use a model that is not quantised"),
    ):
        value = getattr(server_args, option, served)
        if value is not None and value != served and is_refused("sglang", kind, feature):
            flag = option.replace("_", "-")
            raise ValueError(f"{method.title} does not work with --{flag}={value}: {fix}")
    cuda = server_args.device == "cuda"
    backends = CUDA_BACKENDS if cuda else (CPU_BACKEND,)
    for option in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
        value = getattr(server_args, option)
        # SGLang's own choice cannot be distinguished from the user's.
        default = option == "attention_backend" and (cuda or value == "intel_amx")
        wrong = value is not None and value not in backends and not default
        if wrong and is_refused("sglang", kind, "other-backends"):
            flag = option.replace("_", "-")
            raise ValueError(
                f"draft trees do not work with --{flag}={value}: leave it out or name "
                + " or ".join(backends)
            )
    _check_model(method, server_args)
    _check_draft_model(method, server_args)
    if _is_tested_version():
        take_corpora()


def _is_tested_version() -> bool:
    import sglang

    return is_tested(sglang.__version__)


def _check_version(method: Method[Any]) -> None:
    import sglang

    if not is_supported(sglang.__version__, method.kind.sglang.older_versions):
        raise ValueError(
            f"{method.title} does not work with SGLang {sglang.__version__}: install {TESTED}, or "
            "leave --speculative-algorithm out"
        )


def _check_device(method: Method[Any], server_args: Any) -> None:
    support = method.kind.sglang
    if server_args.device not in support.devices:
        raise ValueError(
            f"{method.title} does not work with --device={server_args.device} in SGLang: use "
            f"{' or '.join(support.devices)}, or leave --speculative-algorithm out"
        )


def _check_model(method: Method[Any], server_args: Any) -> None:
    model = target_config(server_args)
    recurrent = recurrent_config(model) is not None
    window = getattr(model.hf_text_config, "sliding_window", None)
    # A window that no text outgrows leaves nothing out.
    uses_window = (
        window
        and getattr(model.hf_text_config, "use_sliding_window", True)
        and window < model.context_len
    )
    for feature, found, trait in (
        ("encoders", not model.is_generation, "does not generate text"),
        *((each, model.is_multimodal, "is multimodal") for each in ("multimodal", "special-media")),
        ("encoders", model.is_encoder_decoder, "is an encoder-decoder"),
        ("latent-attention", uses_latent_attention(model), "uses latent attention (MLA)"),
        (
            "attention-free",
            model.attention_arch.name == "SSM",
            "has recurrent layers instead of attention",
        ),
        ("recurrent-layers", recurrent, "is a hybrid with recurrent layers"),
        (
            "sliding-windows",
            model.is_hybrid_swa or uses_window,
            f"has a sliding window of {window}",
        ),
        (
            "soft-caps",
            bool(getattr(model.hf_text_config, "attn_logit_softcapping", None)),
            "caps the logits of its attention",
        ),
        ("quantised-weights", model.quantization is not None, "is quantised"),
    ):
        if found and is_refused("sglang", method.kind.name, feature):
            raise ValueError(
                f"{method.title} does not work with --model-path={model.model_path}, which "
                f"{trait}: use a decoder with full attention, or leave --speculative-algorithm out"
            )


def _check_draft_model(method: Method[Any], server_args: Any) -> None:
    path = server_args.speculative_draft_model_path
    if not method.kind.needs_model:
        if path is not None:
            raise ValueError(
                f"--speculative-draft-model-path={path}: {method.title} needs no model of its own, "
                "leave it out"
            )
        return
    if path is None:
        raise ValueError(
            f"{method.title} needs {method.kind.needed_model}: name its folder with "
            "--speculative-draft-model-path"
        )
    if method.kind.needs_vocabulary_of_target:
        check_draft_model(server_args.model_path, path, logger)
    if method.check_model is not None:
        method.check_model(server_args.model_path, path)
