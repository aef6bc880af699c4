"""Verification of draft trees (Token Recycling, arXiv 2408.08696, section 3.3).

A tree is followed from its root along the target's own tokens: the whole path at once for greedy
requests, and one level at a time for sampled requests, whose tokens are drawn between levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, next_power_of_2, tl

_WALK = CppFunction("accept.cpp", "walk", "pppiipippp")
_STEP = CppFunction("accept.cpp", "step", "pppiippp")


@jit(do_not_specialize=["tokens", "parents", "width", "length"])
def _walk_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    tree_size: tl.tensor,
    target: tl.tensor,
    rows: tl.tensor,
    path: tl.tensor,
    emitted: tl.tensor,
    num_emitted: tl.tensor,
    width: tl.tensor,
    length: tl.tensor,
    BY_ROW: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, PAD)
    count = tl.load(tree_size + request)
    inside = (nodes < count) & (nodes < width)
    line = request * width + nodes
    token = tl.load(tokens + line, mask=inside, other=-1)
    parent = tl.load(parents + line, mask=inside, other=-1)
    if BY_ROW:
        line = tl.load(rows + line, mask=inside, other=0)
    truth = tl.load(target + line, mask=inside, other=-1).to(tl.int32)
    node = tl.where(count > 0, 0, -1)
    steps = tl.where(count > 0, 1, 0)
    for column in range(length):
        # A node of -1 equals no column, so the sum is 0 and the emitted token is -1.
        emit = tl.sum(tl.where(nodes == node, truth + 1, 0), 0) - 1
        tl.store(path + request * length + column, node)
        tl.store(emitted + request * length + column, emit)
        child = inside & (parent == node) & (token == emit) & (node >= 0) & (emit >= 0)
        first = tl.min(tl.where(child, nodes, PAD), 0)
        node = tl.where(first < PAD, first, -1)
        steps += tl.where((first < PAD) & (column < length - 1), 1, 0)
    tl.store(num_emitted + request, steps)


@jit(do_not_specialize=["tokens", "parents", "node", "sampled", "width"])
def _step_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    tree_size: tl.tensor,
    node: tl.tensor,
    sampled: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, PAD)
    inside = (nodes < tl.load(tree_size + request)) & (nodes < width)
    token = tl.load(tokens + request * width + nodes, mask=inside, other=-1)
    parent = tl.load(parents + request * width + nodes, mask=inside, other=-1)
    here = tl.load(node + request)
    drawn = tl.load(sampled + request)
    child = inside & (parent == here) & (token == drawn) & (here >= 0) & (drawn >= 0)
    first = tl.min(tl.where(child, nodes, PAD), 0)
    tl.store(out + request, tl.where(first < PAD, first, -1))


def _walk_triton(
    tokens: Tensor,
    parents: Tensor,
    tree_size: Tensor,
    target: Tensor,
    max_depth: int,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    requests, width = tokens.shape
    path = torch.empty(requests, max_depth + 1, dtype=torch.int32, device=tokens.device)
    emitted = torch.empty_like(path)
    num_emitted = torch.empty(requests, dtype=torch.int32, device=tokens.device)
    if requests:
        _walk_kernel[(requests,)](
            tokens.contiguous(),
            parents.contiguous(),
            tree_size.contiguous(),
            target.contiguous(),
            target if rows is None else rows.contiguous(),
            path,
            emitted,
            num_emitted,
            width,
            max_depth + 1,
            BY_ROW=rows is not None,
            PAD=next_power_of_2(width),
        )
    return path, emitted, num_emitted


def _by_node(target: Tensor, rows: Tensor | None) -> Tensor:
    """The target's tokens after the nodes, int32 `[B, N]`."""
    return (target if rows is None else target[rows]).int()


def _step_triton(
    tokens: Tensor, parents: Tensor, tree_size: Tensor, node: Tensor, sampled: Tensor
) -> Tensor:
    requests, width = tokens.shape
    out = torch.empty(requests, dtype=torch.int32, device=tokens.device)
    if requests:
        _step_kernel[(requests,)](
            tokens.contiguous(),
            parents.contiguous(),
            tree_size.contiguous(),
            node.contiguous(),
            sampled.contiguous(),
            out,
            width,
            PAD=next_power_of_2(width),
        )
    return out


def _step_reference(
    tokens: Tensor, parents: Tensor, tree_size: Tensor, node: Tensor, sampled: Tensor
) -> Tensor:
    width = tokens.shape[1]
    nodes = torch.arange(width, dtype=torch.int32, device=tokens.device)
    child = (parents == node[:, None]) & (tokens == sampled[:, None])
    child = child & (nodes < tree_size[:, None]) & ((node >= 0) & (sampled >= 0))[:, None]
    first = torch.where(child, nodes, width).amin(1)
    return first.masked_fill(first == width, -1).int()


