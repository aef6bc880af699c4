"""Tree attention on vLLM's CPU backend.

Nodes of a draft tree attend to the context, their ancestors and themselves. The engine's CPU kernel
supports causal masks only: it computes steps without trees and prefill, and this module computes
the rows of trees. It rounds them as the engine's AVX-512 and AMX kernels do in plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tree_kernels.cpu_attention import (
    DecodeOrder,
    TreeAttention,
    tiles_fit,
    untiled,
)
from tree_kernels.paged_trees import PagedTrees
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from drafttree.arrays import LongArray
from drafttree.vllm.attention.backends import (
    TreeBackend,
    TreeMetadataBuilder,
    refuse_unsupported,
    variant_of,
)
from drafttree.vllm.step_masks import StepMasks
from drafttree.vllm.versions import unknown


def isa_of(
    stock: str, heads: int, kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype
) -> str:
    """Those of the engine's kernels that compute a layer without trees.

    Args:
        stock: The engine's choice.
        heads: Number of query heads.
        kv_heads: Number of KV heads.
        head_size: Size of a head.
        block_size: Tokens in a KV block.
        dtype: Element type of the query and the cache.

    Returns:
        "amx" if the engine chose it and trees can be computed from its layout; else "vec16" or
        "vec", by the head's size.
    """
    if stock == "amx" and tiles_fit(heads, kv_heads, head_size, block_size, dtype):
        return stock
    return "vec16" if head_size % 32 else "vec"


def decode_order(isa: str, head_size: int, window: int) -> DecodeOrder:
    """How the engine's kernels sum the keys of a row in plain decoding.

    Args:
        isa: The kernels, as `isa_of` names them.
        head_size: Size of a head.
        window: Positions that all layers of a group attend to; 0 for all.
    """
    # Tokens that a kernel reads at a time, rows that it computes at a time, and bytes of a query.
    unit, rows, wide = {"vec16": (16, 16, 4), "vec": (32, 8, 4), "amx": (32, 32, 2)}[isa]
    # Half of the L2 cache holds queries, and float32 sums and scores.
    cache = int(torch.cpu.get_capabilities().get("l2_cache_size", 0)) // 2
    tile = (cache - (wide + 4) * rows * head_size) // (4 * rows) // unit * unit
    return DecodeOrder(
        unit=unit,
        least_share=4 * rows if envs.VLLM_CPU_ATTN_SPLIT_KV else 0,
        tile=max(tile, unit),
        window=window,
    )


@dataclass
class CpuTreeMetadata(CPUAttentionMetadata):
    """The engine's metadata and the trees of the step.

    Attributes:
        trees: The step's trees, and undrafted rows as trees of one node; None if there is no tree.
        attend: Attention for the rows of these trees.
        only_trees: Whether no row of the batch is left for the engine's kernel.
    """

    trees: PagedTrees | None = None
    attend: TreeAttention | None = None
    only_trees: bool = False


class CpuTreeBackend(CPUAttentionBackend, TreeBackend):
    """Replaces the CPU backend, under its name, while a model is loaded for a tree runner."""

    @staticmethod
    def get_impl_cls() -> type[CpuTreeImpl]:
        """The class that computes a layer's attention."""
        return CpuTreeImpl

    @staticmethod
    def get_builder_cls() -> type[CpuTreeMetadataBuilder]:
        """The class that prepares a step."""
        return CpuTreeMetadataBuilder

    @staticmethod
    def kv_rows(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values, as `row_views` makes them."""
        return row_views(layer.kv_cache, layer.isa)


class CpuTreeMetadataBuilder(TreeMetadataBuilder, CPUAttentionMetadataBuilder):
    """Adds the masks of a step's trees to its metadata."""

    isa: str

    def masks_changed(self) -> None:
        """Nothing is to be done: attention reads the masks when it runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer = (self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, self.dtype)
        isa = isa_of(self.isa, *layer)
        if self.isa != isa:
            self.isa = isa
            self._set_isa_to_layers(self.layer_names)
        check_kv_layout(*layer[1:], isa)
        self._attend = TreeAttention(
            *layer,
            order=decode_order(isa, self.head_dim, max(self.window_size, 0)),
            tiles=isa == "amx",
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CpuTreeMetadata:
        """Build the metadata of the step that `step_masks` describes."""
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return self._with_trees(stock, common_attn_metadata, self.step_masks)

    def build_part(
        self, common: CommonAttentionMetadata, masks: StepMasks | None
    ) -> CpuTreeMetadata:
        """Build the metadata of some of a step's rows; nothing is shared between metadata."""
        return self._with_trees(super().build(0, common), common, masks)

    def _with_trees(
        self,
        stock: CPUAttentionMetadata,
        common: CommonAttentionMetadata,
        masks: StepMasks | None,
    ) -> CpuTreeMetadata:
        if masks is None:
            return CpuTreeMetadata(**vars(stock))
        # NumPy is faster than PyTorch for so few numbers.
        rows, sizes = masks.requests.numpy(), _int64(masks.tree_sizes)
        first = None if masks.first_nodes is None else _int64(masks.first_nodes)
        ends, totals = common.query_start_loc_cpu.numpy(), _int64(common.seq_lens)
        lengths = totals.copy()
        lengths[rows] -= sizes - 1
        # A tree of the root alone is plain decoding. If nothing else is left, the engine's kernel,
        # which would compute the rows of all trees too, need not run.
        of_trees = int((sizes if first is None else sizes - first).sum())
        is_undrafted = np.diff(ends) == 1
        is_undrafted[rows] = False
        (undrafted,) = is_undrafted.nonzero()
        only_trees = of_trees + len(undrafted) == stock.num_actual_tokens
        if only_trees and len(undrafted):
            rows = np.concatenate((rows, undrafted))
            sizes = np.concatenate((sizes, np.ones_like(undrafted)))
            first = None if first is None else np.concatenate((first, np.zeros_like(undrafted)))
        requests = torch.from_numpy(rows)
        return CpuTreeMetadata(
            **vars(stock),
            trees=PagedTrees(
                starts=torch.from_numpy(ends[rows + 1] - sizes),
                tree_sizes=torch.from_numpy(sizes),
                lengths=torch.from_numpy(totals[rows]),
                blocks=stock.block_table[requests],
                masks=masks.masks,
                first_nodes=None if first is None else torch.from_numpy(first),
                requests=requests,
                step_lengths=torch.from_numpy(lengths),
            ),
            attend=self._attend,
            only_trees=only_trees,
        )


class CpuTreeImpl(CPUAttentionBackendImpl):
    """The engine's kernel for causal rows, masked attention for the rows of trees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        dtype = self.kv_cache_dtype
        refuse_unsupported(self, (dtype.startswith("fp8"), f"a KV cache in {dtype}"))
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
            # The cache does not change, and making five views per layer in each step takes time.
            self._cache, self._kv = kv_cache, kv_views(kv_cache, layer.isa)
        keys, values = self._kv
        variant = variant_of(self, max(self.sliding_window, 0))
        attn_metadata.attend(attn_metadata.trees, query, keys, values, output, self.scale, variant)
        return output


def _int64(values: torch.Tensor) -> LongArray:
    """Integers on the host as an array, which may share their memory."""
    return values.numpy().astype(np.int64, copy=False)


def kv_views(kv_cache: torch.Tensor, isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's cache, declared as `[blocks, heads, block_size, 2 * head_size]`.

    Returns:
        Keys and values as `TreeAttention` takes them, as tiles if `isa` is "amx". A block stores
        its keys before its values.
    """
    blocks, heads, block_size, both = kv_cache.shape
    size = both // 2
    halves = kv_cache.view(blocks, heads, 2, block_size * size)
    keys, values = halves[:, :, 0], halves[:, :, 1]
    if isa == "amx":
        return (
            keys.view(blocks, heads, block_size // 16, size // 2, 16, 2),
            values.view(blocks, heads, size // 16, block_size // 2, 16, 2),
        )
    return keys.view(blocks, heads, size, block_size), values.view(blocks, heads, block_size, size)


def row_views(kv_cache: torch.Tensor, isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's keys and values for `KvMover`, with the elements of a token last.

    The elements of AMX tiles' keys are moved in pairs.
    """
    keys, values = kv_views(kv_cache, isa)
    if isa == "amx":
        return keys.view(torch.int32).transpose(3, 4), values.permute(0, 1, 3, 5, 2, 4)
    return keys.transpose(2, 3), values


def check_kv_layout(
    heads: int, head_size: int, block_size: int, dtype: torch.dtype, isa: str
) -> None:
    """Let the engine write a few rows, and check that `kv_views` finds them.

    Raises:
        RuntimeError: This build of the engine has another layout of its cache.
    """
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([1, block_size - 1, block_size + 5])
    key, value = (
        torch.randn(len(slots), heads, head_size, generator=generator).to(dtype) for _ in range(2)
    )
    cache = torch.zeros(2, heads, block_size, 2 * head_size, dtype=dtype)
    halves = cache.view(2, heads, 2 * block_size, head_size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)
    views = kv_views(cache, isa)
    keys, values = untiled(*views) if isa == "amx" else views
    block, offset = slots // block_size, slots % block_size
    if not (
        torch.equal(keys[block, :, :, offset], key) and torch.equal(values[block, :, offset], value)
    ):
        raise unknown("its CPU KV cache has another layout")
