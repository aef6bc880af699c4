"""Draft trees out of the adjacency matrix: Algorithm 1 of Token Recycling (arXiv 2408.08696,
section 3.3), and the trees without the nodes for which the matrix had no candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tree_kernels._native import NativeFunction
from tree_kernels._triton import jit, next_power_of_2, tl, use_triton

_GATHER = NativeFunction("gather.cpp", "gather", "piipippip")
_COMPACT = NativeFunction("gather.cpp", "compact", "ppiiipppp")


@jit
def _gather_kernel(
    matrix: tl.tensor,
    roots: tl.tensor,
    parents: tl.tensor,
    ranks: tl.tensor,
    out: tl.tensor,
    vocab: tl.tensor,
    matrix_stride: tl.tensor,
    num_nodes: tl.tensor,
    LEVELS: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    """One program a request: its whole tree lives in registers, so levels need no barrier."""
    request = tl.program_id(0)
    nodes = tl.arange(0, PAD)
    inside = (nodes < num_nodes) & (nodes > 0)
    parent = tl.load(parents + nodes, mask=inside, other=0)
    rank = tl.load(ranks + nodes, mask=inside, other=0)
    depth = tl.where(nodes > 0, -1, 0)
    token = tl.where(nodes > 0, -1, tl.load(roots + request).to(tl.int32))
    for level in range(1, LEVELS):
        above = tl.gather(token, parent, 0)
        here = inside & (depth < 0) & (tl.gather(depth, parent, 0) == level - 1)
        known = here & (above >= 0) & (above < vocab)
        source = matrix + above.to(tl.int64) * matrix_stride + rank
        token = tl.where(here, tl.load(source, mask=known, other=-1), token)
        depth = tl.where(here, level, depth)
    tl.store(out + request.to(tl.int64) * num_nodes + nodes, token, mask=nodes < num_nodes)


@jit
def _compact_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    out_tokens: tl.tensor,
    out_parents: tl.tensor,
    out_nodes: tl.tensor,
    num_nodes: tl.tensor,
    parents_stride: tl.tensor,
    PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, PAD)
    inside = nodes < num_nodes
    token = tl.load(tokens + request * num_nodes + nodes, mask=inside, other=-1)
    parent = tl.load(parents + request * parents_stride + nodes, mask=inside, other=-1)
    keep = token != -1
    count = tl.sum(keep.to(tl.int32), 0)
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    above = tl.where(parent < 0, -1, tl.gather(place, tl.maximum(parent, 0), 0))
    # What lies past the kept nodes is filled by the dropped ones: every cell has one writer.
    place = tl.where(keep, place, count + nodes - place - 1)
    here = request * num_nodes + place
    tl.store(out_tokens + here, token, mask=inside)
    tl.store(out_parents + here, tl.where(keep, above, -1), mask=inside)
    tl.store(out_nodes + request, count)


def _gather_triton(
    matrix: Tensor, roots: Tensor, parents: Tensor, ranks: Tensor, level_ends: Sequence[int]
) -> Tensor:
    requests, nodes = roots.shape[0], parents.shape[0]
    out = torch.empty(requests, nodes, dtype=torch.int32, device=matrix.device)
    if requests == 0:
        return out
    _gather_kernel[(requests,)](
        matrix,
        roots.contiguous(),
        parents.contiguous(),
        ranks.contiguous(),
        out,
        matrix.shape[0],
        matrix.stride(0),
        nodes,
        LEVELS=len(level_ends),
        PAD=next_power_of_2(nodes),
    )
    return out


def _compact_triton(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    requests, nodes = tokens.shape
    tokens, parents = tokens.contiguous(), parents.contiguous()
    out_tokens = torch.empty_like(tokens)
    out_parents = torch.empty_like(tokens)
    num_nodes = torch.empty(requests, dtype=torch.int32, device=tokens.device)
    if requests == 0:
        return out_tokens, out_parents, num_nodes
    _compact_kernel[(requests,)](
        tokens,
        parents,
        out_tokens,
        out_parents,
        num_nodes,
        nodes,
        parents.stride(0) if parents.dim() == 2 else 0,
        PAD=next_power_of_2(nodes),
    )
    return out_tokens, out_parents, num_nodes


def _gather_reference(
    matrix: Tensor, roots: Tensor, parents: Tensor, ranks: Tensor, level_ends: Sequence[int]
) -> Tensor:
    vocab, k = matrix.shape
    out = roots.new_full((roots.shape[0], parents.shape[0]), -1, dtype=torch.int32)
    out[:, 0] = roots
    cells = matrix.view(-1)
    for start, end in pairwise(level_ends):
        above = out[:, parents[start:end].long()].long()
        cell = above.clamp(0, vocab - 1) * k + ranks[start:end]
        known = (above >= 0) & (above < vocab)
        out[:, start:end] = cells[cell].masked_fill(~known, -1)
    return out


def _compact_reference(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    requests, nodes = tokens.shape
    keep = tokens != -1
    place = keep.cumsum(1) - 1
    parents = parents.expand(requests, nodes).long()
    above = place.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, -1).int()
    # Dropped nodes go to a column of their own, which is cut off.
    place = place.masked_fill(~keep, nodes)
    padding = tokens.new_full((requests, nodes + 1), -1)
    out_tokens = padding.scatter(1, place, tokens)[:, :nodes]
    out_parents = padding.scatter(1, place, above)[:, :nodes]
    return out_tokens.contiguous(), out_parents.contiguous(), keep.sum(1, dtype=torch.int32)


def _gather_native(
    gather: Callable[..., None], matrix: Tensor, roots: Tensor, parents: Tensor, ranks: Tensor
) -> Tensor:
    roots, parents, ranks = roots.int().contiguous(), parents.contiguous(), ranks.contiguous()
    out = torch.empty(roots.shape[0], parents.shape[0], dtype=torch.int32)
    gather(
        *(matrix.data_ptr(), *matrix.shape, roots.data_ptr(), roots.shape[0]),
        *(parents.data_ptr(), ranks.data_ptr(), parents.shape[0], out.data_ptr()),
    )
    return out


def _compact_native(
    compact: Callable[..., None], tokens: Tensor, parents: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, parents = tokens.contiguous(), parents.contiguous()
    out_tokens, out_parents = torch.empty_like(tokens), torch.empty_like(tokens)
    num_nodes = torch.empty(tokens.shape[0], dtype=torch.int32)
    places = torch.empty(tokens.shape[1], dtype=torch.int32)
    compact(
        *(tokens.data_ptr(), parents.data_ptr(), parents.stride(0) if parents.dim() == 2 else 0),
        *(*tokens.shape, out_tokens.data_ptr(), out_parents.data_ptr()),
        *(num_nodes.data_ptr(), places.data_ptr()),
    )
    return out_tokens, out_parents, num_nodes


def gather_tree(
    matrix: Tensor, roots: Tensor, parents: Tensor, ranks: Tensor, level_ends: Sequence[int]
) -> Tensor:
    """The tokens of a static tree: node i takes candidate ranks[i] of its parent's token.

    matrix: int32 [V, k], contiguous; roots: int32 or int64 [B]; parents, ranks: int32 [N], nodes
    breadth-first with the root as node 0; level_ends[d]: the number of nodes of depth <= d.
    Returns int32 [B, N]. An entry of -1, or a token outside [0, V), gives -1 at all nodes below.
    Raises ValueError on shapes that do not fit (Algorithm 1, arXiv 2408.08696).
    """
    if not matrix.is_contiguous():
        raise ValueError("matrix must be contiguous")
    if parents.dim() != 1 or parents.shape != ranks.shape:
        raise ValueError(f"parents {[*parents.shape]} and ranks {[*ranks.shape]} must both be [N]")
    if not level_ends or level_ends[0] != 1 or level_ends[-1] != parents.shape[0]:
        raise ValueError(f"level_ends must lead from 1 to {parents.shape[0]}, not {[*level_ends]}")
    if use_triton(matrix):
        return _gather_triton(matrix, roots, parents, ranks, level_ends)
    if (gather := _GATHER.on(matrix)) is not None:
        return _gather_native(gather, matrix, roots, parents, ranks)
    return _gather_reference(matrix, roots, parents, ranks, level_ends)


def compact_tree(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Trees without the nodes whose token is -1, the others in their order.

    tokens: int32 [B, N]; parents: int32 [N] or [B, N]. Everything below a node of token -1 must
    be -1 too, as in `gather_tree`'s answer. Returns tokens [B, N], parents [B, N] (both padded with
    -1; a root's parent is -1) and the number of nodes [B], all int32.
    Raises ValueError on shapes that do not fit (arXiv 2408.08696, section 3.3, drafts zeros here).
    """
    if tokens.dim() != 2 or parents.shape not in (tokens.shape, tokens.shape[1:]):
        raise ValueError(f"parents {[*parents.shape]} do not fit tokens {[*tokens.shape]}")
    if use_triton(tokens):
        return _compact_triton(tokens, parents)
    if (compact := _COMPACT.on(tokens)) is not None:
        return _compact_native(compact, tokens, parents)
    return _compact_reference(tokens, parents)
