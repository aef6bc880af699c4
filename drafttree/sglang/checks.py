"""Refuses SGLang servers that cannot verify draft trees, before anything is started."""

from __future__ import annotations

import logging
import os
from typing import Any

from drafttree.compatibility import is_refused
from drafttree.method import Method
from drafttree.model_files import (
    ModelSource,
    attention_heads,
    check_draft_model,
    folder_with_weights,
)
from drafttree.sglang.kv_types import FP8_KV, PLAIN_KV, kv_cache_dtype
from drafttree.sglang.media_checks import LEAVE, check_media, text_alone
from drafttree.sglang.patches import accept_adapters, take_corpora
from drafttree.sglang.target_config import (
    recurrent_config,
    target_config,
    uses_latent_attention,
)
from drafttree.sglang.versions import (
    CPU_BACKEND,
    CUDA_BACKENDS,
    TESTED,
    is_newer,
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
        ("pipeline-parallelism", "pp_size", 1, "set it to 1"),
        ("attention-parallelism", "enable_dp_attention", False, "leave it out"),
        ("attention-parallelism", "attn_dp_size", 1, "set it to 1"),
        ("context-parallelism", "dcp_size", 1, "set it to 1"),
        ("context-parallelism", "attn_cp_size", 1, "set it to 1"),
        ("context-parallelism", "enable_prefill_cp", False, "leave it out"),
        ("disaggregated-prefill", "disaggregation_mode", "null", "leave it out"),
        ("disaggregated-prefill", "enable_pdmux", False, "leave it out"),
        ("kv-offloading", "enable_hierarchical_cache", False, "leave it out"),
        ("kv-offloading", "enable_flexkv", False, "leave it out"),
        ("kv-offloading", "enable_unified_cache_external_linker", False, "leave it out"),
        ("two-batches", "enable_two_batch_overlap", False, "leave it out"),
        ("compilation", "enable_torch_compile", False, "leave it out"),
        (
            "hidden-states",
            "enable_return_hidden_states",
            False,
            "leave it out, and --return-hidden-states-mode, which turns it on",
        ),
        # SGLang records experts by slot, and the rows of a tree move to other slots.
        ("hidden-states", "enable_return_routed_experts", False, "leave it out"),
        ("watermarks", "enable_watermark", False, "leave it out"),
        # SGLang does not load its plugins in these processes, so there is no such algorithm there.
        ("tokenizer-workers", "tokenizer_worker_num", 1, "set it to 1"),
    ):
        value: Any = getattr(server_args, option, served)
        if value is not None and value != served and is_refused("sglang", kind, feature):
            flag = option.replace("_", "-")
            raise ValueError(f"{method.title} does not work with --{flag}={value}: {fix}")
    cuda = server_args.device == "cuda"
    backends: tuple[str, ...] = CUDA_BACKENDS if cuda else (CPU_BACKEND,)
    if (server_args.page_size or 1) > 1:
        # It verifies trees with pages of one token only.
        backends = tuple(each for each in backends if each != "fa3")
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
    _check_variables(method, server_args)
    _check_kv_cache(method, server_args)
    _check_model(method, server_args)
    _check_embeddings(method, server_args)
    _check_windows(method, server_args)
    _check_adapters(method, server_args)
    _check_sessions(method, server_args)
    _check_draft_model(method, server_args)
    if _is_tested_version():
        take_corpora()
        accept_adapters()


def _is_tested_version() -> bool:
    import sglang

    return is_tested(sglang.__version__)


def _check_adapters(method: Method[Any], server_args: Any) -> None:
    """Refuse LoRA adapters where SGLang's own check is unknown, or refuses a draft model."""
    # SGLang turns LoRA on for paths alone, but only after this check.
    for option in ("enable_lora", "lora_paths"):
        value = getattr(server_args, option, None)
        if value and not _is_tested_version():
            raise ValueError(
                f"{method.title} does not work with --{option.replace('_', '-')}={value} in this "
                f"version of SGLang: install {TESTED}, or leave it out"
            )
        if value and method.kind.needs_vocabulary_of_target:
            _check_experts_with_adapters(method, server_args)


