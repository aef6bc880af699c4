"""Base classes of the attention backends that apply tree masks."""

from __future__ import annotations

from typing import Any

import torch
from tree_kernels.attention_variant import AttentionVariant
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata

from drafttree.vllm.step_masks import StepMasks


class TreeBackend(AttentionBackend):
    """An attention backend that the tree runner can use."""

    @staticmethod
    def kv_rows(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's keys and values in its cache, as `KvMover` takes them."""
        raise NotImplementedError


class TreeMetadataBuilder:
    """Mixin for the metadata builder of a `TreeBackend`.

    Attributes:
        step_masks: Masks of the step whose metadata is built next; None if it has no drafts.
        max_nodes: Most nodes of a tree, the root counted; None if any number will do.
    """

    step_masks: StepMasks | None = None
    max_nodes: int | None = None

    def build_part(self, common: CommonAttentionMetadata, masks: StepMasks | None) -> Any:
        """Build the metadata of some of a step's rows; that of the whole step stays valid.

        Args:
            common: The engine's description of these rows.
            masks: Masks of the trees among them, one of each request; None if all rows are causal.
        """
        raise NotImplementedError

    def masks_changed(self) -> None:
        """The masks of the step whose metadata was built last have changed in place."""
        raise NotImplementedError


def refuse_unsupported(layer: Any, *features: tuple[bool, str]) -> None:
    """Refuse attention with features that tree attention does not compute.

    Args:
        layer: The backend's implementation of a layer.
        features: Features to check in addition to those of every backend: whether the layer has the
            feature, and its name.

    Raises:
        ValueError: The layer has an unsupported feature; the message names it.
    """
    for found, feature in (
        *features,
        (layer.alibi_slopes is not None, "ALiBi slopes"),
        (layer.kv_sharing_target_layer_name is not None, "KV shared between layers"),
    ):
        if found:
            raise ValueError(
                f"draft trees do not work with this model's attention: {feature}. "
                "Leave the speculative method out."
            )


def variant_of(layer: Any, window: int) -> AttentionVariant:
    """How a layer's attention differs from softmax attention to all tokens.

    Args:
        layer: The backend's implementation of the layer.
        window: The number of positions that a token attends to; 0 for all.
    """
    # A reload may replace the sinks, so they are read in each step.
    return AttentionVariant(window, float(layer.logits_soft_cap or 0), layer.sinks)
