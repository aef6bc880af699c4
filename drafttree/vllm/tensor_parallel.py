"""Tensor parallelism: the first rank drafts, and the others verify its trees.

All ranks have the same logits, so they accept the same tokens. But a drafter's state may depend on
its process, for instance on measured times or on files in a cache, so ranks that drafted
independently could disagree. For the same reason the first rank alone decides which forwards are
run to prime its drafter, and which to time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from vllm.distributed.parallel_state import get_tp_group

from drafttree.drafter import ModelFreeDrafter, PrimeForward
from drafttree.tree import DraftTree


def is_drafting_rank() -> bool:
    """Whether this rank is the one that drafts."""
    return bool(get_tp_group().rank_in_group == 0)


def drafts_alone() -> bool:
    """Whether no other rank verifies this one's trees."""
    return bool(get_tp_group().world_size == 1)


def broadcast_trees(trees: DraftTree, num_draft_tokens: int) -> DraftTree:
    """The first rank's trees, sent between devices without waiting on the host.

    Args:
        trees: This rank's trees, which are ignored unless it is the first.
        num_draft_tokens: Greatest number of draft tokens of a tree.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return trees
    batch, width = trees.tokens.shape
    shape = batch, 2, num_draft_tokens + 1
    tensors = torch.full(shape, -1, dtype=torch.int32, device=trees.tokens.device)
    tensors[:, 0, :width] = trees.tokens
    tensors[:, 1, :width] = trees.parents
    tensors = torch.cat((tensors.flatten(1), trees.tree_size[:, None]), 1)
    group.broadcast(tensors)
    tokens, parents = tensors[:, :-1].view(shape).unbind(1)
    return DraftTree(tokens.contiguous(), parents.contiguous(), tensors[:, -1].contiguous())


_NO_ROOT = -1


@contextmanager
def leading_forwards(
    forward: PrimeForward, max_tokens: int, device: torch.device
) -> Iterator[PrimeForward]:
    """On the first rank: a forward that the other ranks run too, while they `follow_forwards`.

    Args:
        forward: This rank's forward.
        max_tokens: Greatest number of tokens of a forward.
        device: The ranks' device.
    """
    group = get_tp_group()
    if group.world_size == 1:
        yield forward
        return
    message = torch.zeros(2 + max_tokens, dtype=torch.int32, device=device)

    def led(root: int | None, tokens: torch.Tensor) -> torch.Tensor:
        message[0] = len(tokens)
        message[1] = _NO_ROOT if root is None else root
        message[2 : 2 + len(tokens)] = tokens
        group.broadcast(message)
        return forward(root, tokens)

    try:
        yield led
    finally:
        message[0] = 0
        group.broadcast(message)


def follow_forwards(forward: PrimeForward, max_tokens: int, device: torch.device) -> None:
    """On the other ranks: run the forwards of the first rank until it ends."""
    group = get_tp_group()
    message = torch.zeros(2 + max_tokens, dtype=torch.int32, device=device)
    while True:
        group.broadcast(message)
        count, root = message[:2].tolist()
        if not count:
            return
        forward(None if root == _NO_ROOT else root, message[2 : 2 + count])


@contextmanager
def leading_measurements(
    measure: Callable[[int], float], device: torch.device
) -> Iterator[Callable[[int], float]]:
    """On the first rank: timed forwards that the other ranks run too.

    The others call `follow_measurements` meanwhile. The first rank's times count.

    Args:
        measure: Runs one forward over a number of tokens and returns its seconds.
        device: The ranks' device.
    """
    group = get_tp_group()
    if group.world_size == 1:
        yield measure
        return
    message = torch.zeros(1, dtype=torch.int32, device=device)

    def led(tokens: int) -> float:
        group.broadcast(message.fill_(tokens))
        return measure(tokens)

    try:
        yield led
    finally:
        group.broadcast(message.zero_())


def follow_measurements(measure: Callable[[int], float], device: torch.device) -> None:
    """On the other ranks: run the timed forwards of the first rank until it ends."""
    group = get_tp_group()
    message = torch.zeros(1, dtype=torch.int32, device=device)
    while True:
        group.broadcast(message)
        tokens = int(message)
        if not tokens:
            return
        measure(tokens)


class NonDraftingRank(ModelFreeDrafter):
    """The drafter of a rank that does not draft."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """No drafts: the first rank's trees replace these."""
        return DraftTree.of_roots(roots)
