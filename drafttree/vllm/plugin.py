"""Registration with vLLM: makes the names of methods valid in `speculative_config`.

vLLM calls `register` in every process. What is replaced in the engine is listed in `patches`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from drafttree.method import Method, MethodOptions, installed_methods
from drafttree.vllm import patches

# A child of vLLM's logger: other loggers are not printed.
logger = logging.getLogger(f"vllm.{__name__}")

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

_METHODS: dict[str, Method[Any]] = {}


def register() -> None:
    """Make all installed methods valid in `speculative_config`. May be called repeatedly."""
    _METHODS.update(installed_methods())
    patches.wrap_create_speculative_config(_find, _create)


def _named(engine: EngineArgs) -> list[str]:
    """The method's name in each place where the engine arguments give one."""
    given = engine.speculative_config or {}
    names = (getattr(engine, "spec_method", None), given.get("method"))
    return [str(name) for name in names if name]


def _find(engine: EngineArgs) -> Method[Any] | None:
    """The drafttree method that the engine arguments name, if they name one."""
    found = (_METHODS.get(name.replace("-", "_")) for name in _named(engine))
    return next(filter(None, found), None)


def _create(
    method: Method[Any],
    original: Callable[..., SpeculativeConfig],
    engine: EngineArgs,
    target_model_config: ModelConfig,
    target_parallel_config: ParallelConfig,
) -> SpeculativeConfig:
    """Check that the engine can serve a drafttree method, and make its configuration."""
    from vllm import envs

    from drafttree.vllm.chain_choice import announce
    from drafttree.vllm.checks import TRITON, check_engine
    from drafttree.vllm.runner_choice import check_choice

    named = _named(engine)
    if len(named) > 1:
        raise ValueError(
            f"--spec-method={named[0]!r} and --speculative-config['method']={named[1]!r} are "
            "mutually exclusive: leave one of them out"
        )
    given = dict(engine.speculative_config or {})
    given.pop("method", None)
    _take_model(method, given, engine.spec_model)
    options, parsed = _parse(method, given, engine.spec_tokens)
    num_draft_tokens = parsed.num_draft_tokens
    serving = check_engine(method, engine, target_model_config, target_parallel_config, parsed)
    if serving.chains is not None:
        num_draft_tokens = min(num_draft_tokens, serving.chains.longest)
        announce(method, serving.chains.reason, num_draft_tokens)
    ranks = target_parallel_config.tensor_parallel_size
    _check_model(method, target_model_config, engine.download_dir, options, ranks)
    patches.allow_sampling_parameters()
    patches.prime_when_idle()
    if serving.uses_v2:
        from drafttree.vllm.v2.tiers import plan, sizes_of

        sizes = sizes_of(parsed, num_draft_tokens)
        tiers = plan(engine, target_model_config.max_model_len, num_draft_tokens, sizes)
        request = _as_ngram_gpu(tiers)
        patches.use_scheduler(engine, tiers=bool(sizes))
    else:
        request = _as_custom_class(num_draft_tokens)
        patches.use_scheduler(engine)
    with patches.replace_speculative_arguments(engine, request):
        config = original(target_model_config, target_parallel_config)
    check_choice(
        engine,
        target_model_config,
        target_parallel_config,
        config,
        uses_v2=serving.uses_v2,
    )
    if method.kind.needs_hidden_states:
        patches.drop_last_block(config)
    shows_trees = serving.uses_v2 or method.kind.needs_model
    patches.mark_requested(config, method.name, options, shows_trees=shows_trees)
    # Compiled models are found by this hash too, and need not be compiled anew for other options.
    # An older vLLM has no startup plans.
    if getattr(envs, "VLLM_ENABLE_STARTUP_PLAN", False):
        patches.hash_request(config, method.name, options)
    patches.use_worker(target_parallel_config, serving.worker)
    if not serving.uses_v2:
        patches.hide_draft_schedule(config)
    if serving.device == "cuda":
        if not serving.uses_v2:
            from drafttree.vllm.graphs import capture_whole_trees

            capture_whole_trees(engine, config, num_draft_tokens)
        if serving.chains is None and engine.attention_config.backend is None:
            patches.use_attention_backend(engine, TRITON)
    return config


