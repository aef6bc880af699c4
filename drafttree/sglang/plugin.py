"""Registration with SGLang: makes a method's name valid for `--speculative-algorithm`.

SGLang calls this in every process, through the entry-point group `sglang.srt.plugins`. It uses the
host's own registries; without a method of ours the host does what it always does.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from drafttree.method import Method
from drafttree.sglang.versions import TESTED

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

CPU_BACKEND = "torch_native"
"""Code of the host branches on this name, so tree attention on a CPU goes by it too."""

CUDA_BACKENDS = ("triton", "flashinfer")
"""The host's own backends that take a tree's mask; the first is the default."""


def register_method(method: Method) -> None:
    """Make `--speculative-algorithm NAME` valid, NAME with hyphens. May be called repeatedly.

    Raises:
        RuntimeError: this SGLang has no place for it; the host logs it and goes on.
    """
    try:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        from sglang.srt.speculative.spec_registry import get_spec

        from drafttree.sglang.algorithm import algorithm_for
        from drafttree.sglang.checks import check_server
    except ImportError as error:
        raise RuntimeError(
            f"{method.title} does not know this SGLang: install {TESTED}, or leave "
            "--speculative-algorithm out"
        ) from error

    name = method.name.replace("_", "-").upper()
    if get_spec(name) is not None:
        return
    _route_attention()

    def worker_for(server_args: Any) -> Any:
        if method.draft_model:
            from drafttree.sglang.draft_model_worker import DraftModelWorker

            return DraftModelWorker.of(method)
        if method.hidden_states:
            from drafttree.sglang.hidden_state_worker import HiddenStateWorker

            return HiddenStateWorker.of(method)
        from drafttree.sglang.table_worker import TableWorker

        return TableWorker.of(method)

    SpeculativeAlgorithm.register(
        name,
        supports_overlap=True,
        validate_server_args=functools.partial(check_server, method),
        spec_class=algorithm_for(method),
    )(worker_for)


def _route_attention() -> None:
    """Let a server that runs a method of ours on a CPU have attention that honours tree masks."""
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    from drafttree.sglang.algorithm import TreeAlgorithm

    stock = ATTENTION_BACKENDS[CPU_BACKEND]
    if getattr(stock, "drafttree", False):
        return

    def backend_for(runner: ModelRunner) -> AttentionBackend:
        if not isinstance(runner.spec_algorithm, TreeAlgorithm):
            return stock(runner)
        from drafttree.sglang.attention import TreeAttentionBackend

        return TreeAttentionBackend(runner)

    backend_for.drafttree = True  # type: ignore[attr-defined]
    register_attention_backend(CPU_BACKEND)(backend_for)
