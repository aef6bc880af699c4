"""The depths and the ancestor masks of trees (Token Recycling, arXiv 2408.08696, section 3.3).

Triton and PyTorch compute them by pointer doubling, in ceil(log2 N) rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, next_power_of_2, tl

_DEPTHS = CppFunction("mask.cpp", "depths", "ppiip")
_TREE_MASK = CppFunction("mask.cpp", "tree_mask", "ppiip")


@jit
def _depths_kernel(
    parents: tl.tensor,
    tree_size: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    ROUNDS: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, PAD)
    valid = nodes < tl.load(tree_size + request)
    parent = tl.load(parents + request * width + nodes, mask=valid & (nodes < width), other=-1)
    depth = (parent >= 0).to(tl.int32)
    jump = tl.where(parent >= 0, parent, nodes)
    for _ in range(ROUNDS):
        depth += tl.gather(depth, jump, 0)
        jump = tl.gather(jump, jump, 0)
    tl.store(out + request * width + nodes, depth, mask=nodes < width)


@jit
def store_mask(
    out: tl.tensor,
    jump: tl.tensor,
    valid: tl.tensor,
    word: tl.tensor,
    width: tl.tensor,
    ROUNDS: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    """Write 32 columns of a tree's mask, from column 32 * `word` on.

    Bit j of `bits` says whether node 32 * word + j is an ancestor.

    Args:
        out: The mask.
        jump: The parent of each node; the node itself if it has none.
        valid: Which columns are nodes, `[PAD]`; the other rows are false.
    """
    nodes = tl.arange(0, PAD)
    own = tl.full([PAD], 1, tl.int32) << (nodes % 32)
    bits = tl.where(valid & (nodes // 32 == word), own, 0)
    for _ in range(ROUNDS):
        bits |= tl.gather(bits, jump, 0)
        jump = tl.gather(jump, jump, 0)
    lanes = tl.arange(0, 32)
    columns = word * 32 + lanes
    seen = (bits[:, None] >> lanes[None, :]) & 1
    inside = (nodes < width)[:, None] & (columns < width)[None, :]
    tl.store(out + nodes[:, None] * width + columns[None, :], seen.to(tl.int8), mask=inside)


@jit
def _tree_mask_kernel(
    parents: tl.tensor,
    tree_size: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    ROUNDS: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    """Write a mask; one program per request and word."""
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, PAD)
    valid = (nodes < tl.load(tree_size + request)) & (nodes < width)
    parent = tl.load(parents + request * width + nodes, mask=valid, other=-1)
    jump = tl.where(parent >= 0, parent, nodes)
    here = out + request * width * width
    store_mask(here, jump, valid, tl.program_id(1), width, ROUNDS, PAD)


def _rounds(width: int) -> int:
    return max(width - 1, 0).bit_length()


def _depths_triton(parents: Tensor, tree_size: Tensor) -> Tensor:
    requests, width = parents.shape
    out = torch.empty(requests, width, dtype=torch.int32, device=parents.device)
    if out.numel():
        _depths_kernel[(requests,)](
            parents.contiguous(),
            tree_size.contiguous(),
            out,
            width,
            ROUNDS=_rounds(width),
            PAD=next_power_of_2(width),
        )
    return out


def _tree_mask_triton(parents: Tensor, tree_size: Tensor) -> Tensor:
    requests, width = parents.shape
    out = torch.empty(requests, width, width, dtype=torch.int8, device=parents.device)
    if out.numel():
        _tree_mask_kernel[(requests, -(-width // 32))](
            parents.contiguous(),
            tree_size.contiguous(),
            out,
            width,
            ROUNDS=_rounds(width),
            PAD=next_power_of_2(width),
        )
    return out.view(torch.bool)


def _jumps(parents: Tensor, tree_size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three tensors `[B, N]`: whether a column is a node, whether it also has a parent, and its
    parent, or the column itself if it has none."""
    nodes = torch.arange(parents.shape[1], device=parents.device)
    valid = nodes < tree_size[:, None]
    below = valid & (parents >= 0)
    return valid, below, torch.where(below, parents.long(), nodes)


def depths_reference(parents: Tensor, tree_size: Tensor) -> Tensor:
    _, below, jump = _jumps(parents, tree_size)
    depth = below.int()
    for _ in range(_rounds(parents.shape[1])):
        depth = depth + depth.gather(1, jump)
        jump = jump.gather(1, jump)
    return depth


def _tree_mask_reference(parents: Tensor, tree_size: Tensor) -> Tensor:
    width = parents.shape[1]
    valid, _, jump = _jumps(parents, tree_size)
    seen = torch.eye(width, dtype=torch.bool, device=parents.device) & valid[:, :, None]
    for _ in range(_rounds(width)):
        seen = seen | seen.gather(1, jump[:, :, None].expand_as(seen))
        jump = jump.gather(1, jump)
    return seen


def _depths_cpp(parents: Tensor, tree_size: Tensor) -> Tensor:
    return _fill(_DEPTHS, parents, tree_size, parents.new_empty(parents.shape))


def _tree_mask_cpp(parents: Tensor, tree_size: Tensor) -> Tensor:
    out = parents.new_empty(*parents.shape, parents.shape[1], dtype=torch.bool)
    return _fill(_TREE_MASK, parents, tree_size, out)


def _fill(function: CppFunction, parents: Tensor, tree_size: Tensor, out: Tensor) -> Tensor:
    parents, tree_size = parents.contiguous(), tree_size.int().contiguous()
    function.call(parents.data_ptr(), tree_size.data_ptr(), *parents.shape, out.data_ptr())
    return out


_DEPTHS_OP = Op(
    "mask.depths", depths_reference, triton=_depths_triton, cpp=_depths_cpp, needs=_DEPTHS
)
_TREE_MASK_OP = Op(
    "mask.tree_mask",
    _tree_mask_reference,
    triton=_tree_mask_triton,
    cpp=_tree_mask_cpp,
    needs=_TREE_MASK,
)


def _check(parents: Tensor, tree_size: Tensor) -> None:
    if parents.dim() != 2 or tree_size.shape != parents.shape[:1]:
        raise ValueError(
            f"parents {[*parents.shape]} must be [B, N], tree_size {[*tree_size.shape]} [B]"
        )


def depths(parents: Tensor, tree_size: Tensor) -> Tensor:
    """The depth of every node.

    Args:
        parents: Int32 `[B, N]`, the columns of the nodes' parents in breadth-first order, -1 for a
            root.
        tree_size: Int32 `[B]`, the number of nodes of each tree, including the root.

    Returns:
        Int32 `[B, N]`, 0 for the root and for padding.

    Raises:
        ValueError: Shapes do not fit.
    """
    _check(parents, tree_size)
    return _DEPTHS_OP.on(parents)(parents, tree_size)


def tree_mask(parents: Tensor, tree_size: Tensor) -> Tensor:
    """The ancestor masks of trees: node i attends to node j if j is i or an ancestor of i.

    Args:
        parents: Int32 `[B, N]`, the columns of the nodes' parents in breadth-first order, -1 for a
            root.
        tree_size: Int32 `[B]`, the number of nodes of each tree, including the root.

    Returns:
        Bool `[B, N, N]`; rows of padding are false.

    Raises:
        ValueError: Shapes do not fit.
    """
    _check(parents, tree_size)
    return _TREE_MASK_OP.on(parents)(parents, tree_size)
