"""Counts of what was drafted, verified and accepted."""

from __future__ import annotations

import torch
from tree_kernels.step_counts import COUNTS, count_step

from drafttree.tree import DraftTree, Verified


class Counters:
    """Sums over decode steps of single requests; prefill steps are not counted.

    Counts of drafts stay on the device, so that counting a step does not synchronise with it. By
    name:

    - steps: decode steps, undrafted ones included.
    - emitted: tokens emitted by these steps, the bonus token included; the engine drops those
      after the end of a text.
    - drafted_steps: steps that verified at least one draft token.
    - draft_tokens: draft tokens verified.
    - accepted_tokens: draft tokens accepted.
    - non_first_child_accepted: accepted draft tokens that are not their parent's first child, which
      only a tree can have.
    - kv_rows_moved: accepted draft tokens whose KV rows were moved, counted once and not by layer.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        self._plain_steps = 0

    def add_step(self, counted: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Add an engine step; `counted`, `bool [B]`, marks the requests that decode in it."""
        if trees.drafted:
            count_step(self._sums, counted, trees.tokens, trees.parents, verified.path)
        else:
            self._sums[:2].add_(counted.sum())  # one step and one token per request

    def add_plain_step(self, requests: int) -> None:
        """Add an engine step without drafts, in which so many requests decode."""
        self._plain_steps += requests

    def as_dict(self) -> dict[str, int]:
        """The counts by name; waits for the device."""
        counts: dict[str, int] = dict(zip(COUNTS, self._sums.tolist(), strict=True))
        for each in ("steps", "emitted"):
            counts[each] += self._plain_steps
        return counts
