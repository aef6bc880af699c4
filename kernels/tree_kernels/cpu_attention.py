"""Tree attention over a paged KV cache on a CPU (Token Recycling, arXiv 2408.08696, section 3.3).

Each node attends to the context before the tree, its ancestors and itself, or to those of them that
lie in its window.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels.attention_variant import PLAIN, AttentionVariant
from tree_kernels.paged_trees import PagedTrees, TreePointers, pointers_of

_ATTEND = {
    dtype: CppFunction("cpu_attention.cpp", f"attend_{name}", "ppppipippi")
    for dtype, name in (
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
    )
}
_ATTEND_TILES = CppFunction("cpu_attention.cpp", "attend_tiles", "ppppipippi")
_MULTIPLE = 16  # float32 values in the widest vector register
_TILE = 32  # bfloat16 values in a row of an AMX tile


@dataclass(frozen=True)
class DecodeOrder:
    """How an engine's CPU kernel sums the keys of a row when it decodes one token of each request.

    The C++ kernel then rounds the row of a node as the engine rounds that of the same text in plain
    decoding, in a step of the same requests with as many tokens more each. The engine's kernel must
    be one of vLLM's for AVX-512, whose arithmetic is followed in any case.

    Attributes:
        unit: Tokens that the engine's kernel reads at a time, a multiple of 16.
        least_share: The fewest tokens of a request that one thread takes over from another; 0 if a
            request's keys are not shared among threads.
        tile: Tokens that are compared with a running maximum at once, a multiple of `unit`.
        window: Number of positions of each request that the threads share; 0 for all.
    """

    unit: int
    least_share: int
    tile: int
    window: int = 0


class _Order(ctypes.Structure):
    _fields_ = (
        ("unit", ctypes.c_int64),
        ("least_share", ctypes.c_int64),
        ("tile", ctypes.c_int64),
        ("window", ctypes.c_int64),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        ("block_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class TreeAttention:
    """Tree attention for layers of one shape.

    Args:
        heads: Number of query heads, a multiple of `kv_heads`.
        kv_heads: Number of KV heads.
        head_size: Size of a head. The C++ kernel needs a multiple of 16.
        block_size: Tokens in a KV block. The C++ kernel needs 1 or a multiple of 16.
        dtype: Element type of the query, the cache and the output: float32, bfloat16 or float16.
        value_size: Size of a value, if not that of a head; the C++ kernel needs the same.
        order: The engine's order of summation, by which the C++ kernel rounds; None for any order.
        tiles: Whether keys and values are stored as AMX tiles. The C++ kernel needs what
            `tiles_fit` checks.

    Raises:
        ValueError: `heads` is not a multiple of `kv_heads`.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_size: int,
        block_size: int,
        dtype: torch.dtype,
        value_size: int | None = None,
        order: DecodeOrder | None = None,
        tiles: bool = False,
    ) -> None:
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
        fits = (
            head_size % _MULTIPLE == 0
            and (block_size == 1 or block_size % _MULTIPLE == 0)
            and value_size in (None, head_size)
            and dtype in _ATTEND
        )
        if tiles:
            fits = fits and tiles_fit(heads, kv_heads, head_size, block_size, dtype)
        self._attend = _TREE_ATTENTION.on_cpu if fits else _attend_reference
        self.kernel = _ATTEND_TILES if tiles else _ATTEND.get(dtype)
        self.tiles = tiles
        self.shape = _Shape(
            kv_heads=kv_heads,
            group=heads // kv_heads,
            head_size=head_size,
            block_size=block_size,
        )
        given = (0, 0, 0, 0)
        if order is not None:
            given = order.unit, order.least_share, order.tile, order.window
        self.order = _Order(*given)
        self.step: tuple[PagedTrees, TreePointers, tuple[Tensor, Tensor]] | None = None

    @property
    def is_cpp(self) -> bool:
        """Whether the C++ kernel runs for this shape."""
        return self._attend is _attend_cpp

    def __call__(
        self,
        trees: PagedTrees,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        scale: float,
        variant: AttentionVariant = PLAIN,
    ) -> None:
        """Attend for the rows of the trees.

        Args:
            trees: The trees of the step.
            query: `[tokens, heads, head_size]`, the heads of a token contiguous.
            keys: `[blocks, kv_heads, head_size, block_size]`, each head of a block contiguous. As
                tiles `[blocks, kv_heads, block_size / 16, head_size / 2, 16, 2]`: adjacent elements
                of 16 tokens.
            values: `[blocks, kv_heads, block_size, value_size]`, each head of a block contiguous,
                with the strides of the keys between blocks and between heads. As tiles
                `[blocks, kv_heads, value_size / 16, block_size / 2, 16, 2]`: 16 elements of
                adjacent tokens.
            output: `[tokens, heads, value_size]`, written in the rows of the trees only.
            scale: Factor of the attention scores.
            variant: How the layer's attention differs from softmax attention to all tokens.
        """
        self._attend(self, trees, query, keys, values, output, scale, variant)


