"""Patches of vLLM's layers: the attention backend, and convolutions on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from drafttree.patches import Patch, check_parameters, replace_function
from drafttree.vllm.versions import unknown

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="vllm.v1.attention.backends.registry:AttentionBackendEnum",
        when="While the attention layers of a model with draft trees are built. The caches of "
        "vLLM's backend selection are cleared before and after.",
        reason="Layers look up their backend by name. The tree backend is registered under the "
        "name of the stock backend, for which the rest of the engine is configured.",
    ),
    Patch(
        target="vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_spec_forward",
        when="On a CPU, before a model with Gated DeltaNet layers is loaded that is served with "
        "chains of draft tokens.",
        reason="vLLM's function loses a layer's last inputs if a request has fewer drafts in a "
        "step than there may be.",
    ),
)


@contextmanager
def override_backend(backend: AttentionBackendEnum, ours: type) -> Iterator[None]:
    """Let attention layers that are built inside the context use another backend.

    It is registered under the stock backend's name, for which everything else is configured, and
    only while the layers are built: other engines of the process keep the stock one.

    Args:
        backend: The stock backend.
        ours: The class of the backend that replaces it.
    """
    from vllm.v1.attention.backends.registry import register_backend

    parameters = ["backend", "class_path", "is_mamba"]
    check_parameters("register_backend", register_backend, parameters, unknown)
    previous = backend.get_path() if backend.is_overridden() else None
    register_backend(backend, f"{ours.__module__}.{ours.__name__}")
    _forget_selected_backends()
    try:
        yield
    finally:
        backend.clear_override()
        if previous is not None:
            register_backend(backend, previous)
        _forget_selected_backends()


def keep_convolutions() -> None:
    """Let Gated DeltaNet layers on a CPU verify any number of drafts."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    from drafttree.vllm.chains.cpu_gdn import spec_forward

    expected = ["layer", "attn_metadata_i", "mixed_qkv_spec", "b_spec", "a_spec", "conv_buf"]
    replace_function(
        gdn_attention,
        "_spec_forward",
        lambda _: spec_forward,
        expected=[*expected, "ssm_state", "width", "state_len"],
        unknown=unknown,
    )


def _forget_selected_backends() -> None:
    """Clear the caches of the engine's backend selection."""
    from vllm.v1.attention import selector

    for function in vars(selector).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
