"""What a drafting method gives the hosts: draft trees for a batch, and what makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class DraftTree:
    """The draft trees of a batch, breadth-first, padded with -1.

    Attributes:
        tokens: `int32 [B, N]`; column 0 is the root, the last accepted token.
        parents: `int32 [B, N]`; -1 for the root.
        num_nodes: `int32 [B]`, the root included.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    num_nodes: torch.Tensor


class Drafter(Protocol):
    """Drafts trees and learns from what the target said of them. Knows no engine.

    State that belongs to a request is keyed by its id, never by its row in the batch.

    Attributes:
        max_depth: the greatest depth of a node that it drafts.
    """

    max_depth: int

    def start(self, request_ids: Sequence[str]) -> None:
        """Hear of requests that joined."""

    def propose(self, request_ids: Sequence[str], roots: torch.Tensor) -> DraftTree:
        """Draft one tree under each of `roots` (`int32 [B]`, the last accepted tokens)."""

    def observe(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Learn from the target's raw logits.

        Args:
            tokens: `int32 [R]`, the token whose next-token logits a row holds; -1 to skip it.
            logits: `[R, V]`, before any penalty, mask or temperature.

        Returns:
            `int32 [R]`: the target's most likely next token after each row, ties to the lowest id.
        """

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget requests that ended."""

    def reset(self) -> None:
        """Forget everything learnt."""
