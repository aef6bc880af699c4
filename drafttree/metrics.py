"""Counts of what was drafted, verified and accepted."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from drafttree.drafter import DraftTree
from drafttree.verify import Verified


@dataclass
class Counters:
    """Sums over decode steps of single requests; prefill steps are not counted.

    Attributes:
        steps: decode steps, undrafted ones included.
        emitted: tokens emitted by these steps, the bonus token included; the engine drops those
            after the end of a text.
        drafted_steps: steps that verified at least one draft node.
        draft_tokens: draft nodes verified.
        accepted_tokens: draft nodes accepted.
        non_first_child_accepted: accepted nodes that are not their parent's first child, which
            only a tree can have.
        kv_rows_moved: KV rows moved to their place after verification, counted once, not by layer.
    """

    steps: int = 0
    emitted: int = 0
    drafted_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    non_first_child_accepted: int = 0
    kv_rows_moved: int = 0

    def add_step(
        self, counted: torch.Tensor, trees: DraftTree, verified: Verified, kv_rows_moved: int
    ) -> None:
        """Add an engine step; `counted` are the requests that decode in it, `bool [B]`."""
        sizes, emitted = trees.num_nodes[counted], verified.num_emitted[counted]
        self.steps += len(sizes)
        self.emitted += int(emitted.sum())
        self.drafted_steps += int((sizes > 1).sum())
        self.draft_tokens += int(sizes.sum()) - len(sizes)
        self.accepted_tokens += int(emitted.sum()) - len(emitted)
        self.non_first_child_accepted += int(verified.non_first_children(trees)[counted].sum())
        self.kv_rows_moved += kv_rows_moved

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)