def _attend_reference(
    layer: TreeAttention,
    trees: PagedTrees,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    scale: float,
    variant: AttentionVariant = PLAIN,
) -> None:
    if layer.tiles:
        keys, values = untiled(keys, values)
    heads, size, block_size = layer.shape.kv_heads, layer.shape.head_size, keys.shape[3]
    group, value_size = layer.shape.group, values.shape[3]
    firsts = trees.first_nodes
    one = trees.masks.new_ones(1, 1)
    for start, tree_size, length, blocks, mask, first in zip(
        trees.starts.tolist(),
        trees.tree_sizes.tolist(),
        trees.lengths.tolist(),
        trees.blocks.long(),
        (*trees.masks, *[one] * (len(trees.starts) - len(trees.masks))),
        [0] * len(trees.starts) if firsts is None else firsts.tolist(),
        strict=True,
    ):
        used = blocks[: -(-length // block_size)]
        # The query heads of a group become rows, so each KV head takes one matrix product.
        count = tree_size - first
        here = slice(start + first, start + tree_size)
        q = query[here].view(count, heads, group, size).transpose(0, 1)
        k = keys[used].permute(1, 0, 3, 2).reshape(1, heads, -1, size)[:, :, :length]
        v = values[used].transpose(0, 1).reshape(1, heads, -1, value_size)[:, :, :length]
        sees = torch.ones(tree_size, length, dtype=torch.bool, device=query.device)
        among = mask[:tree_size, :tree_size]
        sees[:, length - tree_size :] = among
        if variant.window:
            depth = among.sum(1) - 1
            before = torch.arange(length - tree_size, device=depth.device) - (length - tree_size)
            sees &= torch.cat((before, depth)) > depth[:, None] - variant.window
        sees = sees[first:]
        rows = output[here].view(count, heads, group, value_size)
        if not variant.is_plain:
            q = q.permute(0, 2, 1, 3).flatten(0, 1).float()
            k, v = (each[0].repeat_interleave(group, 0).float() for each in (k, v))
            weights, _ = variant.weights(q @ k.transpose(1, 2) * scale, ~sees)
            attended = (weights @ v).to(output.dtype).view(heads, group, count, value_size)
            rows.copy_(attended.permute(2, 0, 1, 3))
            continue
        attended = F.scaled_dot_product_attention(
            q.reshape(1, heads, count * group, size),
            k,
            v,
            sees.repeat_interleave(group, 0),
            scale=scale,
        )
        rows.copy_(attended.view(heads, count, group, value_size).transpose(0, 1))


def _attend_cpp(
    layer: TreeAttention,
    trees: PagedTrees,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    scale: float,
    variant: AttentionVariant = PLAIN,
) -> None:
    if layer.step is None or layer.step[0] is not trees:
        requests, lengths = trees.requests, trees.step_lengths
        if requests is None or lengths is None:
            requests = torch.arange(len(trees.starts))
            lengths = trees.lengths - trees.tree_sizes + 1
        layer.step = trees, pointers_of(trees, requests, lengths), (requests, lengths)
    shape = layer.shape
    shape.block_stride, shape.head_stride = keys.stride(0), keys.stride(1)
    shape.scale, shape.soft_cap, shape.window = scale, variant.soft_cap, variant.window
    sinks = None if variant.sinks is None else variant.sinks.float()
    shape.sinks = None if sinks is None else sinks.data_ptr()
    assert layer.kernel is not None
    layer.kernel.call(
        ctypes.addressof(layer.step[1]),
        ctypes.addressof(shape),
        ctypes.addressof(layer.order),
        query.data_ptr(),
        query.stride(0),
        output.data_ptr(),
        output.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        torch.get_num_threads(),
    )


def tiles_fit(
    heads: int, kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype
) -> bool:
    """Whether the C++ kernel computes a layer whose keys and values are stored as AMX tiles.

    It asks Linux for this process's permission to use tile registers; asking again does no harm.
    """
    group = heads // kv_heads
    return (
        dtype == torch.bfloat16
        and head_size % _TILE == 0
        and block_size % _TILE == 0
        and (group <= _MULTIPLE or group % _MULTIPLE == 0)
        and _TREE_ATTENTION.on_cpu is _attend_cpp
        and _ATTEND_TILES.is_available
        and torch.cpu._is_amx_tile_supported()
        and torch.cpu._init_amx()
    )


def untiled(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of keys and values that are stored as AMX tiles.

    Returns:
        Keys `[blocks, kv_heads, head_size, block_size]` and values `[blocks, kv_heads, block_size,
        value_size]`.
    """
    keys, values = (
        each.permute(0, 1, 3, 5, 2, 4).flatten(2, 3).flatten(3, 4) for each in (keys, values)
    )
    return keys, values


_TREE_ATTENTION = Op(
    "cpu_attention.TreeAttention",
    _attend_reference,
    cpp=_attend_cpp,
    needs=_ATTEND[torch.float32],
)
