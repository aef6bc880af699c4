"""Under tensor parallelism the first rank drafts, and the others take its trees.

All ranks see the same logits, so they accept the same; but what a drafter knows may come at its own
time (what another process made, say, or how long steps took), and ranks that drafted for themselves
could disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tree_kernels.adjacency import top_candidates
from vllm.distributed.parallel_state import get_tp_group

from drafttree.drafter import DraftTree
from drafttree.verify import Verified


def drafts_here() -> bool:
    """Whether this rank is the one that drafts."""
    return bool(get_tp_group().rank_in_group == 0)


def shared(trees: DraftTree, nodes: int) -> DraftTree:
    """The first rank's trees, of at most `nodes` nodes, the root not counted; nobody waits for the
    host."""
    group = get_tp_group()
    if group.world_size == 1:
        return trees
    batch, width = trees.tokens.shape
    sent = torch.full((batch, 2, nodes + 1), -1, dtype=torch.int32, device=trees.tokens.device)
    sent[:, 0, :width] = trees.tokens
    sent[:, 1, :width] = trees.parents
    sent = torch.cat((sent.flatten(1), trees.num_nodes[:, None]), 1)
    group.broadcast(sent)
    tokens, parents = sent[:, :-1].view(batch, 2, nodes + 1).unbind(1)
    return DraftTree(tokens.contiguous(), parents.contiguous(), sent[:, -1].contiguous())


class Follower:
    """The drafter of a rank that does not draft."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth

    def allot(self, slots: int, length: int) -> None:
        """Keeps nothing."""

    def calibrate(self, forward: Callable[[int], float], most: int) -> None:
        """Plans nothing."""

    def start(self, slot: int, text: Sequence[int]) -> None:
        """Keeps nothing."""

    def extend(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keeps nothing."""

    def before(self, slots: torch.Tensor) -> torch.Tensor:
        """Not known."""
        return torch.full_like(slots, -1, dtype=torch.int32)

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """No draft; the first rank's trees take the place of these."""
        return DraftTree.of_roots(roots)

    def observe(
        self, slots: torch.Tensor, tokens: torch.Tensor, before: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """The target's most likely tokens."""
        return top_candidates(logits, 1)[:, 0]

    def accepted(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Learns nothing."""

    def release(self, slots: Sequence[int]) -> None:
        """Keeps nothing."""

    def reset(self) -> None:
        """Knows nothing."""

    def explain(self) -> list[dict[str, Any]]:
        """Chose nothing."""
        return []

    def acceptance(self) -> dict[str, Any]:
        """Counts nothing."""
        return {}
