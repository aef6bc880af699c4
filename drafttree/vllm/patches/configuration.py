"""Patches of vLLM's configuration of an engine with a drafttree method."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from drafttree.patches import Patch
from drafttree.vllm.patches.settings import set_attributes
from drafttree.vllm.versions import unknown

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

ON_CONFIGURATION = "On the configuration of an engine with a drafttree method."

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="vllm.config:ParallelConfig.worker_cls",
        when=ON_CONFIGURATION,
        reason="vLLM's setting for a worker class. The tree worker is a subclass of the stock "
        "worker, whose model runner it turns into one that verifies trees.",
    ),
    Patch(
        target="vllm.config:SpeculativeConfig.use_eagle_block_drop",
        when="On the configuration of an engine whose method reads the target's hidden states.",
        reason="The KV of the drafter's layer at each token also depends on the next token. The "
        "last block of a prefix hit may belong to a text with another next token, so it is "
        "computed again.",
    ),
    Patch(
        target="vllm.config:SpeculativeConfig.uses_dynamic_speculative_decoding",
        when="On the configuration of an engine with a drafttree method on the V1 model runner.",
        reason="Where the number of draft tokens may change with the batch size, vLLM gives up "
        "CUDA graphs of whole trees, and with data parallelism it drops the schedule. The schedule "
        "given to it never changes the number.",
    ),
    Patch(
        target="vllm.config:SpeculativeConfig.compute_hash",
        when="On the configuration of an engine with a drafttree method, if "
        "VLLM_ENABLE_STARTUP_PLAN is set.",
        reason="With this variable vLLM sizes its KV cache as in an earlier start whose "
        "configuration had the same hash. The memory that is left also depends on the method and "
        "its options, which are added to the hash.",
    ),
    Patch(
        target="vllm.config:ModelConfig.logits_processors",
        when="On one engine's configuration, while its stock model runner is built.",
        reason="vLLM refuses custom logits processors with speculation. The tree runner builds "
        "them itself and applies them along each path.",
    ),
)


def use_worker(config: ParallelConfig, worker: str) -> None:
    """Let an engine's workers be of another class.

    Args:
        config: The engine's parallelism.
        worker: The path of the class.
    """
    set_attributes(config, worker_cls=worker)


def drop_last_block(config: SpeculativeConfig) -> None:
    """Let the scheduler drop the last block of each prefix hit, as for vLLM's EAGLE.

    Where two blocks contain the same text, the scheduler may still find the one that another text
    follows. Drafts are then slightly worse for a while, as with EAGLE.
    """
    _override_method(config, "use_eagle_block_drop", True)


def hide_draft_schedule(config: SpeculativeConfig) -> None:
    """Let vLLM keep the schedule of draft tokens by batch size, and capture whole trees with it."""
    _override_method(config, "uses_dynamic_speculative_decoding", False)


def hash_request(config: SpeculativeConfig, name: str, options: dict[str, Any]) -> None:
    """Let the hash of a configuration depend on the method that it requests, and its options."""
    factors = _stock_method(config, "compute_hash")(config), name, options
    text = json.dumps(factors, sort_keys=True, default=repr)
    _override_method(config, "compute_hash", hashlib.sha256(text.encode()).hexdigest())


def _override_method(config: SpeculativeConfig, name: str, result: bool | str) -> None:
    """Let a method without arguments return `result`, on one configuration."""
    _stock_method(config, name)
    # A type and `partial` can be pickled to the engine's other processes, unlike a closure.
    object.__setattr__(config, name, functools.partial(type(result), result))


def _stock_method(config: SpeculativeConfig, name: str) -> Callable[..., Any]:
    """A method of the configuration's class."""
    method = getattr(type(config), name, None)
    if not callable(method):
        raise unknown(f"SpeculativeConfig has no method {name}")
    return method


@contextmanager
def without_logits_processors(config: ModelConfig) -> Iterator[Sequence[Any] | None]:
    """Hide custom logits processors while the stock model runner is built, and yield them."""
    given = set_attributes(config, logits_processors=None)
    try:
        yield given["logits_processors"]
    finally:
        set_attributes(config, **given)
