"""Refuses vLLM engines that cannot serve draft trees, before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from drafttree.compatibility import is_in_chains, is_refused
from drafttree.vllm.chain_choice import choose_chains
from drafttree.vllm.media_checks import check_media
from drafttree.vllm.runner_choice import choose_v2
from drafttree.vllm.serving import WORKERS, Serving
from drafttree.vllm.versions import TESTED, is_supported, is_tested, window

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    from drafttree.method import Method, MethodOptions

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")

FP8_KV = ("fp8", "fp8_e4m3")
"""The engine's names of KV caches in 8-bit floats that are served, on CUDA."""

BROUGHT = "auto (quantised by the checkpoint)"
"""Stands for the data type of a KV cache that a checkpoint asks for."""

TRITON = "TRITON_ATTN"
"""The attention backend on CUDA that draft trees replace."""


def check_engine(
    method: Method[Any],
    engine: EngineArgs,
    model: ModelConfig,
    parallel: ParallelConfig,
    options: MethodOptions,
) -> Serving:
    """Refuse an engine that cannot serve a method.

    Args:
        method: The requested method.
        engine: The engine's arguments.
        model: The target.
        parallel: The engine's parallelism.
        options: The method's options.

    Returns:
        How the method is served.

    Raises:
        ValueError: The message names the option, its value and the fix.
    """
    _check_version()
    device = _check_platform(method, engine)
    kind = method.kind.name
    role = getattr(engine.kv_transfer_config, "kv_role", None)
    if role not in (None, "kv_both") and is_refused("vllm", kind, "disaggregated-prefill"):
        raise ValueError(
            f"{method.title} does not work with kv_role={role!r}: use one engine with kv_both"
        )
    outputs = getattr(engine, "aux_output_config", engine)
    without_trees = []
    for feature, settings, option, served, fix in (
        ("pipeline-parallelism", parallel, "pipeline_parallel_size", 1, "set it to 1"),
        ("context-parallelism", parallel, "decode_context_parallel_size", 1, "set it to 1"),
        ("context-parallelism", parallel, "prefill_context_parallel_size", 1, "set it to 1"),
        ("kv-transfer", engine, "kv_transfer_config", None, "leave the KV connector out"),
        ("kv-offloading", engine, "kv_offloading_size", None, "leave KV offloading out"),
        ("two-batches", parallel, "enable_dbo", False, "leave dual batch overlap out"),
        ("two-batches", parallel, "ubatch_size", 0, "leave micro-batches out"),
        ("prompt-embeddings", model, "enable_prompt_embeds", False, "leave it out"),
        ("watermarks", engine, "watermark_config", None, "leave it out"),
        ("hidden-states", outputs, "enable_return_routed_experts", False, "leave it out"),
        ("replay", model, "return_sampling_mask", False, "leave it out"),
        ("replay", model, "enable_trace_replay", False, "leave it out"),
    ):
        value = getattr(settings, option, served)  # an older version may lack it
        if value != served and is_refused("vllm", kind, feature):
            raise ValueError(f"{method.title} does not work with {option}={value!r}: {fix}")
        if value != served and is_in_chains("vllm", kind, feature):
            without_trees.append(f"{option} is set")
    replicas = parallel.data_parallel_size
    if replicas > 1 and model.is_moe and is_refused("vllm", kind, "data-parallel-experts"):
        # The ranks share experts, so they must run the same steps.
        raise ValueError(
            f"{method.title} does not work with data_parallel_size={replicas} and a mixture of "
            "experts: set it to 1"
        )
    if replicas > 1 and parallel.distributed_executor_backend == "external_launcher":
        # The ranks of all replicas wait for each other in each forward, even of a dense model.
        raise ValueError(
            f"{method.title} does not work with data_parallel_size={replicas} and "
            "distributed_executor_backend='external_launcher': set data_parallel_size to 1"
        )
    kv_cache_dtype = _kv_cache_dtype(engine, model)
    if kv_cache_dtype != "auto" and not (
        # The layers refuse other formats that a checkpoint may bring.
        device == "cuda"
        and (kv_cache_dtype in FP8_KV or kv_cache_dtype == BROUGHT)
        and not is_refused("vllm", kind, "quantised-kv")
    ):
        raise ValueError(
            f"{method.title} does not work with kv_cache_dtype={kv_cache_dtype!r} on {device!r}: "
            "set it to the model's own data type"
        )
    if parallel.worker_cls != "auto":
        raise ValueError(
            f"draft trees do not work with worker_cls={parallel.worker_cls!r}, because they need "
            "a worker of their own: leave it out"
        )
    budget = engine.max_num_batched_tokens
    if budget is not None and budget < 2:
        raise ValueError(
            f"max_num_batched_tokens={budget} leaves no token of a step for drafts: set it to more "
            "than the number of draft tokens of a tree"
        )
    # A quarter of a step is left for prompts; see `share_of_step`. The engine's own choice of the
    # budget is not known yet.
    fits = budget is None or 4 * model.max_model_len <= budget
    if engine.enable_chunked_prefill is False and not fits:
        logger.warning(
            "With enable_chunked_prefill=False, prompts that are longer than a quarter of "
            "max_num_batched_tokens may wait until running requests have ended, because of their "
            "drafts: leave it out, or set max_num_batched_tokens to at least %d, four times "
            "max_model_len",
            4 * model.max_model_len,
        )
    without_trees += _check_model(method, model)
    if device == "cuda":
        without_trees += _check_backend(method, engine)
    check_media(method, engine, model, without_trees)
    chains = choose_chains(method, without_trees, engine, model)
    uses_v2 = choose_v2(method, engine, model, parallel, options, without_trees)
    if device == "cuda":
        _check_variables(method, in_chains=chains is not None)
    if engine.async_scheduling and not uses_v2:
        raise ValueError(
            f"{method.title} is served by vLLM's V1 model runner here, which does not work with "
            "async_scheduling=True: leave it out"
        )
    return Serving(device, uses_v2, chains)


