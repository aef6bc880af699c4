"""Tree attention on vLLM's GPUs: one launch serves prompts, plain rows and trees of any shape.

The KV cache is laid out, and written, as the engine's Triton backend does. What a step's trees are
is data in buffers that stay where they are, so that a captured graph serves any trees, and a prompt
that is read in as many tokens as a tree has stays causal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tree_kernels.mask_rows import mask_rows
from tree_kernels.tree_attention import tree_attention
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import AttentionSpec

from drafttree.vllm.backends import TreeBackend, TreeMetadataBuilder, refuse

_WORD = 32


@dataclass
class TritonTreeMetadata:
    """What `tree_attention` takes of a step, by its names.

    Attributes:
        num_actual_tokens: the batch's rows.
        slot_mapping: `int64 [T]`, where the rows' keys and values are written.
    """

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    tree_starts: torch.Tensor
    masks: torch.Tensor
    max_query: int


class TritonTreeBackend(TritonAttentionBackend, TreeBackend):
    """Stands in for the Triton backend, under its name, while a model is loaded for our runner."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_impl_cls() -> type[TritonTreeImpl]:
        """The layer's part."""
        return TritonTreeImpl

    @staticmethod
    def get_builder_cls() -> type[TritonTreeMetadataBuilder]:
        """The step's part."""
        return TritonTreeMetadataBuilder

    @staticmethod
    def kv_rows(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A token's key and value lie beside each other."""
        keys, values = kv_cache.chunk(2, dim=-1)
        return keys, values

    # What the engine's own kernel serves and ours does not.

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders alone."""
        return attn_type == AttentionType.DECODER


class TritonTreeMetadataBuilder(TreeMetadataBuilder, AttentionMetadataBuilder[TritonTreeMetadata]):
    """Writes who sees whom into buffers that all steps share."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler = vllm_config.scheduler_config
        words = -(-(1 + vllm_config.num_speculative_tokens) // _WORD)
        self._tree_starts = torch.zeros(scheduler.max_num_seqs, dtype=torch.int32, device=device)
        self._masks = torch.zeros(
            scheduler.max_num_batched_tokens, words, dtype=torch.int32, device=device
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonTreeMetadata:
        """Build the step's metadata; `step_trees` must be the step's."""
        starts = common_attn_metadata.query_start_loc
        tree_starts = self._tree_starts[: len(starts) - 1]
        torch.sub(starts[1:], starts[:-1], out=tree_starts)
        trees = self.step_trees
        if trees is not None:
            requests, nodes = trees.requests, trees.nodes
            tree_starts[requests] -= nodes.int()
            mask_rows(trees.masks, starts[requests + 1] - nodes, nodes, self._masks)
        tokens = common_attn_metadata.num_actual_tokens
        return TritonTreeMetadata(
            num_actual_tokens=tokens,
            slot_mapping=common_attn_metadata.slot_mapping,
            query_starts=starts,
            lengths=common_attn_metadata.seq_lens,
            block_table=common_attn_metadata.block_table_tensor,
            tree_starts=tree_starts,
            masks=self._masks[:tokens],
            max_query=common_attn_metadata.max_query_len,
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TritonTreeMetadata:
        """Capture over short contexts: long ones take long, and a graph serves any length."""
        metadata = self.build(0, common_attn_metadata)
        metadata.lengths.fill_(1)
        return metadata


class TritonTreeImpl(TritonAttentionImpl):
    """The engine's own way to write the cache, ours to read it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse(
            self,
            (self.sliding_window != (-1, -1), f"sliding window ({self.sliding_window})"),
            (self.attn_type != AttentionType.DECODER, f"kind {self.attn_type}"),
        )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No."""
        return False

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: `query` and `output` are `[tokens, heads, head_size]`."""
        if attn_metadata is None:
            return output.fill_(0)
        assert isinstance(attn_metadata, TritonTreeMetadata)
        rows = slice(attn_metadata.num_actual_tokens)
        keys, values = TritonTreeBackend.kv_rows(kv_cache)
        tree_attention(
            query[rows],
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_metadata.block_table,
            attn_metadata.query_starts,
            attn_metadata.lengths,
            attn_metadata.tree_starts,
            attn_metadata.masks,
            self.scale,
            attn_metadata.max_query,
            out=output[rows],
        )
        return output
