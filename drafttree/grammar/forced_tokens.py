"""Acceptance of the tokens that grammars make certain or likely."""

from __future__ import annotations

from typing import Any

import torch

from drafttree.tree import DraftTree, Verified

SOURCES = ("forced by a grammar", "likely under a grammar")
"""Tokens that are the only ones allowed, and those that are drafted where there are few."""


class ForcedTokens:
    """Counts draft tokens that grammars make certain or likely, once their parent is accepted.

    Those that the drafter has proposed too count as its own unless they were certain. The counts
    stay on the device, so that counting a step does not synchronise with it.

    Args:
        device: Where the trees are.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(2, 2, dtype=torch.int64, device=device)

    def add_step(
        self,
        columns: torch.Tensor,
        forced: torch.Tensor | None,
        trees: DraftTree,
        verified: Verified,
    ) -> None:
        """Add an engine step.

        Args:
            columns: Column of each node in the tree as it was proposed, `int64 [B, N]`; -1 for
                padding and for nodes that were not proposed.
            forced: Whether a grammar leaves no token but that of the node, `bool [B, N]`; None if
                it does for no node.
            trees: The trees, N columns.
            verified: The outcome.
        """
        batch, width = columns.shape
        certain = torch.zeros_like(columns, dtype=torch.bool) if forced is None else forced
        likely = (columns < 0) & (trees.tokens >= 0) & (trees.parents >= 0) & ~certain
        accepted = torch.zeros(batch, 1 + width, dtype=torch.bool, device=columns.device)
        accepted = accepted.scatter(1, 1 + verified.path.long(), True)[:, 1:]
        above = accepted.gather(1, trees.parents.clamp(min=0).long())
        kinds = torch.stack((certain, likely))
        self._counts += torch.stack((kinds & above, kinds & accepted), 1).sum((2, 3))

    def by_source(self) -> list[dict[str, Any]]:
        """Rows as in `Drafter.acceptance`, of sources that had any; waits for the device."""
        return [
            {"source": source, "tried": tried, "hit": hit, "share": hit / tried}
            for source, (tried, hit) in zip(SOURCES, self._counts.tolist(), strict=True)
            if tried
        ]

    def beside(self, counted: dict[str, Any]) -> dict[str, Any]:
        """What a drafter has counted by source, with what grammars add as sources of their own."""
        if "sources" not in counted or not (forced := self.by_source()):
            return counted
        return counted | {"sources": forced + counted["sources"]}
