"""Tree attention on CUDA: one launch computes prompts, plain rows and trees of any shape.

Before it, the engine's flash attention may read what comes before the step (`prefix.py`). The KV
cache has the layout of the engine's Triton backend and is written by it. A step's trees are
described by buffers that never move, so that a captured graph serves any trees, and a prompt chunk
with as many tokens as a tree stays causal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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

from drafttree.method import find_method
from drafttree.vllm import patches
from drafttree.vllm.attention.backends import (
    TreeBackend,
    TreeMetadataBuilder,
    refuse_unsupported,
    variant_of,
)
from drafttree.vllm.attention.prefix import StepPrefix, flash_attention_for
from drafttree.vllm.checks import FP8_KV
from drafttree.vllm.step_masks import StepMasks

_WORD = 32


@dataclass
class TritonTreeMetadata:
    """The arguments of `tree_attention` that are the same for all layers of a step.

    Attributes:
        num_actual_tokens: Number of rows of the batch.
        slot_mapping: KV slots to which the rows' keys and values are written, `int64 [T]`.
        query_starts: First row of each request, and the number of rows, `int32 [B + 1]`.
        lengths: Number of tokens of each request, this step's included, `int32 [B]`.
        block_table: KV blocks of each request, `int32 [B, P]`.
        tree_starts: First row of each request's tree, counted within the request, `int32 [B]`.
        masks: Ancestors of each row as bits, `int32 [T, words]`.
        max_query: Greatest number of rows of a request.
        prefix: What flash attention reads in layers without a window; None if it reads nothing.
    """

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    tree_starts: torch.Tensor
    masks: torch.Tensor
    max_query: int
    prefix: StepPrefix | None = None


class TritonTreeBackend(TritonAttentionBackend, TreeBackend):
    """Replaces the Triton backend, under its name, while a model is loaded for a tree runner."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8_KV]

    @staticmethod
    def get_impl_cls() -> type[TritonTreeImpl]:
        """The class that computes a layer's attention."""
        return TritonTreeImpl

    @staticmethod
    def get_builder_cls() -> type[TritonTreeMetadataBuilder]:
        """The class that prepares a step."""
        return TritonTreeMetadataBuilder

    @staticmethod
    def kv_rows(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's keys and values, `[blocks, heads, block_size, head_size]`."""
        return kv_views(layer.kv_cache)

    # Features that the engine's own kernel computes and `tree_attention` does not.

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Not supported."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Not supported: the number of shares of the KV follows from the whole batch."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """Not supported."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Not supported."""
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """Not supported."""
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Only decoders are supported."""
        return attn_type == AttentionType.DECODER


class TritonTreeMetadataBuilder(TreeMetadataBuilder, AttentionMetadataBuilder[TritonTreeMetadata]):
    """Writes the ancestor masks into buffers that all steps share."""

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
        # Those of `step_masks` may be dropped before a step's last forward.
        self._built: StepMasks | None = None
        words = -(-(1 + vllm_config.num_speculative_tokens) // _WORD)
        self.max_nodes = words * _WORD
        self._tree_starts = torch.zeros(scheduler.max_num_seqs, dtype=torch.int32, device=device)
        self._single = torch.ones_like(self._tree_starts)
        self._masks = torch.zeros(
            scheduler.max_num_batched_tokens, words, dtype=torch.int32, device=device
        )
        self._flash = flash_attention_for(kv_cache_spec, scheduler.max_num_seqs, device)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Whole graphs of any steps, except on the V2 model runner for drafters with a model.

        They draft in a hook before the target's forward, and a graph runs no hook.
        """
        request = patches.requested(vllm_config.speculative_config)
        if request is None or not getattr(vllm_config, "use_v2_model_runner", False):
            return cls._cudagraph_support
        if find_method(request.name).kind.needs_model:
            return AttentionCGSupport.NEVER
        return cls._cudagraph_support

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonTreeMetadata:
        """Build the metadata of the step that `step_masks` describes."""
        common = common_attn_metadata
        starts, trees = common.query_start_loc, self.step_masks
        tree_starts = self._tree_starts[: len(starts) - 1]
        torch.sub(starts[1:], starts[:-1], out=tree_starts)
        # Until trees are taken off, these are the numbers of rows.
        prefix = None if self._flash is None else self._flash.of_step(common, tree_starts)
        self._first_rows = _first_rows(starts, tree_starts, trees)
        self._built = trees
        if trees is not None:
            self.masks_changed()
        masks = self._masks[: common.num_actual_tokens]
        return _metadata(common, tree_starts, masks, prefix)

    def build_part(
        self, common: CommonAttentionMetadata, masks: StepMasks | None
    ) -> TritonTreeMetadata:
        """Build the metadata of some of a step's rows, in buffers of their own."""
        starts, ends = common.query_start_loc[:-1], common.query_start_loc[1:]
        rows = self._masks.new_empty(common.num_actual_tokens, self._masks.shape[1])
        if masks is None:
            is_single = common.max_query_len == 1
            counts = self._single[: len(ends)] if is_single else ends - starts
            return _metadata(common, counts, rows)
        first_rows = ends - masks.tree_sizes.int()
        mask_rows(masks.masks, first_rows, masks.tree_sizes, rows, masks.first_nodes)
        return _metadata(common, first_rows - starts, rows)

    def masks_changed(self) -> None:
        """Write the masks' bits again, of the same trees."""
        trees = self._built
        assert trees is not None
        mask_rows(trees.masks, self._first_rows, trees.tree_sizes, self._masks)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TritonTreeMetadata:
        """Build metadata of short contexts, which are fast to capture; graphs serve any length."""
        metadata = self.build(0, common_attn_metadata)
        metadata.lengths.fill_(1)
        if self._flash is None:
            return metadata
        return replace(metadata, prefix=self._flash.of_graph(common_attn_metadata))


def _first_rows(
    starts: torch.Tensor, tree_starts: torch.Tensor, trees: StepMasks | None
) -> torch.Tensor:
    """Write where each request's tree starts among its rows, and find the rows of the roots.

    Args:
        starts: First row of each request, and the number of rows, `int32 [B + 1]`.
        tree_starts: `int32 [B]`, the number of rows of each request, from which those of its tree
            are taken off.
        trees: The trees of T requests; None for none.

    Returns:
        Integers `[T]`; a root that has no row is counted from the first node that has one.
    """
    if trees is None:
        return starts[:0]
    tree_starts[trees.requests] -= trees.tree_sizes.int()
    return starts[trees.requests + 1] - trees.tree_sizes


def _metadata(
    common: CommonAttentionMetadata,
    tree_starts: torch.Tensor,
    masks: torch.Tensor,
    prefix: StepPrefix | None = None,
) -> TritonTreeMetadata:
    return TritonTreeMetadata(
        num_actual_tokens=common.num_actual_tokens,
        slot_mapping=common.slot_mapping,
        query_starts=common.query_start_loc,
        lengths=common.seq_lens,
        block_table=common.block_table_tensor,
        tree_starts=tree_starts,
        masks=masks,
        max_query=common.max_query_len,
        prefix=prefix,
    )


class TritonTreeImpl(TritonAttentionImpl):
    """Writes the cache with the engine's kernel, and computes attention with `tree_attention`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_unsupported(
            self,
            (self.attn_type != AttentionType.DECODER, f"attention type {self.attn_type}"),
            # Older versions have no such chunks.
            (getattr(self, "chunk_lookback", -1) >= 0, "chunks of the context with lookback"),
            (
                self.kv_cache_dtype not in TritonTreeBackend.supported_kv_cache_dtypes,
                f"a KV cache in {self.kv_cache_dtype}",
            ),
        )
        self._is_quantised = self.kv_cache_dtype in FP8_KV
        # The engine would quantise queries too.
        self.supports_quant_query_input = False

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Not supported."""
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
        keys, values = (each.transpose(1, 2) for each in kv_views(kv_cache))
        # The engine counts the positions before a token's own.
        variant = variant_of(self, self.sliding_window[0] + 1)
        if self._is_quantised:
            keys, values = (each.view(self.fp8_dtype) for each in (keys, values))
            variant = replace(variant, kv_scales=scales_of(layer))
        batch, out, prefix = query[rows], output[rows], None
        table, starts = attn_metadata.block_table, attn_metadata.query_starts
        if attn_metadata.prefix is not None and not variant.window:
            prefix = attn_metadata.prefix.attend(
                *(batch, keys, values, table, starts, attn_metadata.max_query),
                *(self.scale, variant.soft_cap, out),
            )
        tree_attention(
            *(batch, keys, values, table, starts),
            attn_metadata.lengths,
            attn_metadata.tree_starts,
            attn_metadata.masks,
            self.scale,
            attn_metadata.max_query,
            out=out,
            variant=variant,
            prefix=prefix,
        )
        return output


def scales_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of a layer's keys and values in a quantised cache.

    Raises:
        ValueError: It has several, such as one for each head.
    """
    scales = layer._k_scale, layer._v_scale
    if any(each.numel() != 1 for each in scales):
        raise ValueError(
            "draft trees do not work with a KV cache that has several scales in a layer: leave the "
            "speculative method out, or the quantised KV cache"
        )
    return scales


def kv_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of keys and values; a token's value is stored right after its key."""
    keys, values = kv_cache.chunk(2, dim=-1)
    return keys, values
