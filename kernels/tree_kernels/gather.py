"""Static trees filled from the adjacency matrix (Token Recycling, arXiv 2408.08696, algorithm 1),
and their compaction: nodes for which the matrix has no candidate are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, next_power_of_2, tl

_GATHER = CppFunction("gather.cpp", "gather", "piipippip")
_COMPACT = CppFunction("gather.cpp", "compact", "ppiiippppp")


@jit
def _gather_kernel(
    matrix: tl.tensor,
    roots: tl.tensor,
    parents: tl.tensor,
    ranks: tl.tensor,
    out: tl.tensor,
    vocab: tl.tensor,
    matrix_stride: tl.tensor,
    tree_size: tl.tensor,
    LEVELS: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    """Fill a tree; one program per request. It is in registers, so levels need no barrier."""
    request = tl.program_id(0)
    nodes = tl.arange(0, PAD)
    inside = (nodes < tree_size) & (nodes > 0)
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
    tl.store(out + request.to(tl.int64) * tree_size + nodes, token, mask=nodes < tree_size)


@jit
def _compact_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    out_tokens: tl.tensor,
    out_parents: tl.tensor,
    out_tree_size: tl.tensor,
    out_columns: tl.tensor,
    width: tl.tensor,
    parents_stride: tl.tensor,
    PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, PAD)
    inside = nodes < width
    token = tl.load(tokens + request * width + nodes, mask=inside, other=-1)
    parent = tl.load(parents + request * parents_stride + nodes, mask=inside, other=-1)
    keep = token != -1
    count = tl.sum(keep.to(tl.int32), 0)
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    above = tl.where(parent < 0, -1, tl.gather(place, tl.maximum(parent, 0), 0))
    # Dropped nodes fill the cells after the kept ones, so every cell is written exactly once.
    place = tl.where(keep, place, count + nodes - place - 1)
    here = request * width + place
    tl.store(out_tokens + here, token, mask=inside)
    tl.store(out_parents + here, tl.where(keep, above, -1), mask=inside)
    tl.store(out_columns + here, tl.where(keep, nodes, 0), mask=inside)
    tl.store(out_tree_size + request, count)


def _gather_triton(
    matrix: Tensor, roots: Tensor, parents: Tensor, ranks: Tensor, level_ends: Sequence[int]
) -> Tensor:
    requests, tree_size = roots.shape[0], parents.shape[0]
    out = torch.empty(requests, tree_size, dtype=torch.int32, device=matrix.device)
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
        tree_size,
        LEVELS=len(level_ends),
        PAD=next_power_of_2(tree_size),
    )
    return out


def _compact_triton(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    requests, width = tokens.shape
    tokens, parents = tokens.contiguous(), parents.contiguous()
    out_tokens, out_parents, columns = (torch.empty_like(tokens) for _ in range(3))
    tree_size = torch.empty(requests, dtype=torch.int32, device=tokens.device)
    if requests == 0:
        return out_tokens, out_parents, tree_size, columns
    _compact_kernel[(requests,)](
        tokens,
        parents,
        out_tokens,
        out_parents,
        tree_size,
        columns,
        width,
        parents.stride(0) if parents.dim() == 2 else 0,
        PAD=next_power_of_2(width),
    )
    return out_tokens, out_parents, tree_size, columns


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


def _compact_reference(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    requests, width = tokens.shape
    keep = tokens != -1
    place = keep.cumsum(1) - 1
    parents = parents.expand(requests, width).long()
    above = place.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, -1).int()
    # Dropped nodes go to an extra column, which is discarded.
    place = place.masked_fill(~keep, width)
    padding = tokens.new_full((requests, width + 1), -1)
    nodes = torch.arange(width, dtype=tokens.dtype, device=tokens.device).expand_as(tokens)
    out_tokens = padding.scatter(1, place, tokens)[:, :width]
    out_parents = padding.scatter(1, place, above)[:, :width]
    columns = torch.zeros_like(padding).scatter(1, place, nodes)[:, :width]
    tree_size = keep.sum(1, dtype=torch.int32)
    return out_tokens.contiguous(), out_parents.contiguous(), tree_size, columns.contiguous()


def _gather_cpp(
    matrix: Tensor, roots: Tensor, parents: Tensor, ranks: Tensor, level_ends: Sequence[int]
) -> Tensor:
    roots, parents, ranks = roots.int().contiguous(), parents.contiguous(), ranks.contiguous()
    out = torch.empty(roots.shape[0], parents.shape[0], dtype=torch.int32)
    _GATHER.call(
        *(matrix.data_ptr(), *matrix.shape, roots.data_ptr(), roots.shape[0]),
        *(parents.data_ptr(), ranks.data_ptr(), parents.shape[0], out.data_ptr()),
    )
    return out


def _compact_cpp(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, parents = tokens.contiguous(), parents.contiguous()
    out_tokens, out_parents, columns = (torch.empty_like(tokens) for _ in range(3))
    tree_size = torch.empty(tokens.shape[0], dtype=torch.int32)
    places = torch.empty(tokens.shape[1], dtype=torch.int32)
    _COMPACT.call(
        *(tokens.data_ptr(), parents.data_ptr(), parents.stride(0) if parents.dim() == 2 else 0),
        *(*tokens.shape, out_tokens.data_ptr(), out_parents.data_ptr()),
        *(tree_size.data_ptr(), columns.data_ptr(), places.data_ptr()),
    )
    return out_tokens, out_parents, tree_size, columns


_GATHER_TREE = Op(
    "gather.gather_tree", _gather_reference, triton=_gather_triton, cpp=_gather_cpp, needs=_GATHER
)
_COMPACT_TREE = Op(
    "gather.compact_tree",
    _compact_reference,
    triton=_compact_triton,
    cpp=_compact_cpp,
    needs=_COMPACT,
)


def gather_tree(
    matrix: Tensor, roots: Tensor, parents: Tensor, ranks: Tensor, level_ends: Sequence[int]
) -> Tensor:
    """The tokens of static trees: node i is candidate `ranks[i]` of its parent's token.

    Args:
        matrix: Int32 `[V, k]`, contiguous, the adjacency matrix; -1 where there is no candidate.
        roots: Int32 or int64 `[B]`, the root tokens.
        parents: Int32 `[N]`, the columns of the nodes' parents in breadth-first order, -1 for the
            root, which is node 0.
        ranks: Int32 `[N]`, the rank of each node among the candidates of its parent.
        level_ends: For each depth d, the number of nodes of depth at most d.

    Returns:
        Int32 `[B, N]`; -1 for a node without a candidate or with a parent outside [0, V), and for
        all nodes below it.

    Raises:
        ValueError: Shapes do not fit.
    """
    if not matrix.is_contiguous():
        raise ValueError("matrix must be contiguous")
    if parents.dim() != 1 or parents.shape != ranks.shape:
        raise ValueError(f"parents {[*parents.shape]} and ranks {[*ranks.shape]} must both be [N]")
    if not level_ends or level_ends[0] != 1 or level_ends[-1] != parents.shape[0]:
        raise ValueError(f"level_ends must go from 1 to {parents.shape[0]}, not {[*level_ends]}")
    return _GATHER_TREE.on(matrix)(matrix, roots, parents, ranks, level_ends)


def compact_tree(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Remove the nodes whose token is -1; the others keep their order.

    The paper drafts zeros for these nodes (section 3.3).

    Args:
        tokens: Int32 `[B, N]`, the trees. All nodes below a node of -1 must be -1 too, as in the
            result of `gather_tree`.
        parents: Int32 `[N]` or `[B, N]`, the columns of the nodes' parents, -1 for a root.

    Returns:
        Tokens and parents, int32 `[B, N]`, padded with -1; the size of each tree, int32 `[B]`,
        including the root; and the column that each node had, int32 `[B, N]`, padded with 0.

    Raises:
        ValueError: Shapes do not fit.
    """
    if tokens.dim() != 2 or parents.shape not in (tokens.shape, tokens.shape[1:]):
        raise ValueError(f"parents {[*parents.shape]} do not fit tokens {[*tokens.shape]}")
    return _COMPACT_TREE.on(tokens)(tokens, parents)
