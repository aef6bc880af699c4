"""The union of two draft trees under one root (Lyanna's verification fusion)."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, next_power_of_2, tl
from tree_kernels.mask import depths_reference

_MERGE = CppFunction("merge.cpp", "merge_trees", "ppppppiiippp")


@jit
def _merge_kernel(
    first_tokens: tl.tensor,
    first_parents: tl.tensor,
    first_tree_size: tl.tensor,
    second_tokens: tl.tensor,
    second_parents: tl.tensor,
    second_tree_size: tl.tensor,
    out_tokens: tl.tensor,
    out_parents: tl.tensor,
    out_tree_size: tl.tensor,
    width: tl.tensor,
    further: tl.tensor,
    DEPTH: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    """Merge two trees; one program per request.

    The nodes of the first tree are followed by those of the second without its root.
    """
    request = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PAD)
    second = places >= width
    column = tl.where(second, places - width + 1, places)
    there = column < tl.where(
        second, tl.load(second_tree_size + request), tl.load(first_tree_size + request)
    )
    ours = request * width + column
    theirs = request * further + column
    token = tl.where(
        second,
        tl.load(second_tokens + theirs, mask=second & there, other=-1),
        tl.load(first_tokens + ours, mask=there & (places < width), other=-1),
    )
    parent = tl.where(
        second,
        tl.load(second_parents + theirs, mask=second & there, other=0),
        tl.load(first_parents + ours, mask=there & (places < width), other=0),
    )
    parent = tl.where(second & (parent > 0), parent + width - 1, tl.maximum(parent, 0))
    # Trees have at most DEPTH levels, so DEPTH steps up reach the root from every node.
    level = tl.zeros([PAD], tl.int32)
    up = places
    for _ in range(DEPTH):
        level += (there & (up > 0)).to(tl.int32)
        up = tl.gather(parent, up, 0)
    # A node of the second tree is dropped if the first tree has one with the same path.
    same = places
    below = tl.where(second | (places == 0) | ~there, -1, parent)
    for depth in range(1, DEPTH + 1):
        above = tl.gather(same, parent, 0)
        equal = (below[None, :] == above[:, None]) & (token[None, :] == token[:, None])
        found = tl.min(tl.where(equal, places[None, :], PAD), 1)
        same = tl.where(second & there & (level == depth) & (found < PAD), found, same)
    kept = there & (same == places)
    parent = tl.gather(same, parent, 0)
    # Breadth-first: level by level, children in the order of their parents.
    rank = tl.zeros([PAD], tl.int32)
    before = tl.full([], 1, tl.int32)
    for depth in range(1, DEPTH + 1):
        own = kept & (level == depth)
        key = tl.gather(rank, parent, 0) * PAD + places
        smaller = (key[None, :] < key[:, None]) & own[None, :]
        rank = tl.where(own, before + tl.sum(smaller.to(tl.int32), 1), rank)
        before += tl.sum(own.to(tl.int32), 0)
    columns = width + further - 1
    line = request * columns
    above = tl.where(places == 0, -1, tl.gather(rank, parent, 0))
    tl.store(out_tokens + line + rank, token, mask=kept)
    tl.store(out_parents + line + rank, above, mask=kept)
    empty = (places >= before) & (places < columns)
    nothing = tl.full([PAD], -1, tl.int32)
    tl.store(out_tokens + line + places, nothing, mask=empty)
    tl.store(out_parents + line + places, nothing, mask=empty)
    tl.store(out_tree_size + request, before)


Tree = tuple[Tensor, Tensor, Tensor]
"""Tokens int32 `[B, N]`, parents int32 `[B, N]`, tree sizes int32 `[B]`, including the root."""


def _merge_triton(first: Tree, second: Tree, depth: int) -> Tree:
    requests, width = first[0].shape
    further = second[0].shape[1]
    columns = width + further - 1
    tokens = torch.empty(requests, columns, dtype=torch.int32, device=first[0].device)
    merged = (tokens, torch.empty_like(tokens), torch.empty_like(first[2]))
    if requests:
        _merge_kernel[(requests,)](
            *(tensor.contiguous() for tensor in (*first, *second)),
            *(*merged, width, further),
            DEPTH=depth,
            PAD=next_power_of_2(columns),
            num_warps=4 if columns <= 64 else 8,
        )
    return merged


def _merge_reference(first: Tree, second: Tree, depth: int) -> Tree:
    tokens, parents, tree_sizes = zip(first, second, strict=True)
    width, further = tokens[0].shape[1], tokens[1].shape[1] - 1
    device = tokens[0].device
    levels = [depths_reference(*each) for each in zip(parents, tree_sizes, strict=True)]
    there = [
        torch.arange(each.shape[1], device=device) < count[:, None]
        for each, count in zip(tokens, tree_sizes, strict=True)
    ]
    # The column of each node of the second tree, in both trees side by side with one root.
    place = torch.arange(width - 1, width + further, device=device).expand_as(tokens[1])
    place = torch.where(parents[1] < 0, 0, place)
    for level in range(1, depth + 1):
        above = place.gather(1, parents[1].clamp(min=0).long())
        equal = (parents[0][:, None] == above[:, :, None]) & there[0][:, None]
        equal &= tokens[0][:, None] == tokens[1][:, :, None]
        same = equal.any(2) & (levels[1] == level)
        place = torch.where(same, equal.to(torch.int8).argmax(2), place)
    above = place.gather(1, parents[1].clamp(min=0).long())
    new = (place >= width) & there[1]
    return _breadth_first(
        torch.cat([tokens[0], tokens[1][:, 1:]], 1),
        torch.cat([parents[0].long(), above[:, 1:]], 1),
        torch.cat(
            [levels[0].masked_fill(~there[0], -1), levels[1].masked_fill(~new, -1)[:, 1:]], 1
        ),
        depth,
    )


def _breadth_first(tokens: Tensor, parents: Tensor, levels: Tensor, depth: int) -> Tree:
    """Order nodes level by level, children in the order of their parents.

    Args:
        tokens: Int32 `[B, N]`.
        parents: Int64 `[B, N]`, the columns of the nodes' parents; the root's is not read.
        levels: Integers `[B, N]`, the depth of each node; -1 where there is no node.
        depth: Maximum depth of a node.
    """
    count = tokens.shape[1]
    here = torch.arange(count, device=tokens.device)
    # Columns without a node come last.
    rank = torch.full_like(parents, count)
    rank = torch.where(levels == 0, 0, rank)
    before = torch.ones_like(parents[:, :1])
    for level in range(1, depth + 1):
        own = levels == level
        key = torch.where(own, rank.gather(1, parents.clamp(min=0)) * count + here, count * count)
        within = key.argsort(dim=1).argsort(dim=1)
        rank = torch.where(own, before + within, rank)
        before = before + own.sum(1, keepdim=True)
    order = rank.sort(dim=1, stable=True).indices
    missing = (levels < 0).gather(1, order)
    above = rank.gather(1, parents.clamp(min=0)).gather(1, order)
    return (
        tokens.gather(1, order).masked_fill(missing, -1),
        above.masked_fill(missing | (here == 0), -1).int(),
        before[:, 0].int(),
    )


def _merge_cpp(first: Tree, second: Tree, depth: int) -> Tree:
    given = [tensor.int().contiguous() for tensor in (*first, *second)]
    requests, width = first[0].shape
    second_width = second[0].shape[1]
    tokens = torch.empty(requests, width + second_width - 1, dtype=torch.int32)
    merged = tokens, torch.empty_like(tokens), torch.empty_like(given[2])
    _MERGE.call(
        *(tensor.data_ptr() for tensor in given),
        *(requests, width, second_width),
        *(tensor.data_ptr() for tensor in merged),
    )
    return merged


_MERGE_TREES = Op(
    "merge.merge_trees", _merge_reference, triton=_merge_triton, cpp=_merge_cpp, needs=_MERGE
)


def merge_trees(first: Tree, second: Tree, depth: int) -> Tree:
    """The union of two trees under the same roots: equal paths become one node.

    Among the children of a node, those of `first` come first.

    Args:
        first: Trees of N columns in breadth-first order, each with at least its root.
        second: Trees of M columns in breadth-first order, with the same roots.
        depth: Maximum depth of a node.

    Returns:
        Trees of N + M - 1 columns in breadth-first order, padded with -1.

    Raises:
        ValueError: Shapes do not fit.
    """
    for tokens, parents, tree_size in (first, second):
        one = tree_size.shape == first[0].shape[:1] == tokens.shape[:1]
        if tokens.shape != parents.shape or not one:
            shapes = [[*tensor.shape] for tensor in (*first, *second)]
            raise ValueError(f"expected [B, N], [B, N] and [B] twice, with equal B, not {shapes}")
    return _MERGE_TREES.on(first[0])(first, second, depth)
