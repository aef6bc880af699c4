"""The ancestor masks of a batch as `tree_attention` reads them: one bit for each node."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import Op
from tree_kernels._triton import jit, next_power_of_2, tl

_BITS = 32


@jit
def _mask_rows_kernel(
    masks: tl.tensor,
    starts: tl.tensor,
    tree_sizes: tl.tensor,
    first_nodes: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    words: tl.tensor,
    out_stride: tl.tensor,
    IN_PARTS: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    """Write the row of a node; one program per node."""
    tree = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1)
    first = tl.load(first_nodes + tree) if IN_PARTS else 0
    if (node < first) | (node >= tl.load(tree_sizes + tree)):
        return
    word = tl.arange(0, PAD)
    bit = tl.arange(0, 32)
    column = word[:, None] * 32 + bit[None, :]
    line = masks + (tree * width + node) * width
    seen = tl.load(line + column, mask=column < width, other=0).to(tl.int32)
    row = (tl.load(starts + tree) + node).to(tl.int64)
    tl.store(out + row * out_stride + word, tl.sum(seen << bit[None, :], 1), mask=word < words)


def _mask_rows_triton(
    masks: Tensor,
    starts: Tensor,
    tree_sizes: Tensor,
    out: Tensor,
    first_nodes: Tensor | None = None,
) -> None:
    trees, width, _ = masks.shape
    words = out.shape[1]
    if masks.numel() == 0:
        return
    _mask_rows_kernel[(trees, width)](
        masks.contiguous().view(torch.int8),
        *(starts.contiguous(), tree_sizes.contiguous()),
        tree_sizes if first_nodes is None else first_nodes.contiguous(),
        *(out, width, words, out.stride(0)),
        IN_PARTS=first_nodes is not None,
        PAD=next_power_of_2(words),
    )


def _mask_rows_reference(
    masks: Tensor,
    starts: Tensor,
    tree_sizes: Tensor,
    out: Tensor,
    first_nodes: Tensor | None = None,
) -> None:
    trees, width, _ = masks.shape
    words = out.shape[1]
    bits = masks.new_zeros(trees, width, words * _BITS, dtype=torch.int32)
    bits[:, :, :width] = masks
    lanes = torch.arange(_BITS, dtype=torch.int32, device=masks.device)
    packed = (bits.view(trees, width, words, _BITS) << lanes).sum(3, dtype=torch.int32)
    places = torch.arange(width, device=masks.device)
    # On a GPU, selecting by mask waits for the device; decode steps there use the Triton kernel.
    real = places < tree_sizes[:, None]
    if first_nodes is not None:
        real &= places >= first_nodes[:, None]
    out[(starts[:, None] + places)[real]] = packed[real]


_MASK_ROWS = Op("mask_rows.mask_rows", _mask_rows_reference, triton=_mask_rows_triton)


def mask_rows(
    masks: Tensor,
    starts: Tensor,
    tree_sizes: Tensor,
    out: Tensor,
    first_nodes: Tensor | None = None,
) -> None:
    """Write the masks of the trees' nodes into their rows of the batch; other rows stay unchanged.

    Args:
        masks: Bool `[B, N, N]`, whether node i attends to node j.
        starts: Integers `[B]`, the row of each root in the batch; the nodes of a tree are adjacent.
        tree_sizes: Integers `[B]`, the number of nodes of each tree, including the root; at most N.
        out: Int32 `[T, W]` with W >= ceil(N / 32), written in place: bit j % 32 of word j // 32 of
            a row says that it attends to node j.
        first_nodes: Integers `[B]`, the first node of each tree that has a row in the batch; those
            before it have none, and `starts` may be negative. None for the roots.

    Raises:
        ValueError: Shapes, types or strides do not fit.
    """
    if (
        masks.dim() != 3
        or masks.shape[1] != masks.shape[2]
        or starts.shape != masks.shape[:1]
        or tree_sizes.shape != masks.shape[:1]
        or (first_nodes is not None and first_nodes.shape != masks.shape[:1])
        or out.dim() != 2
        or out.shape[1] * _BITS < masks.shape[1]
    ):
        shapes = [[*tensor.shape] for tensor in (masks, starts, tree_sizes, out)]
        raise ValueError(f"expected [B, N, N], [B], [B] and [T, ceil(N / 32)], not {shapes}")
    if masks.dtype != torch.bool or out.dtype != torch.int32 or out.stride(1) != 1:
        raise ValueError("masks must be bool, and out must be int32 with contiguous rows")
    _MASK_ROWS.on(masks)(masks, starts, tree_sizes, out, first_nodes)
