"""Where vLLM verifies chains of draft tokens in place of trees, and how long they may be.

A tree needs an attention backend that applies its mask, and KV that can be moved after the
verification. Latent attention has neither here, the state of a recurrent layer follows one text
alone, and a KV connector may save what would still be moved. A chain needs none of this: the engine
verifies it as it verifies the drafts of its own methods, with its own attention and state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from drafttree.chains import ANNOUNCEMENT, LONGEST, LONGEST_RECURRENT, Chains
from drafttree.vllm.versions import TESTED, serves_recurrent_layers

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    from drafttree.method import Method

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")


def choose_chains(
    method: Method[Any],
    reasons: Sequence[str],
    engine: EngineArgs,
    model: ModelConfig,
) -> Chains | None:
    """The chains that an engine verifies; None if it verifies trees.

    Args:
        method: The requested method.
        reasons: Why there can be no trees; empty if there can.
        engine: The engine's arguments.
        model: The target.

    Raises:
        ValueError: This vLLM cannot verify drafts with recurrent layers as it is set up.
    """
    if not reasons:
        return None
    reason = " and ".join(reasons)
    if not model.is_hybrid:
        return Chains(reason, LONGEST)
    _check_recurrent_layers(method, engine, model)
    return Chains(reason, LONGEST_RECURRENT)


def _check_recurrent_layers(method: Method[Any], engine: EngineArgs, model: ModelConfig) -> None:
    import vllm
    from vllm.triton_utils import HAS_TRITON

    which = f"{method.title} does not work with model={model.model!r}, a hybrid with recurrent"
    if not serves_recurrent_layers(vllm.__version__):
        raise ValueError(
            f"{which} layers, and vLLM {vllm.__version__}: install {TESTED}, or leave the "
            "speculative method out"
        )
    if engine.enable_prefix_caching is not False and not HAS_TRITON:
        raise ValueError(
            f"{which} layers, and enable_prefix_caching={engine.enable_prefix_caching!r}: set it "
            "to False. For cached prefixes vLLM moves recurrent states with Triton, which this "
            "build does not have"
        )


def announce(method: Method[Any], reason: str, num_draft_tokens: int) -> None:
    """Log, once in a process, that there are chains in place of trees."""
    logger.warning_once(ANNOUNCEMENT, method.title, num_draft_tokens, reason)
