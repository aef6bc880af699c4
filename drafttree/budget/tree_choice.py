"""The node budget's decision for a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeChoice:
    """How many draft tokens each request's tree has in a step.

    Attributes:
        num_draft_tokens: Draft tokens of every request, its most probable ones.
        spine: Most further draft tokens of a request, for a path that is nearly certain.
        min_score: Least probability of acceptance of these further tokens.
    """

    num_draft_tokens: int
    spine: int = 0
    min_score: float = 0.0

    @property
    def drafts(self) -> bool:
        """Whether any request may have draft tokens."""
        return self.num_draft_tokens + self.spine > 0
