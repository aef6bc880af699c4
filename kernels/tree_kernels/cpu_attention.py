"""Attention of draft trees over a paged KV cache on a CPU: each node sees the context before the
tree, its ancestors and itself."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tree_kernels._native import NativeFunction

_ATTEND = {
    dtype: NativeFunction("cpu_attention.cpp", f"attend_{name}", "pppipippi")
    for dtype, name in (
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
    )
}
_MULTIPLE = 16  # the widest registers' floats


@dataclass(frozen=True)
class PagedTrees:
    """The trees of a step and where their keys and values lie.

    Attributes:
        starts: `int64 [T]`, each tree's first row in the batch of tokens.
        nodes: `int64 [T]`, its nodes, root included; they are neighbours in the batch.
        lengths: `int64 [T]`, the tokens of its context and of the tree.
        blocks: `int32 [T, P]`, its KV blocks in the order of the tokens.
        masks: `bool [T, N, N]`, node i sees node j; `N` is at least every tree's nodes.
    """

    starts: Tensor
    nodes: Tensor
    lengths: Tensor
    blocks: Tensor
    masks: Tensor

    def __post_init__(self) -> None:
        for name, dtype, dims in (
            ("starts", torch.int64, 1),
            ("nodes", torch.int64, 1),
            ("lengths", torch.int64, 1),
            ("blocks", torch.int32, 2),
            ("masks", torch.bool, 3),
        ):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.dim() != dims or len(tensor) != len(self.starts):
                raise ValueError(f"{name} must be {dtype} with {dims} dimensions, one row a tree")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous")


class _Trees(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("nodes", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("blocks_stride", ctypes.c_int64),
        ("masks", ctypes.c_void_p),
        ("most_nodes", ctypes.c_int64),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        ("block_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class TreeAttention:
    """Attends for layers of one shape.

    Args:
        heads: query heads, a multiple of `kv_heads`.
        dtype: of the query, the cache and the output.
        native: False takes the reference, True the kernel in C++ where it can be compiled.

    Raises:
        ValueError: `heads` is no multiple of `kv_heads`.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_size: int,
        block_size: int,
        dtype: torch.dtype,
        native: bool = True,
    ) -> None:
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
        self._heads, self._kv_heads, self._head_size = heads, kv_heads, head_size
        fits = head_size % _MULTIPLE == 0 and block_size % _MULTIPLE == 0 and dtype in _ATTEND
        self._function = _ATTEND[dtype].on(torch.empty(0)) if native and fits else None
        self._shape = _Shape(
            kv_heads=kv_heads,
            group=heads // kv_heads,
            head_size=head_size,
            block_size=block_size,
        )
        self._step: tuple[PagedTrees, _Trees] | None = None

    @property
    def is_native(self) -> bool:
        """Whether the kernel in C++ is used."""
        return self._function is not None

    def __call__(
        self,
        trees: PagedTrees,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        scale: float,
    ) -> None:
        """Write the trees' rows of `output`.

        Args:
            query, output: `[tokens, heads, head_size]`, a token's heads side by side.
            keys: `[blocks, kv_heads, head_size, block_size]`, a head's part contiguous.
            values: `[blocks, kv_heads, block_size, head_size]`, likewise, of the same strides.
            scale: multiplies the scores.
        """
        if self._function is None:
            self._attend_reference(trees, query, keys, values, output, scale)
            return
        if self._step is None or self._step[0] is not trees:
            self._step = trees, _pointers(trees)
        shape = self._shape
        shape.block_stride, shape.head_stride = keys.stride(0), keys.stride(1)
        shape.scale = scale * math.log2(math.e)
        self._function(
            ctypes.addressof(self._step[1]),
            ctypes.addressof(shape),
            query.data_ptr(),
            query.stride(0),
            output.data_ptr(),
            output.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            torch.get_num_threads(),
        )

    def _attend_reference(
        self,
        trees: PagedTrees,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        scale: float,
    ) -> None:
        heads, size, block_size = self._kv_heads, self._head_size, keys.shape[3]
        group = self._heads // heads
        for start, nodes, length, blocks, mask in zip(
            trees.starts.tolist(),
            trees.nodes.tolist(),
            trees.lengths.tolist(),
            trees.blocks.long(),
            trees.masks,
            strict=True,
        ):
            used = blocks[: -(-length // block_size)]
            # The query heads of a group become rows: each KV head is one matrix product.
            q = query[start : start + nodes].view(nodes, heads, group, size).transpose(0, 1)
            k = keys[used].permute(1, 0, 3, 2).reshape(1, heads, -1, size)[:, :, :length]
            v = values[used].transpose(0, 1).reshape(1, heads, -1, size)[:, :, :length]
            sees = torch.ones(nodes, length, dtype=torch.bool)
            sees[:, length - nodes :] = mask[:nodes, :nodes]
            attended = F.scaled_dot_product_attention(
                q.reshape(1, heads, nodes * group, size),
                k,
                v,
                sees.repeat_interleave(group, 0),
                scale=scale,
            )
            rows = output[start : start + nodes].view(nodes, heads, group, size)
            rows.copy_(attended.view(heads, nodes, group, size).transpose(0, 1))


def _pointers(trees: PagedTrees) -> _Trees:
    return _Trees(
        count=len(trees.starts),
        starts=trees.starts.data_ptr(),
        nodes=trees.nodes.data_ptr(),
        lengths=trees.lengths.data_ptr(),
        blocks=trees.blocks.data_ptr(),
        blocks_stride=trees.blocks.shape[1],
        masks=trees.masks.data_ptr(),
        most_nodes=trees.masks.shape[2],
    )
