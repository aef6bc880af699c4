"""The node budget: what a drafter uses to choose `num_draft_tokens` in each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Self

import numpy as np
import torch

from drafttree.budget.planner import FloatArray, Planner
from drafttree.budget.recording import make_planner
from drafttree.budget.step_timer import StepTimer
from drafttree.transfer import AsyncHostCopy
from drafttree.tree import DraftTree, Verified

_CPU_SIZES = (0, 3, 7, 11, 15, 23, 31, 47, 63, 80, 127, 191, 255)
# With the root, most of them fill whole tiles of the matrix units.
_DEVICE_SIZES = (0, 7, 15, 31, 80)


def candidate_sizes(max_draft_tokens: int, device: torch.device) -> tuple[int, ...]:
    """The sizes to choose from, up to `max_draft_tokens`.

    A device other than a CPU has fewer, as a CUDA graph has to be captured for each.
    """
    sizes = _CPU_SIZES if device.type == "cpu" else _DEVICE_SIZES
    return (*(size for size in sizes if size < max_draft_tokens), max_draft_tokens)


class NodeBudget:
    """Chooses the draft tokens of each step, and measures steps to choose better.

    Any drafter can use it, in this order in each step: `should_skip_drafting`; if it returns
    False, look up candidates and call `choose` or `choose_best_first`; then `proposed` with the
    trees, and `verified` after the verification. `discard` drops a measurement that something
    other than decoding has delayed.

    Attributes:
        planner: The planner that decides.
    """

    def __init__(self, planner: Planner, clock: Callable[[], float] = perf_counter) -> None:
        self.planner = planner
        self._timer = StepTimer(clock)
        self._last: AsyncHostCopy | None = None

    @classmethod
    def from_forwards(
        cls,
        candidate_sizes: Sequence[int],
        forward_seconds: Mapping[int, float],
        clock: Callable[[], float] = perf_counter,
    ) -> Self:
        """Plan from the measured costs of the target's forwards.

        Steps are recorded if the environment variable `DRAFTTREE_RECORD_STEPS` names a file.

        Args:
            candidate_sizes: Numbers of draft tokens to choose from, ascending from 0.
            forward_seconds: Seconds of a forward by token count, from `measure_forwards`.
            clock: Time in seconds.

        Raises:
            ValueError: The sizes do not ascend from 0, or there is no forward.
        """
        return cls(make_planner(candidate_sizes, forward_seconds), clock)

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
                each of the S candidate sizes, bonus token included. On a device the values of the
                step before are used, so that the host does not wait for them.
        """
        return self._choose(slots, expected_tokens, lambda tokens: tokens)

    def choose_best_first(self, slots: torch.Tensor, scores: torch.Tensor) -> int:
        """Choose for trees that take their nodes best first.

        Args:
            slots: `int64 [B]`, slots of the requests.
            scores: `float32 [B, F]`, the probability that each node is accepted; column 0 is the
                root. On a device the scores of the step before are used.
        """
        return self._choose(slots, scores, self._expected_tokens)

    def proposed(self, trees: DraftTree) -> None:
        """Note the trees that were made after `choose`."""
        self._timer.proposed(trees)

    def verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Note the outcome of a step; the trees are those that were verified."""
        self._timer.verified(slots, trees, verified)

    def discard(self) -> None:
        """Discard the pending measurement, because a prefill ran in between, for example."""
        self._timer.discard()

    def explain(self) -> list[dict[str, float]]:
        """Predictions and measurements by batch bucket and size; see `StepReport.rows`."""
        return self.planner.explain()

    def _choose(
        self,
        slots: torch.Tensor,
        values: torch.Tensor,
        to_expected_tokens: Callable[[FloatArray], FloatArray],
    ) -> int:
        copy = AsyncHostCopy.of(values)
        known = copy if copy.arrived is None or self._last is None else self._last
        self._last = copy
        # In float32, as in a recording.
        expected_tokens = to_expected_tokens(known.wait().numpy().astype(np.float32, copy=False))
        num_draft_tokens = self.planner.choose(len(slots), expected_tokens)
        self._timer.begin_drafted(slots, num_draft_tokens)
        return num_draft_tokens

    def _expected_tokens(self, scores: FloatArray) -> FloatArray:
        """1 plus the sum of each size's highest scores, `[B, S]`; NumPy is faster here."""
        best_first = -np.sort(-scores[:, 1:], 1)
        drafts = np.pad(best_first.cumsum(1), ((0, 0), (1, 0)))
        expected: FloatArray = (
            1 + drafts[:, np.minimum(self.planner.candidate_sizes, best_first.shape[1])]
        )
        return expected

    def _record(self, slots: torch.Tensor) -> None:
        step = self._timer.lap(slots)
        if step is None:
            return
        if step.is_truncated:
            self.planner.record_truncated_step(step.batch_size, step.seconds, step.emitted_tokens)
            return
        self.planner.record_step(
            step.batch_size,
            step.num_draft_tokens,
            step.seconds,
            step.draft_seconds,
            step.emitted_tokens,
        )