def _as_custom_class(num_draft_tokens: int) -> dict[str, Any]:
    """What the V1 model runner is told: a custom proposer."""
    return {
        "method": "custom_class",
        "model": "drafttree.vllm.proposer.HostProposer",
        "num_speculative_tokens": num_draft_tokens,
        # With such a schedule the engine does not pad the drafts of a new request to a whole tree.
        # It would verify the padding, and wait for a step with room for it.
        "num_speculative_tokens_per_batch_size": [[1, 1, num_draft_tokens]],
    }


def _as_ngram_gpu(tiers: list[list[int]]) -> dict[str, Any]:
    """What the V2 model runner is told: the one method of its own that needs no model.

    Args:
        tiers: Draft tokens by number of requests.
    """
    return {
        "method": "ngram_gpu",
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 1,
        "num_speculative_tokens": max(num_draft_tokens for _, _, num_draft_tokens in tiers),
        "num_speculative_tokens_per_batch_size": tiers,
    }


def _take_model(method: Method[Any], given: dict[str, Any], spec_model: str | None) -> None:
    """Move the model, whichever argument names it, into the method's options."""
    if spec_model is not None:
        if "model" in given:
            raise ValueError(
                f"--spec-model={spec_model!r} and --speculative-config['model'] are mutually "
                "exclusive: leave one of them out"
            )
        given["model"] = spec_model
    if method.kind.needs_model and "model" not in given:
        raise ValueError(
            f"{method.title} needs {method.kind.needed_model}: name its folder as 'model' in "
            "speculative_config"
        )
    if not method.kind.needs_model and "model" in given:
        raise ValueError(f"model={given['model']!r}: {method.title} takes no model, leave it out")


def _check_model(
    method: Method[Any],
    target: ModelConfig,
    download_dir: str | None,
    options: dict[str, Any],
    ranks: int,
) -> None:
    """Refuse a model that does not fit the target, or the number of tensor-parallel ranks."""
    from drafttree.model_files import (
        ModelSource,
        attention_heads,
        check_draft_model,
        folder_with_weights,
    )

    if method.kind.needs_vocabulary_of_target:
        draft = str(options["model"])
        is_trusted = target.trust_remote_code
        source = ModelSource(draft, None, is_trusted, download_dir)
        served = ModelSource(target.model, target.revision, is_trusted, download_dir)
        check_draft_model(served, source, logger)
        heads = attention_heads(source, "draft model")
        if heads % ranks:
            raise ValueError(
                f"the draft model {draft} has {heads} attention heads, which "
                f"tensor_parallel_size={ranks} ranks cannot share equally: use another draft "
                "model, or another tensor_parallel_size"
            )
        _check_context(target, draft)
    if method.check_model is not None:
        folder = folder_with_weights(target.model, target.revision, download_dir)
        method.check_model(str(folder or target.model), str(options["model"]))


def _check_context(target: ModelConfig, draft: str) -> None:
    """Refuse a draft model that reads shorter texts than the target, unless vLLM is told to."""
    from vllm import envs
    from vllm.config import ModelConfig

    if envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN:
        return
    longest = ModelConfig(
        model=draft,
        tokenizer=target.tokenizer,
        trust_remote_code=target.trust_remote_code,
        dtype=target.dtype,
        skip_tokenizer_init=True,
    ).max_model_len
    if longest < target.max_model_len:
        raise ValueError(
            f"the draft model {draft} reads up to {longest} tokens, and "
            f"max_model_len={target.max_model_len}: set max_model_len={longest}, or use a draft "
            "model with a longer context"
        )


def _parse(
    method: Method[Any], given: dict[str, Any], spec_tokens: int | None
) -> tuple[dict[str, Any], MethodOptions]:
    """Validate a method's options together with the engine's own number of draft tokens.

    Returns:
        The options, as given and parsed.
    """
    if spec_tokens is not None and "num_speculative_tokens" in given:
        raise ValueError(
            f"--spec-tokens={spec_tokens} and --speculative-config['num_speculative_tokens'] are "
            "mutually exclusive: leave one of them out"
        )
    asked = given.pop("num_speculative_tokens", spec_tokens)
    options = {key.replace("-", "_"): value for key, value in given.items()}
    if asked is not None:
        options = method.options.apply_num_draft_tokens(options, asked)
    parsed = method.parse(options)
    num_draft_tokens = parsed.num_draft_tokens
    if asked not in (None, num_draft_tokens):
        raise ValueError(
            f"num_speculative_tokens={asked!r} but the tree of {method.title} has "
            f"{num_draft_tokens} draft tokens: leave num_speculative_tokens out"
        )
    return options, parsed
