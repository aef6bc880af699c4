"""Adding up what became of a step's trees."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._native import NativeFunction
from tree_kernels._triton import jit, next_power_of_2, path_pad, tl, use_triton

_COUNT = NativeFunction("step_counts.cpp", "count_step", "ppppiiip")

COUNTS = (
    "steps",
    "emitted",
    "drafted_steps",
    "draft_tokens",
    "accepted_tokens",
    "non_first_child_accepted",
    "kv_rows_moved",
)
"""What is counted, in this order."""


@jit(do_not_specialize=["tokens", "parents", "nodes", "length"])
def _count_kernel(
    counted: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    path: tl.tensor,
    nodes: tl.tensor,
    length: tl.tensor,
    sums: tl.tensor,
    NODES_PAD: tl.constexpr,
    PATH_PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    if tl.load(counted + request) == 0:
        return
    node = tl.arange(0, NODES_PAD)
    depth = tl.arange(0, PATH_PAD)
    token = tl.load(tokens + request * nodes + node, mask=node < nodes, other=-1)
    drafted = tl.sum((token >= 0).to(tl.int64), 0) - 1
    accepted = tl.load(path + request * length + depth, mask=depth < length, other=-1)
    emitted = tl.sum((accepted >= 0).to(tl.int64), 0)
    # Breadth-first, a parent's children are neighbours: the first follows another's.
    below = accepted > 0
    own = tl.load(parents + request * nodes + accepted, mask=below, other=-1)
    earlier = tl.load(parents + request * nodes + accepted - 1, mask=below, other=-2)
    later = tl.sum((own == earlier).to(tl.int64), 0)
    moved = tl.sum((below & (accepted != depth)).to(tl.int64), 0)
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
    requests, nodes = tokens.shape
    if requests == 0:
        return
    _count_kernel[(requests,)](
        counted,
        tokens,
        parents,
        path,
        nodes,
        path.shape[1],
        sums,
        NODES_PAD=next_power_of_2(nodes),
        PATH_PAD=path_pad(path.shape[1]),
    )


def _count_reference(
    sums: Tensor, counted: Tensor, tokens: Tensor, parents: Tensor, path: Tensor
) -> None:
    node = path.long()
    drafted = (tokens >= 0).sum(1) - 1
    emitted = (node >= 0).sum(1)
    parent = parents.gather(1, node.clamp(min=0))
    earlier = parents.gather(1, (node - 1).clamp(min=0))
    later = ((node > 0) & (parent == earlier)).sum(1)
    moved = ((node > 0) & (node != torch.arange(node.shape[1]))).sum(1)
    ones = torch.ones_like(emitted)
    by_request = [ones, emitted, drafted > 0, drafted, emitted - 1, later, moved]
    sums += (torch.stack(by_request) * counted).sum(1)


def count_step(
    sums: Tensor, counted: Tensor, tokens: Tensor, parents: Tensor, path: Tensor
) -> None:
    """Add a step to `sums`, int64 [7], in the order of `COUNTS`.

    counted: bool [B], the requests that count. tokens, parents: int32 [B, N] of the trees as they
    were verified, tokens of -1 for no node. path: int32 [B, D], the nodes after which a token was
    emitted, the root first, -1 for none.
    """
    counted, path = counted.contiguous(), path.int().contiguous()
    tokens, parents = tokens.contiguous(), parents.contiguous()
    if use_triton(tokens):
        _count_triton(sums, counted, tokens, parents, path)
    elif (count := _COUNT.on(tokens)) is not None:
        count(
            *(counted.data_ptr(), tokens.data_ptr(), parents.data_ptr(), path.data_ptr()),
            *(*tokens.shape, path.shape[1], sums.data_ptr()),
        )
    else:
        _count_reference(sums, counted, tokens, parents, path)
