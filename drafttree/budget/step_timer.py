"""Measures decode steps, each from one proposal of drafts to the next.

Nothing here waits for a device: the outcome of a step is read when the next one is proposed, and by
then the host has waited for the step's tokens anyway. Where steps overlap it is read one proposal
later, and so does the step itself last from the next proposal to the one after it: a device that is
never idle ends a step when the host, which is one step ahead, learns of its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from drafttree.budget.calibration import VerifiedDrafts
from drafttree.budget.tree_choice import TreeChoice
from drafttree.transfer import AsyncHostCopy
from drafttree.tree import DraftTree, Verified


@dataclass(frozen=True)
class StepOutcome:
    """A measured step.

    Attributes:
        batch_size: Number of requests.
        choice: The trees that were chosen.
        rows: Tokens that were verified, roots included. The host cuts trees near the end of a
            request, for example, so there may be fewer than were chosen.
        seconds: Time from this proposal to the next.
        draft_seconds: Part of it that was spent looking up drafts.
        emitted_tokens: Tokens emitted for the whole batch.
        catch_up_seconds: Time, not part of the others, in which a drafter's model read what it had
            missed.
        added_rows: Part of the rows that grammars have added to those that were proposed.
        given_tokens: Part of the emitted tokens that grammars make certain or likely, and that
            steps without drafts emit too.
        verified: The drafts of each request, without what grammars add.
    """

    batch_size: int
    choice: TreeChoice
    rows: int
    seconds: float
    draft_seconds: float
    emitted_tokens: int
    verified: VerifiedDrafts
    catch_up_seconds: float = 0.0
    added_rows: int = 0
    given_tokens: int = 0


@dataclass
class _PendingStep:
    """A step in progress.

    Attributes:
        slots: `int64 [B]`, slots of its requests.
        choice: The trees that were chosen.
        began: Time at which the step was proposed.
        draft_seconds: Seconds spent looking up drafts.
        catch_up_seconds: Seconds in which a drafter's model read what it had missed.
        tokens: `int32 [B, N]`, tokens of the verified trees; -1 where there is no node. None before
            the verification.
        emitted: `int32 [B, D + 1]`, emitted tokens, padded with -1; None before the verification.
        rows: Number of rows that were verified; None if they are those of the trees.
        bound: `Verified.bound`, if trees were bound to grammars.
    """

    slots: torch.Tensor
    choice: TreeChoice
    began: float
    draft_seconds: float = 0.0
    catch_up_seconds: float = 0.0
    tokens: AsyncHostCopy | None = None
    emitted: AsyncHostCopy | None = None
    rows: int | None = None
    bound: AsyncHostCopy | None = None


def _equal(slots: torch.Tensor, others: torch.Tensor) -> bool:
    return slots is others or (slots.device.type == "cpu" and torch.equal(slots, others))


def _is_token(tokens: AsyncHostCopy) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask: np.ndarray[Any, np.dtype[np.bool_]] = tokens.wait().numpy() >= 0
    return mask


class StepTimer:
    """Times steps; one that was not verified as it was proposed is discarded.

    Args:
        clock: Time in seconds.
        pads_trees: See `NodeBudget`.
        late: How many further steps are proposed before the host knows a step's tokens. If there
            are any, the host's time for looking up drafts stands for the device's.
    """

    def __init__(
        self,
        clock: Callable[[], float] = perf_counter,
        *,
        pads_trees: bool = False,
        late: int = 0,
    ) -> None:
        self._clock = clock
        self._pads_trees = pads_trees
        self._late = late
        self._began = clock()
        self._steps: deque[_PendingStep] = deque(maxlen=1 + late)

    def lap(self, slots: torch.Tensor) -> StepOutcome | None:
        """End the step whose tokens are known by now, and start the clock for the next one.

        Args:
            slots: `int64 [B]`, slots of the next step's requests.

        Returns:
            The step that ended; None if there was none of the same requests, if it was not
            verified, if one of its requests emitted nothing, or if its times cannot be right.
        """
        steps, self._began = self._steps, self._clock()
        if not all(_equal(slots, each.slots) for each in steps):
            steps.clear()
        if len(steps) <= self._late:
            return None
        step = steps.popleft()
        if step.tokens is None or step.emitted is None:
            return None
        began = steps[self._late - 1].began if self._late else step.began
        seconds = self._began - began - step.catch_up_seconds
        if not 0 <= step.draft_seconds < seconds:  # the clock stood still, or went back
            return None
        emitted = _is_token(step.emitted).sum(1)
        if not (emitted > 0).all():
            return None
        rows = self._rows(step.tokens) if step.rows is None else step.rows
        nodes, own = _is_token(step.tokens).sum(1), emitted
        added_rows = given_tokens = 0
        if step.bound is not None:
            proposed, given = step.bound.wait().numpy().T
            # What a grammar adds may be among the drafter's further candidates.
            most = 1 + step.choice.num_draft_tokens + step.choice.spine
            chosen = np.minimum(proposed, most)
            added_rows = rows - self._rows_of(chosen)
            given_tokens = int(given.sum())
            # Nodes that a grammar forbids are missing, and count as not accepted.
            nodes, own = np.where(proposed > 1, most, 1), emitted - given
        return StepOutcome(
            len(slots),
            step.choice,
            rows,
            seconds,
            step.draft_seconds,
            int(emitted.sum()),
            VerifiedDrafts(nodes - 1, own - 1),
            step.catch_up_seconds,
            added_rows,
            given_tokens,
        )

    def begin_plain(self, slots: torch.Tensor) -> None:
        """Begin a step for which no drafts are looked up."""
        self.begin(slots, TreeChoice(0))

    def begin(self, slots: torch.Tensor, choice: TreeChoice) -> None:
        """Begin a step; what is drafted for it is reported later, by `drafted`."""
        self._steps.append(_PendingStep(slots, choice, self._began))

    def drafted(self, seconds: float, catch_up_seconds: float) -> None:
        """Add to the time that drafts have taken in the pending step, and catching up with texts.

        The step's own time does not contain the latter.
        """
        if self._steps:
            self._steps[-1].draft_seconds += seconds
            self._steps[-1].catch_up_seconds += catch_up_seconds

    def begin_drafted(self, slots: torch.Tensor, choice: TreeChoice) -> None:
        """Begin a step for which drafts were looked up since `lap`."""
        draft_seconds = self._clock() - self._began
        self._steps.append(_PendingStep(slots, choice, self._began, draft_seconds))

    def verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Note the outcome of the step proposed last; discard it if another one was verified.

        It is discarded too if it has read prompts.
        """
        if not self._steps:
            return
        step = self._steps[-1]
        if step.emitted is not None or verified.reads_prompts or not _equal(slots, step.slots):
            self._steps.clear()
            return
        step.tokens = AsyncHostCopy.of(trees.tokens)
        step.emitted = AsyncHostCopy.of(verified.emitted)
        step.rows = verified.rows
        step.bound = None if verified.bound is None else AsyncHostCopy.of(verified.bound)

    def discard(self) -> None:
        """Discard pending measurements, because a prefill ran in between, for example."""
        self._steps.clear()

    def _rows(self, tokens: AsyncHostCopy) -> int:
        return tokens.values.numel() if self._pads_trees else int(_is_token(tokens).sum())

    def _rows_of(self, nodes: np.ndarray[Any, Any]) -> int:
        """Rows of trees with `nodes` nodes, `int [B]`."""
        return len(nodes) * int(nodes.max()) if self._pads_trees else int(nodes.sum())
