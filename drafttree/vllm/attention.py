"""Tree attention on vLLM's CPU backend.

Rows of a draft tree see the context, their ancestors and themselves. The engine's CPU kernel
knows causal masks only, so it serves prefill and undrafted rows, and trees are served here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from vllm import _custom_ops as ops
from vllm.v1.attention import selector
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

ISA = "vec"
"""The KV layout that `kv_views` reads. The engine may prefer AMX tiles, whose packing it does not
publish; the builder then falls back to this one."""


@dataclass(frozen=True)
class TreeRows:
    """One request's tree in the batch.

    Attributes:
        request: its row in the batch.
        mask: `bool [n, n]`: node i sees node j; the n nodes are the request's last n tokens.
    """

    request: int
    mask: torch.Tensor


@dataclass
class TreeAttention:
    """Where one tree's rows and keys lie.

    Attributes:
        start, end: its rows in the batch of tokens.
        blocks: `int64 [P / block_size]`, its KV blocks.
        bias: `[1, 1, n * G, P]` additive mask, `G` query heads to a KV head.
    """

    start: int
    end: int
    blocks: torch.Tensor
    bias: torch.Tensor


@dataclass
class TreeAttentionMetadata(CPUAttentionMetadata):
    """The engine's metadata and the batch's trees."""

    trees: tuple[TreeAttention, ...] = ()
    only_trees: bool = False


class TreeAttentionBackend(CPUAttentionBackend):
    """Stands in for the CPU backend, under its name, while a model is loaded for our runner."""

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        """The layer's part."""
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeAttentionMetadataBuilder]:
        """The step's part."""
        return TreeAttentionMetadataBuilder


@contextmanager
def tree_attention_backend() -> Iterator[None]:
    """Let the attention layers that are built inside use `TreeAttentionBackend`.

    The engine picks the CPU backend whatever is asked for, so the override stands under that
    name, and only while the layers are built: other engines of the process keep the stock one.
    """
    backend = AttentionBackendEnum.CPU_ATTN
    before = backend.get_path() if backend.is_overridden() else None
    register_backend(backend, f"{__name__}.{TreeAttentionBackend.__name__}")
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


class TreeAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Adds to the step's metadata the masks of its trees."""

    isa: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.isa != ISA:
            self.isa = ISA
            self._set_isa_to_layers(self.layer_names)
        check_kv_layout(self.num_kv_heads, self.block_size, self.head_dim, self.dtype)
        self.step_trees: tuple[TreeRows, ...] = ()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TreeAttentionMetadata:
        """Build the step's metadata; `step_trees` must be the step's."""
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        starts = common_attn_metadata.query_start_loc_cpu.tolist()
        lengths = common_attn_metadata.seq_lens.tolist()
        trees = tuple(
            self._place(tree, starts[tree.request + 1], lengths[tree.request], stock.block_table)
            for tree in self.step_trees
        )
        rows = sum(tree.end - tree.start for tree in trees)
        return TreeAttentionMetadata(
            **vars(stock), trees=trees, only_trees=rows == stock.num_actual_tokens
        )

    def _place(
        self, tree: TreeRows, end: int, length: int, block_table: torch.Tensor
    ) -> TreeAttention:
        nodes = tree.mask.shape[0]
        num_blocks = -(-length // self.block_size)
        bias = torch.full((nodes, num_blocks * self.block_size), float("-inf"), dtype=self.dtype)
        bias[:, : length - nodes] = 0
        bias[:, length - nodes : length].masked_fill_(tree.mask, 0)
        return TreeAttention(
            start=end - nodes,
            end=end,
            blocks=block_table[tree.request, :num_blocks].long(),
            bias=bias.repeat_interleave(self.num_heads // self.num_kv_heads, 0)[None, None],
        )


class TreeAttentionImpl(CPUAttentionBackendImpl):
    """The engine's kernel for causal rows, masked attention for tree rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for found, feature in (
            (self.sliding_window != -1, f"sliding window ({self.sliding_window})"),
            (self.alibi_slopes is not None, "ALiBi slopes"),
            (self.logits_soft_cap != 0, f"logits soft cap ({self.logits_soft_cap})"),
            (self.sinks is not None, "attention sinks"),
            (self.kv_sharing_target_layer_name is not None, "KV shared between layers"),
        ):
            if found:
                raise ValueError(
                    f"draft trees do not work with this model's attention: {feature}. "
                    "Leave the speculative method out."
                )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TreeAttentionMetadata | None,
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
        if attn_metadata is None or not attn_metadata.trees:
            return output
        keys, values = kv_views(kv_cache)
        for tree in attn_metadata.trees:
            self._attend(tree, query, keys, values, output)
        return output

    def _attend(
        self,
        tree: TreeAttention,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        nodes = tree.end - tree.start
        groups, heads, size = self.num_queries_per_kv, self.num_kv_heads, self.head_size
        span = tree.bias.shape[-1]
        # The query heads of a group become rows, so that each KV head is one matrix product.
        q = query[tree.start : tree.end].view(nodes, heads, groups, size).transpose(0, 1)
        k = keys.index_select(0, tree.blocks).permute(1, 0, 3, 2).reshape(1, heads, span, size)
        v = values.index_select(0, tree.blocks).transpose(0, 1).reshape(1, heads, span, size)
        attended = F.scaled_dot_product_attention(
            q.reshape(1, heads, nodes * groups, size), k, v, tree.bias, scale=self.scale
        )
        rows = output[tree.start : tree.end].view(nodes, heads, groups, size)
        rows.copy_(attended.view(heads, nodes, groups, size).transpose(0, 1))


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