def _walk_reference(
    tokens: Tensor,
    parents: Tensor,
    tree_size: Tensor,
    target: Tensor,
    max_depth: int,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    target = _by_node(target, rows)
    node = torch.zeros_like(tree_size).masked_fill(tree_size <= 0, -1)
    path, emitted = [], []
    for _ in range(max_depth + 1):
        emit = target.gather(1, node.clamp(min=0).long()[:, None])[:, 0].masked_fill(node < 0, -1)
        path.append(node)
        emitted.append(emit)
        node = _step_reference(tokens, parents, tree_size, node, emit)
    nodes = torch.stack(path, 1)
    return nodes, torch.stack(emitted, 1), (nodes >= 0).sum(1, dtype=torch.int32)


def _walk_cpp(
    tokens: Tensor,
    parents: Tensor,
    tree_size: Tensor,
    target: Tensor,
    max_depth: int,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    given = [tensor.contiguous() for tensor in (tokens, parents, tree_size, _by_node(target, rows))]
    path = torch.empty(tokens.shape[0], max_depth + 1, dtype=torch.int32)
    emitted, num_emitted = torch.empty_like(path), torch.empty_like(given[2])
    _WALK.call(
        *(tensor.data_ptr() for tensor in given[:3]),
        *(*tokens.shape, given[3].data_ptr(), max_depth + 1),
        *(path.data_ptr(), emitted.data_ptr(), num_emitted.data_ptr()),
    )
    return path, emitted, num_emitted


def _step_cpp(
    tokens: Tensor, parents: Tensor, tree_size: Tensor, node: Tensor, sampled: Tensor
) -> Tensor:
    trees = [tensor.contiguous() for tensor in (tokens, parents, tree_size)]
    node, sampled = node.int().contiguous(), sampled.int().contiguous()
    out = torch.empty_like(node)
    _STEP.call(
        *(tensor.data_ptr() for tensor in trees),
        *(*tokens.shape, node.data_ptr(), sampled.data_ptr(), out.data_ptr()),
    )
    return out


_ACCEPT_WALK = Op(
    "accept.accept_walk", _walk_reference, triton=_walk_triton, cpp=_walk_cpp, needs=_WALK
)
_ACCEPT_STEP = Op(
    "accept.accept_step", _step_reference, triton=_step_triton, cpp=_step_cpp, needs=_STEP
)


def _check(tokens: Tensor, parents: Tensor, tree_size: Tensor) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0 or tokens.shape != parents.shape:
        raise ValueError(
            f"tokens {[*tokens.shape]} and parents {[*parents.shape]} must both be [B, N], N > 0"
        )
    if tree_size.shape != tokens.shape[:1]:
        raise ValueError(f"tree_size must be [{tokens.shape[0]}], not {[*tree_size.shape]}")


def accept_walk(
    tokens: Tensor,
    parents: Tensor,
    tree_size: Tensor,
    target: Tensor,
    max_depth: int,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the longest path whose tokens are the target's own, and emit the target's tokens.

    Args:
        tokens: Int32 `[B, N]`, the trees in breadth-first order. Of siblings with the same
            token the first is accepted.
        parents: Int32 `[B, N]`, the columns of the nodes' parents, -1 for a root.
        tree_size: Int32 `[B]`, the number of nodes of each tree, including the root.
        target: Integers `[B, N]`, the target's token after each node, or `[R]` if there are `rows`.
        max_depth: Maximum depth of a node.
        rows: Integers `[B, N]`, the place of each node in `target`.

    Returns:
        The accepted nodes, int32 `[B, max_depth + 1]`, padded with -1; the emitted tokens, of the
        same shape: the target's token after each accepted node; and their number, int32 `[B]`,
        including the bonus token, 0 for a request without a tree.

    Raises:
        ValueError: Shapes do not fit, or `max_depth` is negative.
    """
    _check(tokens, parents, tree_size)
    of_nodes = target if rows is None else rows
    if of_nodes.shape != tokens.shape:
        name = "target" if rows is None else "rows"
        raise ValueError(f"{name} must be {[*tokens.shape]}, not {[*of_nodes.shape]}")
    if max_depth < 0:
        raise ValueError(f"max_depth must not be negative: {max_depth}")
    return _ACCEPT_WALK.on(tokens)(tokens, parents, tree_size, target, max_depth, rows)


def accept_step(
    tokens: Tensor, parents: Tensor, tree_size: Tensor, node: Tensor, sampled: Tensor
) -> Tensor:
    """The first child of each request's node whose token was sampled.

    Args:
        tokens: Int32 `[B, N]`, the trees in breadth-first order.
        parents: Int32 `[B, N]`, the columns of the nodes' parents, -1 for a root.
        tree_size: Int32 `[B]`, the number of nodes of each tree, including the root.
        node: Int32 `[B]`, the current node; -1 for a request that has finished.
        sampled: Int32 `[B]`, the token sampled after the node.

    Returns:
        Int32 `[B]`, the child; -1 if there is none or `node` is negative.

    Raises:
        ValueError: Shapes do not fit.
    """
    _check(tokens, parents, tree_size)
    if node.shape != tree_size.shape or sampled.shape != tree_size.shape:
        raise ValueError(
            f"node {[*node.shape]} and sampled {[*sampled.shape]} must be [{tokens.shape[0]}]"
        )
    return _ACCEPT_STEP.on(tokens)(tokens, parents, tree_size, node, sampled)
