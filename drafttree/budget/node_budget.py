"""The node budget: what a drafter uses to choose `num_draft_tokens` in each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Self

import numpy as np
import torch

from drafttree.arrays import FloatArray
from drafttree.budget.planner import Planner
from drafttree.budget.recording import make_planner
from drafttree.budget.step_timer import StepTimer
from drafttree.budget.tree_choice import TreeChoice
from drafttree.transfer import AsyncHostCopy
from drafttree.tree import DraftTree, Verified

_CPU_SIZES = (0, 3, 7, 11, 15, 23, 31, 47, 63, 80, 127, 191, 255)
# With the root, most of them fill whole tiles of the matrix units.
_DEVICE_SIZES = (0, 3, 7, 15, 31, 80)


def candidate_sizes(max_draft_tokens: int, device: torch.device) -> tuple[int, ...]:
    """The sizes to choose from, up to `max_draft_tokens`.

    A device other than a CPU has fewer, as a CUDA graph has to be captured for each.
    """
    sizes = _CPU_SIZES if device.type == "cpu" else _DEVICE_SIZES
    return (*(size for size in sizes if size < max_draft_tokens), max_draft_tokens)


class NodeBudget:
    """Chooses the draft tokens of each step, and measures steps to choose better.

    Any drafter can use it, in this order in each step: `should_skip_drafting`; if it returns
    False, look up candidates and call `choose` or `choose_best_first`; then `verified` after the
    verification. `discard` drops a measurement that something other than decoding has delayed.

    Attributes:
        planner: The planner that decides.
        pads_trees: Whether a step verifies as many rows of each request as of the largest tree.
    """

    def __init__(
        self,
        planner: Planner,
        clock: Callable[[], float] = perf_counter,
        *,
        pads_trees: bool = False,
        late: int = 0,
    ) -> None:
        self.planner = planner
        self._timer = StepTimer(clock, pads_trees=pads_trees, late=late)
        self.pads_trees = pads_trees
        self._late = late
        self._known: deque[AsyncHostCopy] = deque(maxlen=2 + late)

    @classmethod
    def from_forwards(
        cls,
        candidate_sizes: Sequence[int],
        forward_seconds: Mapping[int, float],
        clock: Callable[[], float] = perf_counter,
        *,
        pads_trees: bool = False,
        late: int = 0,
    ) -> Self:
        """Plan from the measured costs of the target's forwards.

        Steps are recorded if the environment variable `DRAFTTREE_RECORD_STEPS` names a file and no
        outcome is late.

        Args:
            candidate_sizes: Numbers of draft tokens to choose from, ascending from 0.
            forward_seconds: Seconds of a forward by token count, from `measure_forwards`.
            clock: Time in seconds.
            pads_trees: Whether a step verifies as many rows of each request as of the largest
                tree, so that further nodes of one request cost as many of all.
            late: How many further steps the host proposes before it knows a step's outcome.

        Raises:
            ValueError: The sizes do not ascend from 0, or there is no forward.
        """
        if late:
            planner = Planner(candidate_sizes, forward_seconds, late=late)
        else:
            planner = make_planner(candidate_sizes, forward_seconds)
        return cls(planner, clock, pads_trees=pads_trees, late=late)

    def should_skip_drafting(self, slots: torch.Tensor) -> bool:
        """Whether the next step, of the requests in `slots` (`int64 [B]`), is plain."""
        self._record(slots)
        if not self.planner.should_skip_drafting(len(slots)):
            return False
        self._timer.begin_plain(slots)
        return True

    def choose(self, slots: torch.Tensor, expected_tokens: torch.Tensor) -> int:
        """Choose the number of draft tokens of each request in the next step.

        Args:
            slots: `int64 [B]`, slots of the requests.
            expected_tokens: `float32 [B, S]`, the tokens that each request is expected to emit at
                each of the S candidate sizes, bonus token included. On a device the values of an
                earlier step are used, so that the host does not wait for them.
        """
        known, _ = self._on_host(expected_tokens, unknown=1.0)
        num_draft_tokens = self.planner.choose(len(slots), known)
        self._timer.begin_drafted(slots, TreeChoice(num_draft_tokens))
        return num_draft_tokens

    def choose_best_first(
        self, slots: torch.Tensor, scores: torch.Tensor, most: int | None = None
    ) -> TreeChoice:
        """Choose for trees that take their nodes best first.

        Args:
            slots: `int64 [B]`, slots of the requests.
            scores: `float32 [B, F]`, the probability that each node is accepted; column 0 is the
                root. On a device the scores of an earlier step are used, and all trees have the
                same number of draft tokens, as a CUDA graph verifies them.
            most: Greatest number of draft tokens in this step; None for that of the largest size.
        """
        known, is_current = self._on_host(scores, unknown=0.0)
        sizes = self.planner.candidate_sizes
        best_first = _best_first(known, sizes[-1])
        if most is not None:
            # What cannot be verified is worth nothing, and the planner chooses no such size.
            best_first[:, max(size for size in sizes if size <= most) :] = 0
        if is_current:
            extends = not (self.pads_trees and len(slots) > 1)
            choice = self.planner.choose_best_first(len(slots), best_first, extends=extends)
        else:
            expected_tokens = self.planner.expected_tokens(best_first)
            choice = TreeChoice(self.planner.choose(len(slots), expected_tokens))
        self._timer.begin_drafted(slots, choice)
        return choice

    def appraise(self, slots: torch.Tensor, scores: torch.Tensor) -> None:
        """Note what drafts would be worth in a step for which another drafter drafts.

        Args:
            slots: `int64 [B]`, slots of the requests.
            scores: `float32 [B, F]`, as for `choose_best_first`.
        """
        known, _ = self._on_host(scores, unknown=0.0)
        best_first = _best_first(known, self.planner.candidate_sizes[-1])
        self.planner.choose_best_first(len(slots), best_first)

    def verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Note the outcome of a step; the trees are those that were verified."""
        self._timer.verified(slots, trees, verified)

    def discard(self) -> None:
        """Discard the pending measurement, because a prefill ran in between, for example."""
        self._timer.discard()

    def explain(self) -> list[dict[str, float]]:
        """Predictions and measurements by batch bucket and size; see `StepReport.rows`."""
        return self.planner.explain()

    def _on_host(self, values: torch.Tensor, unknown: float) -> tuple[FloatArray, bool]:
        """Values on the host in float32, as in a recording, and whether they are of this step.

        The host knows those of a device once it knows the tokens of the step that was drafted with
        them. At the engine's start it waits for them, or takes all for `unknown` if they are late.
        """
        copy = AsyncHostCopy.of(values)
        if copy.arrived is None:
            return copy.wait().numpy().astype(np.float32, copy=False), True
        self._known.append(copy)
        if len(self._known) == self._known.maxlen or not self._late:
            return self._known[0].wait().numpy().astype(np.float32, copy=False), False
        return np.full(values.shape, unknown, np.float32), False

    def _record(self, slots: torch.Tensor) -> None:
        step = self._timer.lap(slots)
        if step is None:
            return
        self.planner.record_step(
            step.batch_size,
            step.choice,
            step.rows,
            step.seconds,
            step.draft_seconds,
            step.emitted_tokens,
            step.added_rows,
            step.given_tokens,
            step.verified,
        )


def _best_first(scores: FloatArray, most: int) -> FloatArray:
    """The `most` best scores without the root's, `[B, most]`; 0 where there are fewer nodes."""
    best_first: FloatArray = -np.sort(-scores[:, 1:], 1)[:, :most]
    if best_first.shape[1] < most:
        best_first = np.pad(best_first, ((0, 0), (0, most - best_first.shape[1])))
    return best_first
