"""Greedy verification of draft trees: down from the root along the target's own tokens, whole
paths or one level at a time (sampled verification draws between the levels)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tree_kernels._native import NativeFunction
from tree_kernels._triton import jit, next_power_of_2, tl, use_triton

_WALK = NativeFunction("accept.cpp", "walk", "pppiipippp")
_STEP = NativeFunction("accept.cpp", "step", "pppiippp")


@jit(do_not_specialize=["tokens", "parents", "width", "length"])
def _walk_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    num_nodes: tl.tensor,
    target: tl.tensor,
    path: tl.tensor,
    emitted: tl.tensor,
    num_emitted: tl.tensor,
    width: tl.tensor,
    length: tl.tensor,
    PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, PAD)
    count = tl.load(num_nodes + request)
    inside = (nodes < count) & (nodes < width)
    token = tl.load(tokens + request * width + nodes, mask=inside, other=-1)
    parent = tl.load(parents + request * width + nodes, mask=inside, other=-1)
    truth = tl.load(target + request * width + nodes, mask=inside, other=-1)
    node = tl.where(count > 0, 0, -1)
    steps = tl.where(count > 0, 1, 0)
    for column in range(length):
        # A node of -1 matches none, so the sum is 0 there and the emitted token is -1.
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
    num_nodes: tl.tensor,
    node: tl.tensor,
    sampled: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, PAD)
    inside = (nodes < tl.load(num_nodes + request)) & (nodes < width)
    token = tl.load(tokens + request * width + nodes, mask=inside, other=-1)
    parent = tl.load(parents + request * width + nodes, mask=inside, other=-1)
    here = tl.load(node + request)
    drawn = tl.load(sampled + request)
    child = inside & (parent == here) & (token == drawn) & (here >= 0) & (drawn >= 0)
    first = tl.min(tl.where(child, nodes, PAD), 0)
    tl.store(out + request, tl.where(first < PAD, first, -1))


def _walk_triton(
    tokens: Tensor, parents: Tensor, num_nodes: Tensor, target: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    requests, width = tokens.shape
    path = torch.empty(requests, max_depth + 1, dtype=torch.int32, device=tokens.device)
    emitted = torch.empty_like(path)
    num_emitted = torch.empty(requests, dtype=torch.int32, device=tokens.device)
    if requests:
        _walk_kernel[(requests,)](
            tokens.contiguous(),
            parents.contiguous(),
            num_nodes.contiguous(),
            target.contiguous(),
            path,
            emitted,
            num_emitted,
            width,
            max_depth + 1,
            PAD=next_power_of_2(width),
        )
    return path, emitted, num_emitted


def _step_triton(
    tokens: Tensor, parents: Tensor, num_nodes: Tensor, node: Tensor, sampled: Tensor
) -> Tensor:
    requests, width = tokens.shape
    out = torch.empty(requests, dtype=torch.int32, device=tokens.device)
    if requests:
        _step_kernel[(requests,)](
            tokens.contiguous(),
            parents.contiguous(),
            num_nodes.contiguous(),
            node.contiguous(),
            sampled.contiguous(),
            out,
            width,
            PAD=next_power_of_2(width),
        )
    return out


def _step_reference(
    tokens: Tensor, parents: Tensor, num_nodes: Tensor, node: Tensor, sampled: Tensor
) -> Tensor:
    width = tokens.shape[1]
    nodes = torch.arange(width, dtype=torch.int32, device=tokens.device)
    child = (parents == node[:, None]) & (tokens == sampled[:, None])
    child = child & (nodes < num_nodes[:, None]) & ((node >= 0) & (sampled >= 0))[:, None]
    first = torch.where(child, nodes, width).amin(1)
    return first.masked_fill(first == width, -1).int()


def _walk_reference(
    tokens: Tensor, parents: Tensor, num_nodes: Tensor, target: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    node = torch.zeros_like(num_nodes).masked_fill(num_nodes <= 0, -1)
    path, emitted = [], []
    for _ in range(max_depth + 1):
        emit = target.gather(1, node.clamp(min=0).long()[:, None])[:, 0].masked_fill(node < 0, -1)
        path.append(node)
        emitted.append(emit)
        node = _step_reference(tokens, parents, num_nodes, node, emit)
    nodes = torch.stack(path, 1)
    return nodes, torch.stack(emitted, 1), (nodes >= 0).sum(1, dtype=torch.int32)


def _walk_native(
    walk: Callable[..., None],
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    target: Tensor,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    given = [tensor.contiguous() for tensor in (tokens, parents, num_nodes, target)]
    path = torch.empty(tokens.shape[0], max_depth + 1, dtype=torch.int32)
    emitted, num_emitted = torch.empty_like(path), torch.empty_like(given[2])
    walk(
        *(tensor.data_ptr() for tensor in given[:3]),
        *(*tokens.shape, given[3].data_ptr(), max_depth + 1),
        *(path.data_ptr(), emitted.data_ptr(), num_emitted.data_ptr()),
    )
    return path, emitted, num_emitted


def _step_native(
    step: Callable[..., None],
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    node: Tensor,
    sampled: Tensor,
) -> Tensor:
    trees = [tensor.contiguous() for tensor in (tokens, parents, num_nodes)]
    node, sampled = node.int().contiguous(), sampled.int().contiguous()
    out = torch.empty_like(node)
    step(
        *(tensor.data_ptr() for tensor in trees),
        *(*tokens.shape, node.data_ptr(), sampled.data_ptr(), out.data_ptr()),
    )
    return out


def _check(tokens: Tensor, parents: Tensor, num_nodes: Tensor) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0 or tokens.shape != parents.shape:
        raise ValueError(
            f"tokens {[*tokens.shape]} and parents {[*parents.shape]} must both be [B, N], N > 0"
        )
    if num_nodes.shape != tokens.shape[:1]:
        raise ValueError(f"num_nodes must be [{tokens.shape[0]}], not {[*num_nodes.shape]}")


def accept_walk(
    tokens: Tensor, parents: Tensor, num_nodes: Tensor, target: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Emit the target's token after the root and after every node reached by emitted tokens.

    tokens, parents: int32 [B, N], breadth-first, a root's parent -1; num_nodes: int32 [B];
    target: int32 [B, N], the target's token after each node. Of equal siblings the first is taken.
    Returns path and emitted, int32 [B, max_depth + 1], padded with -1: emitted[:, d] is the
    target's token after node path[:, d]; and num_emitted, int32 [B], the bonus token included: at
    least 1, but 0 for a request of no nodes. Raises ValueError on shapes that do not fit
    (verification of Token Recycling, arXiv 2408.08696, section 3.3).
    """
    _check(tokens, parents, num_nodes)
    if target.shape != tokens.shape:
        raise ValueError(f"target must be {[*tokens.shape]}, not {[*target.shape]}")
    if max_depth < 0:
        raise ValueError(f"max_depth must not be negative: {max_depth}")
    if use_triton(tokens):
        return _walk_triton(tokens, parents, num_nodes, target, max_depth)
    if (walk := _WALK.on(tokens)) is not None:
        return _walk_native(walk, tokens, parents, num_nodes, target, max_depth)
    return _walk_reference(tokens, parents, num_nodes, target, max_depth)


def accept_step(
    tokens: Tensor, parents: Tensor, num_nodes: Tensor, node: Tensor, sampled: Tensor
) -> Tensor:
    """The first child of node[b] that carries sampled[b]; -1 if there is none or node[b] < 0.

    tokens, parents: int32 [B, N], breadth-first, a root's parent -1; num_nodes, node, sampled:
    int32 [B]. Returns int32 [B]. Raises ValueError on shapes that do not fit.
    """
    _check(tokens, parents, num_nodes)
    if node.shape != num_nodes.shape or sampled.shape != num_nodes.shape:
        raise ValueError(f"node and sampled must be [{tokens.shape[0]}]")
    if use_triton(tokens):
        return _step_triton(tokens, parents, num_nodes, node, sampled)
    if (step := _STEP.on(tokens)) is not None:
        return _step_native(step, tokens, parents, num_nodes, node, sampled)
    return _step_reference(tokens, parents, num_nodes, node, sampled)
