"""Tree attention on vLLM's CPU backend.

Rows of a draft tree see the context, their ancestors and themselves. The engine's CPU kernel
knows causal masks only, so it serves prefill and undrafted rows, and trees are served here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tree_kernels.cpu_attention import PagedTrees, TreeAttention
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from drafttree.vllm.backends import TreeBackend, TreeMetadataBuilder, refuse

ISA = "vec"
"""The KV layout that `kv_views` reads. The engine may prefer AMX tiles, whose packing it does not
publish; the builder then falls back to this one."""


@dataclass
class CpuTreeMetadata(CPUAttentionMetadata):
    """The engine's metadata and the batch's trees.

    Attributes:
        trees: None if there is none.
        attend: serves the trees' rows.
        only_trees: no row of the batch is left for the engine's kernel.
    """

    trees: PagedTrees | None = None
    attend: TreeAttention | None = None
    only_trees: bool = False


class CpuTreeBackend(CPUAttentionBackend, TreeBackend):
    """Stands in for the CPU backend, under its name, while a model is loaded for our runner."""

    @staticmethod
    def get_impl_cls() -> type[CpuTreeImpl]:
        """The layer's part."""
        return CpuTreeImpl

    @staticmethod
    def get_builder_cls() -> type[CpuTreeMetadataBuilder]:
        """The step's part."""
        return CpuTreeMetadataBuilder

    @staticmethod
    def kv_rows(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A block's keys lie before its values, transposed."""
        keys, values = kv_views(kv_cache)
        return keys.transpose(2, 3), values


class CpuTreeMetadataBuilder(TreeMetadataBuilder, CPUAttentionMetadataBuilder):
    """Adds to the step's metadata the masks of its trees."""

    isa: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.isa != ISA:
            self.isa = ISA
            self._set_isa_to_layers(self.layer_names)
        check_kv_layout(self.num_kv_heads, self.block_size, self.head_dim, self.dtype)
        self._attend = TreeAttention(
            self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, self.dtype
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CpuTreeMetadata:
        """Build the step's metadata; `step_trees` must be the step's."""
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.step_trees is None:
            return CpuTreeMetadata(**vars(stock))
        rows, nodes = self.step_trees.requests, self.step_trees.nodes
        return CpuTreeMetadata(
            **vars(stock),
            trees=PagedTrees(
                starts=common_attn_metadata.query_start_loc_cpu[rows + 1] - nodes,
                nodes=nodes,
                lengths=common_attn_metadata.seq_lens[rows].long(),
                blocks=stock.block_table[rows],
                masks=self.step_trees.masks,
            ),
            attend=self._attend,
            only_trees=int(nodes.sum()) == stock.num_actual_tokens,
        )


class CpuTreeImpl(CPUAttentionBackendImpl):
    """The engine's kernel for causal rows, masked attention for tree rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse(self, (self.sliding_window != -1, f"sliding window ({self.sliding_window})"))
        self._cache: torch.Tensor | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CpuTreeMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: `query` and `output` are `[tokens, heads, head_size]`."""
        if attn_metadata is None or not attn_metadata.only_trees:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if attn_metadata is None or attn_metadata.trees is None:
            return output
        assert attn_metadata.attend is not None
        if kv_cache is not self._cache:
            # It stays the same one, and five views a layer would be a cost in every step.
            self._cache, self._kv = kv_cache, kv_views(kv_cache)
        keys, values = self._kv
        attn_metadata.attend(attn_metadata.trees, query, keys, values, output, self.scale)
        return output


def kv_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's cache, `[blocks, heads, block_size, 2 * head_size]` by its own account.

    Returns:
        Keys `[blocks, heads, head_size, block_size]`, which the layout stores transposed, and
        values `[blocks, heads, block_size, head_size]`.
    """
    blocks, heads, block_size, both = kv_cache.shape
    halves = kv_cache.view(blocks, heads, 2, block_size * both // 2)
    keys = halves[:, :, 0].view(blocks, heads, both // 2, block_size)
    return keys, halves[:, :, 1].view(blocks, heads, block_size, both // 2)


def check_kv_layout(heads: int, block_size: int, head_size: int, dtype: torch.dtype) -> None:
    """Let the engine write a few rows and see that `kv_views` finds them.

    Raises:
        RuntimeError: this build of the engine lays its cache out in another way.
    """
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([1, block_size - 1, block_size + 5])
    key, value = (
        torch.randn(len(slots), heads, head_size, generator=generator).to(dtype) for _ in range(2)
    )
    cache = torch.zeros(2, heads, block_size, 2 * head_size, dtype=dtype)
    halves = cache.view(2, heads, 2 * block_size, head_size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, ISA)
    keys, values = kv_views(cache)
    block, offset = slots // block_size, slots % block_size
    if not (
        torch.equal(keys[block, :, :, offset], key) and torch.equal(values[block, :, offset], value)
    ):
        raise RuntimeError(
            "this vLLM lays out its CPU KV cache in a way that drafttree does not know: install "
            "vLLM 0.32, or leave the speculative method out"
        )
