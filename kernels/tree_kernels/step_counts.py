"""The counters of a decode step: drafted, accepted and emitted tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, next_power_of_2, path_pad, tl

_COUNT = CppFunction("step_counts.cpp", "count_step", "ppppiiip")

COUNTS = (
    "steps",
    "emitted",
    "drafted_steps",
    "draft_tokens",
    "accepted_tokens",
    "non_first_child_accepted",
    "kv_rows_moved",
)
"""The names of the counters, in their order."""


@jit(do_not_specialize=["tokens", "parents", "width", "length"])
def _count_kernel(
    counted: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    path: tl.tensor,
    width: tl.tensor,
    length: tl.tensor,
    sums: tl.tensor,
    PAD: tl.constexpr,
    PATH_PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    if tl.load(counted + request) == 0:
        return
    node = tl.arange(0, PAD)
    depth = tl.arange(0, PATH_PAD)
    token = tl.load(tokens + request * width + node, mask=node < width, other=-1)
    drafted = tl.sum((token >= 0).to(tl.int64), 0) - 1
    accepted = tl.load(path + request * length + depth, mask=depth < length, other=-1)
    emitted = tl.sum((accepted >= 0).to(tl.int64), 0)
    moved = tl.sum(((accepted > 0) & (accepted != depth)).to(tl.int64), 0)
    parent = tl.load(parents + request * width + node, mask=node < width, other=-1)
    later = tl.sum(tl.zeros([PAD], tl.int64), 0)
    for column in range(1, length):
        # A node after its parent's first child has a sibling before it.
        chosen = tl.load(path + request * length + column)
        own = tl.sum(tl.where(node == chosen, parent + 1, 0), 0) - 1
        siblings = (parent == own) & (node < chosen) & (own >= 0)
        later += tl.max(siblings.to(tl.int64), 0)
    tl.atomic_add(sums, 1, sem="relaxed")
    tl.atomic_add(sums + 1, emitted, sem="relaxed")
    tl.atomic_add(sums + 2, (drafted > 0).to(tl.int64), sem="relaxed")
    tl.atomic_add(sums + 3, drafted, sem="relaxed")
    tl.atomic_add(sums + 4, emitted - 1, sem="relaxed")
    tl.atomic_add(sums + 5, later, sem="relaxed")
    tl.atomic_add(sums + 6, moved, sem="relaxed")


def _count_triton(
    sums: Tensor, counted: Tensor, tokens: Tensor, parents: Tensor, path: Tensor
) -> None:
    requests, width = tokens.shape
    if requests == 0:
        return
    _count_kernel[(requests,)](
        counted,
        tokens,
        parents,
        path,
        width,
        path.shape[1],
        sums,
        PAD=next_power_of_2(width),
        PATH_PAD=path_pad(path.shape[1]),
    )


def _count_reference(
    sums: Tensor, counted: Tensor, tokens: Tensor, parents: Tensor, path: Tensor
) -> None:
    node = path.long()
    drafted = (tokens >= 0).sum(1) - 1
    emitted = (node >= 0).sum(1)
    parent = parents.gather(1, node.clamp(min=0))
    columns = torch.arange(tokens.shape[1], device=node.device)
    # A node after its parent's first child has a sibling before it.
    siblings = (parents[:, None] == parent[..., None]) & (columns < node[..., None])
    later = ((node > 0) & siblings.any(2)).sum(1)
    moved = ((node > 0) & (node != torch.arange(node.shape[1], device=node.device))).sum(1)
    ones = torch.ones_like(emitted)
    by_request = [ones, emitted, drafted > 0, drafted, emitted - 1, later, moved]
    sums += (torch.stack(by_request) * counted).sum(1)


def _count_cpp(
    sums: Tensor, counted: Tensor, tokens: Tensor, parents: Tensor, path: Tensor
) -> None:
    _COUNT.call(
        *(counted.data_ptr(), tokens.data_ptr(), parents.data_ptr(), path.data_ptr()),
        *(*tokens.shape, path.shape[1], sums.data_ptr()),
    )


_COUNT_STEP = Op(
    "step_counts.count_step",
    _count_reference,
    triton=_count_triton,
    cpp=_count_cpp,
    needs=_COUNT,
)


def count_step(
    sums: Tensor, counted: Tensor, tokens: Tensor, parents: Tensor, path: Tensor
) -> None:
    """Add a step to the counters, in place.

    Args:
        sums: Int64 `[7]`, the counters in the order of `COUNTS`.
        counted: Bool `[B]`, whether to count each request.
        tokens: Int32 `[B, N]`, the trees as they were verified; -1 where there is no node.
        parents: Int32 `[B, N]`, the columns of the nodes' parents, -1 for a root.
        path: Int32 `[B, D]`, the accepted nodes, the root first; padded with -1.
    """
    counted, path = counted.contiguous(), path.int().contiguous()
    tokens, parents = tokens.contiguous(), parents.contiguous()
    _COUNT_STEP.on(tokens)(sums, counted, tokens, parents, path)
