"""Which of vLLM's two model runners serves draft trees: the one that vLLM itself would run.

drafttree requests a method from vLLM that only one of them knows. So the choice is made before vLLM
makes its own, when the engine's arguments become a configuration, but by vLLM's own rules. The
worker checks that vLLM has chosen the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from drafttree.vllm.versions import serves_v2, window_v2

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    from drafttree.method import Method, MethodOptions

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")

_UNREADABLE = "this version's choice of a model runner cannot be read before vLLM is configured"

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable: 1 for V2, 0 for V1. Where it is not set, vLLM chooses."""


def choose_v2(
    method: Method[Any],
    engine: EngineArgs,
    model: ModelConfig,
    parallel: ParallelConfig,
    options: MethodOptions,
    without_trees: Sequence[str] = (),
) -> bool:
    """Whether V2 is to serve a method.

    It is if the user asks for it, or if vLLM would run it and it serves the method with these
    settings. Where it does not, V1 does, and the log says why.

    Args:
        method: The requested method.
        engine: The engine's arguments.
        model: The target.
        parallel: The engine's parallelism.
        options: The method's options.
        without_trees: Why chains are drafted in place of trees; empty if they are not.

    Raises:
        ValueError: V2 is asked for and cannot serve this. The message names the variable or the
            option, and the fix.
    """
    from vllm import envs

    asked = getattr(envs, VARIABLE, None)
    reason = _why_no_v2(method, options)
    if without_trees:
        because = " and ".join(without_trees)
        reason = f"{method.title} drafts chains where {because}, which only V1 serves"
    setting = _why_no_v2_with(engine, parallel)
    if asked:
        if reason:
            raise ValueError(f"{VARIABLE}=1: {reason}: unset it")
        if setting:
            raise ValueError(f"{setting}: leave it out, or unset {VARIABLE}")
        return True
    if asked is not None:
        return False
    taken = takes_v2(engine, model, parallel)
    reason = reason or setting or (_UNREADABLE if taken is None else None)
    if reason and taken is not False:
        logger.info_once("vLLM's V1 model runner serves the draft trees here, because %s", reason)
    return bool(taken) and not reason


def check_choice(
    engine: EngineArgs,
    model: ModelConfig,
    parallel: ParallelConfig,
    config: SpeculativeConfig,
    *,
    uses_v2: bool,
) -> None:
    """Refuse an engine that vLLM would run on the other model runner than the one chosen.

    Args:
        engine: The engine's arguments.
        model: The target.
        parallel: The engine's parallelism.
        config: The speculative configuration that was made for the chosen one.
        uses_v2: Whether V2 was chosen.

    Raises:
        ValueError: vLLM takes the other one because of a setting that only that one serves.
    """
    taken = takes_v2(engine, model, parallel, config)
    if taken not in (None, uses_v2):
        ours, theirs = ("V2", "V1") if uses_v2 else ("V1", "V2")
        raise ValueError(
            f"draft trees are to be served by vLLM's {ours} model runner, but with these settings "
            f"vLLM takes {theirs}: leave out what only {theirs} has, or the speculative method"
        )


def takes_v2(
    engine: EngineArgs,
    model: ModelConfig,
    parallel: ParallelConfig,
    speculative: SpeculativeConfig | None = None,
) -> bool | None:
    """Whether vLLM, by its own rules, would run its V2 model runner.

    The rules are a property of the complete configuration, which does not exist yet. It is read
    from one that has only the parts that the rules need.

    Args:
        engine: The engine's arguments.
        model: The target.
        parallel: The engine's parallelism.
        speculative: The speculative configuration; None for plain decoding.

    Returns:
        None if the rules of this version cannot be read so.
    """
    from vllm.config import VllmConfig

    rules = getattr(VllmConfig, "use_v2_model_runner", None)
    if not isinstance(rules, property):
        return None
    config = object.__new__(VllmConfig)
    for name, value in (
        ("model_config", model),
        ("parallel_config", parallel),
        ("speculative_config", speculative),
        ("attention_config", engine.attention_config),
        ("watermark_config", getattr(engine, "watermark_config", None)),
    ):
        object.__setattr__(config, name, value)
    try:
        return bool(rules.__get__(config))
    except AttributeError:
        return None


def _why_no_v2(method: Method[Any], options: MethodOptions) -> str | None:
    """Why a method cannot be served by V2 in this environment; None if it can."""
    import vllm
    from vllm.triton_utils import HAS_TRITON

    if method.kind.vllm.runs_v2 is None:
        return f"{method.title} is served by the V1 model runner only"
    if options.reads_logits:
        return f"{method.title} is served with {options.reads_logits} by the V1 model runner only"
    if not serves_v2(vllm.__version__):
        return (
            f"draft trees work with the V2 model runner of vLLM {window_v2()}, not with that of "
            f"{vllm.__version__}"
        )
    if not HAS_TRITON:
        return "the V2 model runner needs Triton, which this build of vLLM does not have"
    return None


def _why_no_v2_with(engine: EngineArgs, parallel: ParallelConfig) -> str | None:
    """Which setting V2 does not serve, although V1 does; None if there is none."""
    for option, value, served in (
        ("tensor_parallel_size", parallel.tensor_parallel_size, 1),
        ("data_parallel_size", parallel.data_parallel_size, 1),
    ):
        if value != served:
            return f"draft trees do not work with {option}={value!r} on the V2 model runner"
    return None
