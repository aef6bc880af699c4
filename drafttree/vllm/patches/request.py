"""The request for a method, which travels with vLLM's configuration."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from drafttree.patches import Patch, replace_function
from drafttree.vllm.patches.configuration import ON_CONFIGURATION
from drafttree.vllm.versions import unknown

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.sampling_params import SamplingParams

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="vllm.config:SpeculativeConfig.drafttree",
        when=ON_CONFIGURATION,
        reason="An additional attribute: the method's name and options, and a key, which reach "
        "the engine's other processes with the configuration.",
    ),
    Patch(
        target="vllm.v1.engine.core:EngineCoreProc._notify_idle_state_callbacks",
        when="When a drafttree method is first requested, and in other processes when they receive "
        "the configuration. Engines with other methods do as before.",
        reason="An engine core without work waits for messages, and nothing can be run meanwhile. "
        "It calls this method before each wait, and then lets a drafttree method prime until a "
        "message arrives.",
    ),
    Patch(
        target="vllm.sampling_params:SamplingParams._validate_spec_decode",
        when="When a drafttree method is first requested. Other methods are checked as before.",
        reason="vLLM refuses min_p and logit_bias with speculation, because its own verification "
        "cannot serve them. Draft trees are verified with vLLM's sampler, which can.",
    ),
)

_REQUEST = "drafttree"  # attribute of a SpeculativeConfig that names a drafttree method
_ENGINE_CORE = "vllm.v1.engine.core"


class Request(NamedTuple):
    """The request for a method.

    It is pickled with the configuration to the engine's other processes. The engine core's patch is
    applied when it arrives there, because no other code of drafttree runs in that process.

    Attributes:
        name: The method's name.
        options: Its options.
        key: A secret of the engine's processes, for trees that a worker shows the scheduler while
            their step is under way; None if it shows none.
    """

    name: str
    options: dict[str, Any]
    key: bytes | None

    def __reduce__(self) -> tuple[Callable[..., Request], tuple[Any, ...]]:
        return _arrived, tuple(self)


def _arrived(name: str, options: dict[str, Any], key: bytes | None) -> Request:
    # Only the process of the engine core needs this module, and has imported it.
    if _ENGINE_CORE in sys.modules:
        prime_when_idle()
    return Request(name, options, key)


def requested(config: SpeculativeConfig | None) -> Request | None:
    """The request for a method, if `config` requests a drafttree method."""
    return getattr(config, _REQUEST, None)


def key_of_trees(config: SpeculativeConfig | None) -> bytes | None:
    """The key of a request; None without a request, and if no trees are shown."""
    request = requested(config)
    return None if request is None else request.key


def mark_requested(
    config: SpeculativeConfig, name: str, options: dict[str, Any], *, shows_trees: bool
) -> None:
    """Mark the configuration as a request for a drafttree method.

    Args:
        config: The configuration.
        name: The method's name.
        options: Its options.
        shows_trees: Whether the scheduler is shown trees while their step is under way.
    """
    request = Request(name, options, secrets.token_bytes(32) if shows_trees else None)
    # A plain attribute is pickled with the configuration to the engine's other processes.
    object.__setattr__(config, _REQUEST, request)


def prime_when_idle() -> None:
    """Let engine cores with a drafttree method prime while they have no work."""
    from vllm.v1.engine.core import EngineCoreProc

    def wrap(stock: Callable[[EngineCoreProc], None]) -> Callable[[EngineCoreProc], None]:
        def _notify_idle_state_callbacks(self: EngineCoreProc) -> None:
            stock(self)
            if requested(self.vllm_config.speculative_config) is not None:
                from drafttree.vllm.engine_priming import prime_until_work

                prime_until_work(self)

        return _notify_idle_state_callbacks

    # An older engine core has no such method, and primes at its start only.
    if hasattr(EngineCoreProc, "_notify_idle_state_callbacks"):
        replace_function(
            EngineCoreProc,
            "_notify_idle_state_callbacks",
            wrap,
            expected=["self"],
            unknown=unknown,
        )


def allow_sampling_parameters() -> None:
    """Let requests use min_p and logit_bias with drafttree methods."""
    from vllm.sampling_params import SamplingParams

    def wrap(stock: Callable[..., None]) -> Callable[..., None]:
        def _validate_spec_decode(
            self: SamplingParams, speculative_config: SpeculativeConfig | None
        ) -> None:
            if requested(speculative_config) is None:
                stock(self, speculative_config)

        return _validate_spec_decode

    expected = ["self", "speculative_config"]
    replace_function(
        SamplingParams, "_validate_spec_decode", wrap, expected=expected, unknown=unknown
    )