def _check_sessions(method: Method[Any], server_args: Any) -> None:
    """Refuse streaming sessions where what is kept between their turns may be wrong."""
    if not getattr(server_args, "enable_streaming_session", False):
        return
    which = f"{method.title} does not work with --enable-streaming-session"
    if not _is_tested_version():
        raise ValueError(
            f"{which}=True in this version of SGLang: install {TESTED}, or leave it out"
        )
    # SGLang keeps the state after the last draft token that was accepted, which may be beyond the
    # end of the turn.
    if recurrent_config(target_config(server_args)) is not None:
        raise ValueError(
            f"{which}=True and --model-path={server_args.model_path}, a hybrid with recurrent "
            "layers: leave --enable-streaming-session out"
        )


def _check_experts_with_adapters(method: Method[Any], server_args: Any) -> None:
    # In forwards of the draft model too it looks for adapters in what is known of the target.
    for option in ("moe_runner_backend", "speculative_moe_runner_backend"):
        if getattr(server_args, option) == "experimental_sgl_trtllm":
            raise ValueError(
                f"{method.title} does not work with --{option.replace('_', '-')}="
                "experimental_sgl_trtllm and LoRA adapters: leave either out"
            )


def _check_version(method: Method[Any]) -> None:
    import sglang

    version = sglang.__version__
    if not is_supported(version, method.kind.sglang.older_versions):
        newer = ", which is newer than drafttree knows" if is_newer(version) else ""
        raise ValueError(
            f"{method.title} does not work with SGLang {version}{newer}: install {TESTED}, or "
            "leave --speculative-algorithm out"
        )
    if not is_tested(version):
        logger.warning("Draft trees were tested with SGLang %s; %s is untested", TESTED, version)


def _check_device(method: Method[Any], server_args: Any) -> None:
    support = method.kind.sglang
    if server_args.device not in support.devices:
        raise ValueError(
            f"{method.title} does not work with --device={server_args.device} in SGLang: use "
            f"{' or '.join(support.devices)}, or leave --speculative-algorithm out"
        )


def _check_variables(method: Method[Any], server_args: Any) -> None:
    """Refuse what environment variables turn on in SGLang, and drafts do not work with."""
    from sglang.srt.environ import envs

    # Its graphs would read the masks of the step in which they were captured.
    name = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
    variable = getattr(envs, name, None)  # versions before 0.5.23 may not have it
    if server_args.device == "cuda" and variable is not None and variable.get():
        raise ValueError(
            f"{method.title} does not work with the environment variable {name}="
            f"{os.environ[name]}: unset it"
        )


def _check_kv_cache(method: Method[Any], server_args: Any) -> None:
    dtype = kv_cache_dtype(server_args)
    # Other types keep scales beside the rows, which would have to move with them.
    refuses_fp8 = is_refused("sglang", method.kind.name, "quantised-kv")
    served = PLAIN_KV if refuses_fp8 else PLAIN_KV + FP8_KV
    if dtype not in served:
        raise ValueError(
            f"{method.title} does not work with --kv-cache-dtype={dtype}: use "
            + " or ".join(served)
        )


