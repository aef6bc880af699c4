"""What a tree's verification needs of its shape: depths and who is whose ancestor, by pointer
doubling in ceil(log2 N) rounds (tree attention, as in Token Recycling, arXiv 2408.08696, 3.3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tree_kernels._native import NativeFunction
from tree_kernels._triton import jit, next_power_of_2, tl, use_triton

_DEPTHS = NativeFunction("mask.cpp", "depths", "ppiip")
_TREE_MASK = NativeFunction("mask.cpp", "tree_mask", "ppiip")

_BITS = 32


@jit
def _depths_kernel(
    parents: tl.tensor,
    num_nodes: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    ROUNDS: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, PAD)
    valid = nodes < tl.load(num_nodes + request)
    parent = tl.load(parents + request * width + nodes, mask=valid & (nodes < width), other=-1)
    depth = (parent >= 0).to(tl.int32)
    jump = tl.where(parent >= 0, parent, nodes)
    for _ in range(ROUNDS):
        depth += tl.gather(depth, jump, 0)
        jump = tl.gather(jump, jump, 0)
    tl.store(out + request * width + nodes, depth, mask=nodes < width)


@jit
def _ancestors_kernel(
    parents: tl.tensor,
    num_nodes: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    words: tl.tensor,
    ROUNDS: tl.constexpr,
    PAD: tl.constexpr,
    UNPACK: tl.constexpr,
) -> None:
    """One program a request and word: bit j says whether node 32 * word + j is an ancestor."""
    request = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    nodes = tl.arange(0, PAD)
    valid = (nodes < tl.load(num_nodes + request)) & (nodes < width)
    parent = tl.load(parents + request * width + nodes, mask=valid, other=-1)
    jump = tl.where(parent >= 0, parent, nodes)
    own = tl.full([PAD], 1, tl.int32) << (nodes % 32)
    bits = tl.where(valid & (nodes // 32 == word), own, 0)
    for _ in range(ROUNDS):
        bits |= tl.gather(bits, jump, 0)
        jump = tl.gather(jump, jump, 0)
    line = (request * width + nodes).to(tl.int64)
    if UNPACK:
        lanes = tl.arange(0, 32)
        columns = word * 32 + lanes
        seen = (bits[:, None] >> lanes[None, :]) & 1
        inside = (nodes < width)[:, None] & (columns < width)[None, :]
        tl.store(out + line[:, None] * width + columns[None, :], seen.to(tl.int8), mask=inside)
    else:
        tl.store(out + line * words + word, bits, mask=nodes < width)


def _rounds(width: int) -> int:
    return max(width - 1, 0).bit_length()


def _depths_triton(parents: Tensor, num_nodes: Tensor) -> Tensor:
    requests, width = parents.shape
    out = torch.empty(requests, width, dtype=torch.int32, device=parents.device)
    if out.numel():
        _depths_kernel[(requests,)](
            parents.contiguous(),
            num_nodes.contiguous(),
            out,
            width,
            ROUNDS=_rounds(width),
            PAD=next_power_of_2(width),
        )
    return out


def _ancestors_triton(parents: Tensor, num_nodes: Tensor, unpack: bool) -> Tensor:
    requests, width = parents.shape
    words = -(-width // _BITS)
    shape = (requests, width, width if unpack else words)
    dtype = torch.int8 if unpack else torch.int32
    out = torch.empty(shape, dtype=dtype, device=parents.device)
    if out.numel():
        _ancestors_kernel[(requests, words)](
            parents.contiguous(),
            num_nodes.contiguous(),
            out,
            width,
            words,
            ROUNDS=_rounds(width),
            PAD=next_power_of_2(width),
            UNPACK=unpack,
        )
    return out.view(torch.bool) if unpack else out


def _jumps(parents: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which nodes are real [B, N], which of them have a parent, and where each jumps first."""
    nodes = torch.arange(parents.shape[1], device=parents.device)
    valid = nodes < num_nodes[:, None]
    below = valid & (parents >= 0)
    return valid, below, torch.where(below, parents.long(), nodes)