def _kv_cache_dtype(engine: EngineArgs, model: ModelConfig) -> str:
    """The data type of the KV cache; "auto" for the model's own, however it is asked for."""
    asked = str(engine.kv_cache_dtype)
    if asked == "auto" and brings_quantised_kv(model.hf_config):
        return BROUGHT
    return "auto" if asked == str(model.dtype).removeprefix("torch.") else asked


def brings_quantised_kv(config: Any) -> bool:
    """Whether a checkpoint asks for a quantised KV cache, in its configuration from Hugging Face.

    `kv_cache_scheme` is what compressed-tensors writes, and `kv_cache_quant_algo` what ModelOpt
    does.
    """
    quantised = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantised, dict):
        quantised = quantised.to_dict()
    within = quantised.get("quantization") or {}
    keys = ("kv_cache_scheme", "kv_cache_quant_algo")
    return any(each.get(key) for each in (quantised, within) for key in keys)


def _check_version() -> None:
    import vllm

    if not is_supported(vllm.__version__):
        raise ValueError(f"vLLM {vllm.__version__} is not supported: install {window()}")
    if not is_tested(vllm.__version__):
        logger.warning(
            "Draft trees were tested with vLLM %s; %s is untested", TESTED, vllm.__version__
        )


def _check_platform(method: Method[Any], engine: EngineArgs) -> str:
    from vllm.platforms import CpuArchEnum, current_platform

    # Not its `device_type`, which is "cuda" with ROCm too.
    device = str(current_platform.device_name)
    if device not in WORKERS:
        raise ValueError(
            f"draft trees work on x86 CPUs and CUDA GPUs, not on device={device!r}: leave the "
            "speculative method out"
        )
    if device == "cpu" and current_platform.get_cpu_architecture() != CpuArchEnum.X86:
        raise ValueError(
            "draft trees rely on the KV layout of x86 CPUs: use an x86 CPU, or leave the "
            "speculative method out"
        )
    if device not in method.kind.vllm.devices:
        raise ValueError(
            f"{method.title} does not work on device={device!r} in vLLM, only on "
            f"{', '.join(method.kind.vllm.devices)}: leave the speculative method out"
        )
    if device == "cuda":
        logger.warning(
            "Draft trees were tested on one kind of GPU only, with small models: compare the "
            "output first"
        )
    return device


