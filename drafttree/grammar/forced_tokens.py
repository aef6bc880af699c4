"""Acceptance of the tokens that grammars force."""

from __future__ import annotations

from typing import Any

import torch

from drafttree.tree import DraftTree, Verified

SOURCE = "forced by a grammar"


class ForcedTokens:
    """Counts draft tokens that are the only ones a grammar allows, once their parent is accepted.

    The counts stay on the device, so that counting a step does not synchronise with it.

    Args:
        device: Where the trees are.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)

    def add_step(self, forced: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Add an engine step; `forced`, `bool [B, N]`, marks the nodes."""
        batch, width = forced.shape
        accepted = torch.zeros(batch, 1 + width, dtype=torch.bool, device=forced.device)
        accepted = accepted.scatter(1, 1 + verified.path.long(), True)[:, 1:]
        above = accepted.gather(1, trees.parents.clamp(min=0).long())
        self._counts += torch.stack(((forced & above).sum(), (forced & accepted).sum()))

    def by_source(self) -> list[dict[str, Any]]:
        """One row as in `Drafter.acceptance`, if there were any; waits for the device."""
        tried, hit = self._counts.tolist()
        if not tried:
            return []
        return [{"source": SOURCE, "tried": tried, "hit": hit, "share": hit / tried}]

    def beside(self, counted: dict[str, Any]) -> dict[str, Any]:
        """What a drafter has counted by source, with forced tokens as a source of their own."""
        if "sources" not in counted or not (forced := self.by_source()):
            return counted
        return counted | {"sources": forced + counted["sources"]}