def _depths_reference(parents: Tensor, num_nodes: Tensor) -> Tensor:
    _, below, jump = _jumps(parents, num_nodes)
    depth = below.int()
    for _ in range(_rounds(parents.shape[1])):
        depth = depth + depth.gather(1, jump)
        jump = jump.gather(1, jump)
    return depth


def _bitmask_reference(parents: Tensor, num_nodes: Tensor) -> Tensor:
    requests, width = parents.shape
    words = -(-width // _BITS)
    valid, _, jump = _jumps(parents, num_nodes)
    nodes = torch.arange(width, device=parents.device)
    own = torch.ones_like(nodes, dtype=torch.int32) << (nodes % _BITS).int()
    home = nodes[:, None] // _BITS == torch.arange(words, device=parents.device)
    bits = torch.where(valid[:, :, None] & home, own[:, None], 0).int()
    for _ in range(_rounds(width)):
        bits = bits | bits.gather(1, jump[:, :, None].expand(requests, width, words))
        jump = jump.gather(1, jump)
    return bits


def _tree_mask_reference(parents: Tensor, num_nodes: Tensor) -> Tensor:
    bits = _bitmask_reference(parents, num_nodes)
    lanes = torch.arange(_BITS, dtype=torch.int32, device=parents.device)
    seen = (bits[:, :, :, None] >> lanes) & 1
    return seen.flatten(2)[:, :, : parents.shape[1]].bool()


def _native(fill: Callable[..., None], parents: Tensor, num_nodes: Tensor, out: Tensor) -> Tensor:
    parents, num_nodes = parents.contiguous(), num_nodes.int().contiguous()
    fill(parents.data_ptr(), num_nodes.data_ptr(), *parents.shape, out.data_ptr())
    return out


def _check(parents: Tensor, num_nodes: Tensor) -> None:
    if parents.dim() != 2 or num_nodes.shape != parents.shape[:1]:
        raise ValueError(
            f"parents {[*parents.shape]} must be [B, N], num_nodes {[*num_nodes.shape]} [B]"
        )


def depths(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """The depth of every node, the root's being 0; 0 for padding too.

    parents: int32 [B, N], breadth-first, a root's parent -1; num_nodes: int32 [B]. Returns int32
    [B, N]. Raises ValueError on shapes that do not fit.
    """
    _check(parents, num_nodes)
    if use_triton(parents):
        return _depths_triton(parents, num_nodes)
    if (fill := _DEPTHS.on(parents)) is not None:
        return _native(fill, parents, num_nodes, parents.new_empty(parents.shape))
    return _depths_reference(parents, num_nodes)


def ancestor_bitmask(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """Bit j % 32 of word j // 32 of node i is set when j is i or an ancestor of i.

    parents: int32 [B, N], breadth-first, a root's parent -1; num_nodes: int32 [B]. Returns int32
    [B, N, ceil(N / 32)]; padding rows are zero. Raises ValueError on shapes that do not fit.
    """
    _check(parents, num_nodes)
    if use_triton(parents):
        return _ancestors_triton(parents, num_nodes, unpack=False)
    return _bitmask_reference(parents, num_nodes)


def tree_mask(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """Whether node i attends to node j, that is j is i or an ancestor of i.

    parents: int32 [B, N], breadth-first, a root's parent -1; num_nodes: int32 [B]. Returns bool
    [B, N, N]; padding rows are false. Raises ValueError on shapes that do not fit.
    """
    _check(parents, num_nodes)
    if use_triton(parents):
        return _ancestors_triton(parents, num_nodes, unpack=True)
    if (fill := _TREE_MASK.on(parents)) is not None:
        out = torch.empty(*parents.shape, parents.shape[1], dtype=torch.bool)
        return _native(fill, parents, num_nodes, out)
    return _tree_mask_reference(parents, num_nodes)
