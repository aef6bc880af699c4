"""Counts of what was drafted, verified and accepted."""

from __future__ import annotations

import torch

from drafttree.drafter import DraftTree
from drafttree.verify import Verified

NAMES = (
    "steps",
    "emitted",
    "drafted_steps",
    "draft_tokens",
    "accepted_tokens",
    "non_first_child_accepted",
    "kv_rows_moved",
)


class Counters:
    """Sums over decode steps of single requests; prefill steps are not counted.

    They stay on the device, so that counting a step waits for nothing. By name:

    - steps: decode steps, undrafted ones included.
    - emitted: tokens emitted by these steps, the bonus token included; the engine drops those
      after the end of a text.
    - drafted_steps: steps that verified at least one draft node.
    - draft_tokens: draft nodes verified.
    - accepted_tokens: draft nodes accepted.
    - non_first_child_accepted: accepted nodes that are not their parent's first child, which only
      a tree can have.
    - kv_rows_moved: accepted nodes whose KV rows move to another place, counted once, not by
      layer.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(NAMES), dtype=torch.int64, device=device)

    def add_step(self, counted: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Add an engine step; `counted` are the requests that decode in it, `bool [B]`."""
        if not trees.drafted:
            self._sums[:2].add_(counted.sum())  # a step and a token each
            return
        nodes, _ = verified.moves()
        drafted = (trees.tokens >= 0).sum(1) - 1
        by_request = torch.stack(
            [
                torch.ones_like(verified.num_emitted),
                verified.num_emitted,
                drafted > 0,
                drafted,
                verified.num_emitted - 1,
                verified.non_first_children(trees).sum(1),
                (nodes >= 0).sum(1),
            ]
        )
        self._sums += (by_request * counted).sum(1)

    def as_dict(self) -> dict[str, int]:
        """The counts by name; waits for the device."""
        return dict(zip(NAMES, self._sums.tolist(), strict=True))
