"""Registration with vLLM: makes a method's name valid in `speculative_config`.

vLLM calls this in every process. One function is wrapped at registration and passes everything
through but our own methods; anything else changes only once a method of ours is asked for.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from drafttree.method import Method

# Below vLLM's own logger, or nothing would print it.
logger = logging.getLogger(f"vllm.{__name__}")

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

_METHODS: dict[str, Method] = {}

MARK = "_drafttree"
"""Tells our wrappers from those of other plugins."""

CREATE_SIGNATURE = ["self", "target_model_config", "target_parallel_config"]
VALIDATE_SIGNATURE = ["self", "speculative_config"]


def register_method(method: Method) -> None:
    """Make `speculative_config={"method": method.name, ...}` valid. May be called repeatedly."""
    _METHODS[method.name] = method
    _wrap_create_speculative_config()


def requested(speculative_config: SpeculativeConfig | None) -> tuple[str, dict[str, Any]] | None:
    """The method's name and options if `speculative_config` asks for a method of ours."""
    return getattr(speculative_config, "drafttree", None)


def _wrap_create_speculative_config() -> None:
    """vLLM validates the method's name against a fixed list, so ours is translated before that."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_speculative_config
    if hasattr(original, MARK):
        return

    @functools.wraps(original)
    def create_speculative_config(
        self: EngineArgs, *args: Any, **kwargs: Any
    ) -> SpeculativeConfig | None:
        given = dict(self.speculative_config or {})
        named = [name for name in (getattr(self, "spec_method", None), given.get("method")) if name]
        method = next(filter(None, (_METHODS.get(str(n).replace("-", "_")) for n in named)), None)
        if method is None:
            return original(self, *args, **kwargs)

        _require_known("EngineArgs.create_speculative_config", original, CREATE_SIGNATURE)
        target_model_config, target_parallel_config = _bind(*args, **kwargs)
        if len(named) > 1:
            raise ValueError(
                f"--spec-method={named[0]!r} and --speculative-config['method']={named[1]!r} are "
                "mutually exclusive: leave one of them out"
            )
        from drafttree.vllm.checks import TRITON, WORKERS, check_engine

        worker = check_engine(method, self, target_model_config, target_parallel_config)
        given.pop("method", None)
        _take_model(method, given, self.spec_model)
        options, nodes = _parse(method, given, self.spec_tokens)
        if method.draft_model:
            from drafttree.draft_model import check_draft_model

            check_draft_model(target_model_config.model, str(options["model"]), logger)
        if method.check_model is not None:
            method.check_model(target_model_config.model, str(options["model"]))
        _allow_sampling_parameters()
        kept = self.speculative_config, self.spec_method, self.spec_tokens, self.spec_model
        self.speculative_config = {
            "method": "custom_class",
            "model": "drafttree.vllm.runner.HostProposer",
            "num_speculative_tokens": nodes,
            # As the engine then never fills a request that joins up to a whole tree with tokens
            # that are none: it would verify them, and wait for a step with room for as many.
            "num_speculative_tokens_per_batch_size": [[1, 1, nodes]],
        }
        self.spec_method = self.spec_tokens = self.spec_model = None
        try:
            config = original(self, target_model_config, target_parallel_config)
        finally:
            (
                self.speculative_config,
                self.spec_method,
                self.spec_tokens,
                self.spec_model,
            ) = kept
        if method.hidden_states:
            from drafttree.vllm.prefix_hits import drop_last_block

            drop_last_block(config)
        # A plain attribute travels with the configuration to the engine's other processes.
        object.__setattr__(config, "drafttree", (method.name, options))
        target_parallel_config.worker_cls = worker
        if worker == WORKERS["cuda"]:
            from drafttree.vllm.graphs import capture_whole_trees

            capture_whole_trees(self, config, nodes)
            if self.attention_config.backend is None:
                # Read after this; whoever makes a second configuration of these arguments finds it.
                self.attention_backend = TRITON
        return config

    setattr(create_speculative_config, MARK, True)
    EngineArgs.create_speculative_config = create_speculative_config


def _take_model(method: Method, given: dict[str, Any], spec_model: str | None) -> None:
    """Put the draft model, wherever it was named, among the method's options."""
    if spec_model is not None:
        if "model" in given:
            raise ValueError(
                f"--spec-model={spec_model!r} and --speculative-config['model'] are mutually "
                "exclusive: leave one of them out"
            )
        given["model"] = spec_model
    if method.takes_model and "model" not in given:
        raise ValueError(
            f"{method.title} needs a draft model: name its folder as 'model' in speculative_config"
        )
    if not method.takes_model and "model" in given:
        raise ValueError(f"model={given['model']!r}: {method.title} takes no model, leave it out")


def _bind(
    target_model_config: ModelConfig, target_parallel_config: ParallelConfig
) -> tuple[ModelConfig, ParallelConfig]:
    return target_model_config, target_parallel_config


def _parse(
    method: Method, given: dict[str, Any], spec_tokens: int | None
) -> tuple[dict[str, Any], int]:
    """Validate a method's options together with the host's own count of draft tokens."""
    if spec_tokens is not None and "num_speculative_tokens" in given:
        raise ValueError(
            f"--spec-tokens={spec_tokens} and --speculative-config['num_speculative_tokens'] are "
            "mutually exclusive: leave one of them out"
        )
    host_nodes = given.pop("num_speculative_tokens", spec_tokens)
    options = {key.replace("-", "_"): value for key, value in given.items()}
    if host_nodes is not None:
        options = method.options.sized(options, host_nodes)
    nodes = method.parse(options).num_nodes
    if host_nodes not in (None, nodes):
        raise ValueError(
            f"num_speculative_tokens={host_nodes!r} but the tree of {method.title} has {nodes} "
            "nodes: leave num_speculative_tokens out"
        )
    return options, nodes


def _allow_sampling_parameters() -> None:
    """vLLM refuses min_p and logit_bias under speculation, as its chain verification cannot serve
    them. Ours draws with the engine's own sampler, so for our methods the refusal is lifted."""
    from vllm.sampling_params import SamplingParams

    original = SamplingParams._validate_spec_decode
    if hasattr(original, MARK):
        return
    _require_known("SamplingParams._validate_spec_decode", original, VALIDATE_SIGNATURE)

    @functools.wraps(original)
    def _validate_spec_decode(
        self: SamplingParams, speculative_config: SpeculativeConfig | None
    ) -> None:
        if requested(speculative_config) is None:
            original(self, speculative_config)

    setattr(_validate_spec_decode, MARK, True)
    SamplingParams._validate_spec_decode = _validate_spec_decode


def _require_known(name: str, function: Callable[..., Any], parameters: list[str]) -> None:
    found = list(inspect.signature(function).parameters)
    if found != parameters:
        import vllm

        raise RuntimeError(
            f"drafttree does not know this vLLM ({vllm.__version__}): {name} takes {found}, "
            f"expected {parameters}. Install vLLM 0.32, or leave the speculative method out."
        )
