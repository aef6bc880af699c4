"""Patches of SGLang's arguments, its front end, and its choice of attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from drafttree.patches import Patch, is_replaced, mark_replaced, replace_function
from drafttree.sglang.patches.when import AT_CHECK, AT_REGISTRATION
from drafttree.sglang.versions import CPU_BACKEND, unknown

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS",
        when=AT_REGISTRATION,
        reason="SGLang's attention backend for CPUs has no branch for the verification of trees.",
    ),
    Patch(
        target="sglang.srt.managers.tokenizer_control_mixin:get_spec",
        when=AT_CHECK,
        reason="SGLang's front end takes corpora for its own n-gram speculation alone, by name.",
    ),
    Patch(
        target="sglang.srt.arg_groups.lora_hook:check_lora_speculative_compatibility",
        when=AT_CHECK,
        reason="SGLang serves LoRA adapters with its own methods that verify equally many rows for "
        "each request, by name.",
    ),
)


def route_attention() -> None:
    """Let servers that run a drafttree method on a CPU use attention that applies tree masks.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    stock = ATTENTION_BACKENDS.get(CPU_BACKEND)
    if is_replaced(stock):
        return
    if stock is None or len(inspect.signature(stock).parameters) != 1:
        raise unknown(f"no attention backend {CPU_BACKEND} is made from a model runner alone")

    def backend_for(runner: Any) -> Any:
        from drafttree.sglang.algorithm import TreeAlgorithm

        if not isinstance(runner.spec_algorithm, TreeAlgorithm):
            return stock(runner)
        from drafttree.sglang.attention import TreeAttentionBackend

        return TreeAttentionBackend(runner)

    mark_replaced(backend_for)
    register_attention_backend(CPU_BACKEND)(backend_for)


def take_corpora() -> None:
    """Let SGLang's front end take corpora for drafttree methods too.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.managers import tokenizer_control_mixin
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from drafttree.sglang.algorithm import TreeAlgorithm

    def wrap(stock: Callable[[], Any]) -> Callable[[], Any]:
        def get_spec() -> Any:
            spec = stock()
            algorithm = SpeculativeAlgorithm.from_string(spec.speculative_algorithm)
            if not isinstance(algorithm, TreeAlgorithm):
                return spec
            # That module reads nothing else of it.
            return SimpleNamespace(
                speculative_algorithm="NGRAM",
                speculative_ngram_external_corpus_max_tokens=(
                    spec.speculative_ngram_external_corpus_max_tokens
                ),
            )

        return get_spec

    replace_function(tokenizer_control_mixin, "get_spec", wrap, expected=[], unknown=unknown)


def accept_adapters() -> None:
    """Let SGLang's check of LoRA adapters pass drafttree methods, which have checks of their own.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.arg_groups import lora_hook
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from drafttree.sglang.algorithm import TreeAlgorithm

    def wrap(stock: Callable[[Any], None]) -> Callable[[Any], None]:
        def check_lora_speculative_compatibility(server_args: Any) -> None:
            name = lora_hook.resolving_view(server_args).speculative_algorithm
            if not isinstance(SpeculativeAlgorithm.from_string(name), TreeAlgorithm):
                stock(server_args)

        return check_lora_speculative_compatibility

    replace_function(
        lora_hook,
        "check_lora_speculative_compatibility",
        wrap,
        expected=["server_args"],
        unknown=unknown,
    )
