"""Attention backends that honour draft trees stand in for the engine's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from drafttree.vllm.step import StepMasks


class TreeBackend(AttentionBackend):
    """What our runner asks of a backend beside what the engine does."""

    @staticmethod
    def kv_rows(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's cache: keys and values, `[blocks, heads, block_size, head_size]`."""
        raise NotImplementedError


class TreeMetadataBuilder:
    """What our runner asks of a backend's metadata builder.

    Attributes:
        step_trees: the trees of the step that is built next; None if there are none.
    """

    step_trees: StepMasks | None = None


@contextmanager
def stand_in(backend: AttentionBackendEnum, ours: type[TreeBackend]) -> Iterator[None]:
    """Let the attention layers that are built inside use our backend.

    It stands under the engine's own name, for which everything else is set up already, and only
    while the layers are built: other engines of the process keep the stock one.
    """
    before = backend.get_path() if backend.is_overridden() else None
    register_backend(backend, f"{ours.__module__}.{ours.__name__}")
    _forget_selected_backends()
    try:
        yield
    finally:
        backend.clear_override()
        if before is not None:
            register_backend(backend, before)
        _forget_selected_backends()


def _forget_selected_backends() -> None:
    for function in vars(selector).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def refuse(layer: Any, *features: tuple[bool, str]) -> None:
    """Refuse attention that does what trees do not know.

    Args:
        layer: a backend's part of a layer.
        features: what else trees do not know, and whether the layer does it.

    Raises:
        ValueError: naming what it does.
    """
    for found, feature in (
        *features,
        (layer.alibi_slopes is not None, "ALiBi slopes"),
        (layer.logits_soft_cap != 0, f"logits soft cap ({layer.logits_soft_cap})"),
        (layer.sinks is not None, "attention sinks"),
        (layer.kv_sharing_target_layer_name is not None, "KV shared between layers"),
    ):
        if found:
            raise ValueError(
                f"draft trees do not work with this model's attention: {feature}. "
                "Leave the speculative method out."
            )
