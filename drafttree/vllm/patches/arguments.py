"""Patches of vLLM's engine arguments, from which its configuration is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from drafttree.patches import Patch, check_parameters, replace_function
from drafttree.vllm.patches.settings import set_attributes
from drafttree.vllm.versions import unknown

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        when="At registration, in every process. Other methods are passed on unchanged.",
        reason="vLLM checks the method's name against a fixed list, so the names of installed "
        "methods are translated before that.",
    ),
    *(
        Patch(
            target=f"vllm.engine.arg_utils:EngineArgs.{name}",
            when="While vLLM makes the speculative configuration; restored afterwards.",
            reason="vLLM knows no tree methods. It makes the configuration of a custom proposer "
            "instead, or of GPU n-grams for its V2 model runner, with which it reserves KV slots "
            "and schedules draft tokens.",
        )
        for name in ("speculative_config", "spec_method", "spec_tokens", "spec_model")
    ),
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.attention_backend",
        when="On CUDA, unless the user has set attention_config.backend.",
        reason="vLLM's setting for the attention backend. The tree backend replaces the Triton "
        "backend, which vLLM does not choose by itself on every GPU.",
    ),
)


def wrap_create_speculative_config(
    find: Callable[[EngineArgs], Any | None], create: Callable[..., SpeculativeConfig]
) -> None:
    """Let engine arguments request drafttree methods.

    Args:
        find: Returns the drafttree method that engine arguments request, or None.
        create: `(method, original, engine, target_model_config, target_parallel_config)`; makes
            the configuration for that method. `original` is the engine's own bound method.
    """
    from vllm.engine.arg_utils import EngineArgs

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        def create_speculative_config(
            self: EngineArgs, *args: Any, **kwargs: Any
        ) -> SpeculativeConfig | None:
            method = find(self)
            if method is None:
                return cast("SpeculativeConfig | None", stock(self, *args, **kwargs))
            expected = ["self", "target_model_config", "target_parallel_config"]
            name = "EngineArgs.create_speculative_config"
            check_parameters(name, stock, expected, unknown)
            return create(method, functools.partial(stock, self), self, *args, **kwargs)

        return create_speculative_config

    # Whether the parameters are known matters only once a drafttree method is requested.
    replace_function(EngineArgs, "create_speculative_config", wrap, expected=None, unknown=unknown)


@contextmanager
def replace_speculative_arguments(engine: EngineArgs, config: dict[str, Any]) -> Iterator[None]:
    """Let engine arguments request the speculation `config` and no other, inside the context."""
    given = set_attributes(
        engine, speculative_config=config, spec_method=None, spec_tokens=None, spec_model=None
    )
    try:
        yield
    finally:
        set_attributes(engine, **given)


def use_attention_backend(engine: EngineArgs, backend: str) -> None:
    """Let engine arguments request an attention backend, by its name."""
    # The engine reads this later, also for further configurations of these arguments.
    set_attributes(engine, attention_backend=backend)