def _check_model(method: Method[Any], server_args: Any) -> None:
    model = target_config(server_args)
    for feature, found, trait in (
        ("encoders", not model.is_generation, "does not generate text"),
        ("multimodal", model.is_multimodal, "is multimodal"),
        ("attended-images", model.is_multimodal, "is multimodal"),
        ("encoders", model.is_encoder_decoder, "is an encoder-decoder"),
        ("latent-attention", uses_latent_attention(model), "uses latent attention (MLA)"),
        (
            "attention-free",
            model.attention_arch.name == "SSM",
            "has recurrent layers instead of attention",
        ),
        (
            "recurrent-layers",
            recurrent_config(model) is not None,
            "is a hybrid with recurrent layers",
        ),
    ):
        if found and is_refused("sglang", method.kind.name, feature):
            fix = text_alone(server_args, model) or "use a decoder with full attention, or "
            raise ValueError(
                f"{method.title} does not work with --model-path={model.model_path}, which "
                f"{trait}: {fix}{LEAVE}"
            )
    check_media(method, server_args, model)


def _check_embeddings(method: Method[Any], server_args: Any) -> None:
    """Refuse n-gram embeddings, for which SGLang reads each token that it samples by itself."""
    model = target_config(server_args)
    # Versions before 0.5.23 may not know of them.
    if any(getattr(model, name, False) for name in ("use_ngram_embedding", "use_engram")):
        raise ValueError(
            f"{method.title} does not work with --model-path={model.model_path}, whose embeddings "
            f"depend on preceding tokens: use a model without n-gram embeddings, or {LEAVE}"
        )


def _check_windows(method: Method[Any], server_args: Any) -> None:
    """Refuse attention in chunks, and pools for the KV of sliding windows alone where they cannot
    be used."""
    config = target_config(server_args)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < config.context_len:
        raise ValueError(
            f"draft trees do not work with --model-path={server_args.model_path}, whose attention "
            f"is in chunks of {chunk} tokens: set --context-length to {chunk} at most, or leave "
            "--speculative-algorithm out"
        )
    # SGLang's attention for CPUs looks for windows in the slots of the other layers, and a model of
    # the drafter's has its KV in those.
    unusable = server_args.device == "cpu" or method.kind.needs_model
    if unusable and config.is_hybrid_swa:
        raise ValueError(
            f"{method.title} does not work with --model-path={server_args.model_path} and a pool "
            "for the KV of sliding windows alone: add --disable-hybrid-swa-memory"
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
        is_trusted = server_args.trust_remote_code
        cache = server_args.download_dir
        draft = ModelSource(path, server_args.speculative_draft_model_revision, is_trusted, cache)
        target = ModelSource(server_args.model_path, server_args.revision, is_trusted, cache)
        check_draft_model(target, draft, logger)
        _check_heads(draft, server_args)
        _check_context(draft, server_args)
    if method.check_model is not None:
        folder = folder_with_weights(
            server_args.model_path, server_args.revision, server_args.download_dir
        )
        method.check_model(str(folder or server_args.model_path), path)


def _check_context(draft: ModelSource, server_args: Any) -> None:
    """Refuse a draft model that reads shorter texts than the target, unless SGLang is told to."""
    from sglang.srt.environ import envs
    from sglang.srt.utils.hf_transformers import get_context_length
    from transformers import AutoConfig

    if envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get():
        return
    config = AutoConfig.from_pretrained(
        draft.name, revision=draft.revision, trust_remote_code=draft.trust_remote_code
    )
    longest = get_context_length(config.get_text_config())
    asked = target_config(server_args).context_len
    if longest < asked:
        raise ValueError(
            f"the draft model {draft.name} reads up to {longest} tokens, and the target {asked}: "
            f"set --context-length={longest}, or use a draft model with a longer context"
        )


def _check_heads(draft: ModelSource, server_args: Any) -> None:
    """Refuse a draft model whose heads tensor-parallel ranks cannot share."""
    ranks = server_args.tp_size
    # On a CPU SGLang adds heads.
    if server_args.device == "cpu" or ranks == 1:
        return
    heads = attention_heads(draft, "draft model")
    if heads % ranks:
        raise ValueError(
            f"--speculative-draft-model-path={draft.name} has {heads} attention heads, which "
            f"--tp-size={ranks} ranks cannot share equally: use another draft model, or another "
            "--tp-size"
        )
