"""Measures decode steps, each from one proposal of drafts to the next.

Nothing here waits for a device: the outcome of a step is read when the next one is proposed, and by
then the host has waited for the step's tokens anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from drafttree.transfer import AsyncHostCopy
from drafttree.tree import DraftTree, Verified


@dataclass(frozen=True)
class StepOutcome:
    """A measured step.

    Attributes:
        batch_size: Number of requests.
        num_draft_tokens: Draft tokens that were chosen for each request.
        seconds: Time from this proposal to the next.
        draft_seconds: Part of it that was spent looking up drafts.
        emitted_tokens: Tokens emitted for the whole batch.
        is_truncated: Whether fewer draft tokens were verified than were proposed.
    """

    batch_size: int
    num_draft_tokens: int
    seconds: float
    draft_seconds: float
    emitted_tokens: int
    is_truncated: bool


@dataclass
class _PendingStep:
    """A step in progress.

    Attributes:
        slots: `int64 [B]`, slots of its requests.
        num_draft_tokens: Draft tokens chosen for each request.
        began: Time at which the step was proposed.
        draft_seconds: Seconds spent looking up drafts.
        tree_sizes: `int32 [B]`, sizes of the proposed trees; None if only roots were proposed.
        tokens: `int32 [B, N]`, tokens of the verified trees; -1 where there is no node. None before
            the verification.
        emitted: `int32 [B, D + 1]`, emitted tokens, padded with -1; None before the verification.
    """

    slots: torch.Tensor
    num_draft_tokens: int
    began: float
    draft_seconds: float = 0.0
    tree_sizes: AsyncHostCopy | None = None
    tokens: AsyncHostCopy | None = None
    emitted: AsyncHostCopy | None = None


def _equal(slots: torch.Tensor, others: torch.Tensor) -> bool:
    return slots is others or (slots.device.type == "cpu" and torch.equal(slots, others))


def _is_token(tokens: AsyncHostCopy) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask: np.ndarray[Any, np.dtype[np.bool_]] = tokens.wait().numpy() >= 0
    return mask


class StepTimer:
    """Times one step at a time; a step that was not verified as it was proposed is discarded."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._step: _PendingStep | None = None

    def lap(self, slots: torch.Tensor) -> StepOutcome | None:
        """End the pending step and start the clock for the next one, of requests in `slots`.

        Returns:
            The step that ended; None if there was none of the same requests, if it was not
            verified, or if one of its requests emitted nothing.
        """
        step, self._began = self._step, self._clock()
        self._step = None
        if step is None or not _equal(slots, step.slots):
            return None
        if step.tokens is None or step.emitted is None:
            return None
        emitted = _is_token(step.emitted).sum(1)
        if not (emitted > 0).all():
            return None
        batch_size = len(slots)
        proposed = batch_size if step.tree_sizes is None else step.tree_sizes.wait().numpy().sum()
        return StepOutcome(
            batch_size,
            step.num_draft_tokens,
            self._began - step.began,
            step.draft_seconds,
            int(emitted.sum()),
            # The host truncates trees near the end of a request, for example.
            is_truncated=bool(_is_token(step.tokens).sum() != proposed),
        )

    def begin_plain(self, slots: torch.Tensor) -> None:
        """Begin a step for which no drafts are looked up."""
        self._step = _PendingStep(slots, 0, self._began)

    def begin_drafted(self, slots: torch.Tensor, num_draft_tokens: int) -> None:
        """Begin a step for which drafts were looked up since `lap`."""
        draft_seconds = self._clock() - self._began
        self._step = _PendingStep(slots, num_draft_tokens, self._began, draft_seconds)

    def proposed(self, trees: DraftTree) -> None:
        """Note the trees that the pending step is to verify."""
        if self._step is not None:
            self._step.tree_sizes = AsyncHostCopy.of(trees.tree_size)

    def verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Note the outcome of the pending step; discard it if another step was verified."""
        step = self._step
        if step is None:
            return
        if step.emitted is not None or not _equal(slots, step.slots):
            self._step = None
            return
        step.tokens = AsyncHostCopy.of(trees.tokens)
        step.emitted = AsyncHostCopy.of(verified.emitted)

    def discard(self) -> None:
        """Discard the pending measurement, because a prefill ran in between, for example."""
        self._step = None