def _check_backend(method: Method[Any], engine: EngineArgs) -> list[str]:
    """Refuse an attention backend, or say why it verifies chains only."""
    backends = {engine.attention_backend, engine.attention_config.backend} - {None}
    names = [getattr(each, "name", each) for each in backends]
    wrong = [name for name in names if name != TRITON]
    if wrong and is_refused("vllm", method.kind.name, "other-backends"):
        raise ValueError(
            f"draft trees replace the attention backend {TRITON}, not "
            f"attention_backend={wrong[0]!s}: leave it out"
        )
    return [f"attention_backend={name} applies no tree masks" for name in wrong]


def _check_variables(method: Method[Any], *, in_chains: bool) -> None:
    """Refuse what vLLM reads from the environment."""
    from vllm import envs

    # An older version may lack it.
    if not in_chains and getattr(envs, "VLLM_BATCH_INVARIANT", False):
        raise ValueError(
            f"{method.title} does not work with VLLM_BATCH_INVARIANT=1: attention to draft trees "
            "rounds differently beside other requests. Unset it, or leave the speculative method "
            "out"
        )


def _check_model(method: Method[Any], model: ModelConfig) -> list[str]:
    """Refuse a model, or say why only chains can be verified with it."""
    name, kind = model.model, method.kind.name
    without_trees = []
    for feature, found, trait in (
        ("encoders", model.runner_type != "generate", "does not generate text"),
        ("encoders", model.is_encoder_decoder, "is an encoder-decoder"),
        ("recurrent-layers", model.is_hybrid, "is a hybrid with recurrent layers"),
        ("attention-free", model.is_attention_free, "has no attention"),
        ("mixtures-of-experts", model.is_moe, "is a mixture of experts"),
        ("multimodal", model.is_multimodal_model, "is multimodal"),
        ("latent-attention", model.use_mla, "uses latent attention (MLA)"),
        ("multimodal", model.uses_mrope, "uses M-RoPE positions"),
    ):
        if found and is_refused("vllm", kind, feature):
            dense = feature == "mixtures-of-experts"
            other = "dense model" if dense else "decoder with full attention"
            raise ValueError(
                f"{method.title} does not work with model={name!r}, which {trait}: use a {other}, "
                "or leave the speculative method out"
            )
        if found and is_in_chains("vllm", kind, feature):
            without_trees.append(f"the model {trait}")
    if model.get_head_size() % 16 and not without_trees:
        raise ValueError(
            f"draft trees do not work with model={name!r}: its head size "
            f"{model.get_head_size()} is not a multiple of 16: use another model, or leave the "
            "speculative method out"
        )
    chunk = getattr(model, "attention_chunk_size", None)
    if chunk is not None and chunk < model.max_model_len:
        raise ValueError(
            f"draft trees do not work with model={name!r}, whose attention is in chunks of {chunk} "
            f"tokens: set max_model_len to {chunk} at most, or leave the speculative method out"
        )
    if is_refused("vllm", kind, "sliding-windows"):
        check_full_attention(method.title, model)
    return without_trees


def check_full_attention(user: str, model: ModelConfig) -> None:
    """Refuse a model with a sliding window where a second model's layers share its cache groups.

    Args:
        user: What the model is used by.
        model: The target or the draft model.

    Raises:
        ValueError: The window is narrower than the context.
    """
    window = model.get_sliding_window()
    if window is not None and window < model.max_model_len:
        raise ValueError(
            f"{user} does not work with model={model.model!r}, whose sliding window is {window}: "
            f"set max_model_len to {window} at most, or use a model with full attention"
        )
