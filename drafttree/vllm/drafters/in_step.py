"""Base class of model runners that draft at the beginning of the step that verifies.

Such drafters write KV, so they need slots first. The scheduler grants slots for placeholders, and
the next step replaces these by draft tokens before the target runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tree_kernels.mask import tree_mask
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

from drafttree.drafter import AcceptanceRule
from drafttree.tree import DraftTree, Verified
from drafttree.vllm import patches
from drafttree.vllm.drafters.columns import as_scheduled
from drafttree.vllm.runner import TreeModelRunner
from drafttree.vllm.sampling import sample_trees
from drafttree.vllm.step import StepState
from drafttree.vllm.step_logits import StepLogits
from drafttree.vllm.structured.binding import not_in_schedulers_process
from drafttree.vllm.structured.shapes import Drafted, Proposal

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

PLACEHOLDER = 0
"""Token id of each node until it is drafted."""


@dataclass
class InStepState(StepState):
    """A step that drafts the trees it verifies.

    Attributes:
        input_ids: Input tokens of the step's forward; draft tokens are written into them.
        positions: Positions of these tokens.
        root_positions: Positions of the roots, `int64 [B]`.
        scheduled: The step as the scheduler has scheduled it.
    """

    input_ids: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)
    root_positions: torch.Tensor = field(init=False)
    scheduled: SchedulerOutput = field(init=False)


I = TypeVar("I", bound=InStepState)  # noqa: E741


class InStepRunner(TreeModelRunner[I]):
    """Base class of runners that draft within the step."""

    def _draft(self, step: I, roots: torch.Tensor) -> DraftTree:
        """Draft the trees of a step, within the engine's forward context.

        Args:
            step: The step.
            roots: Last token of each request, `int32 [B]`.

        Returns:
            The trees to verify, with the columns that the engine scheduled.
        """
        raise NotImplementedError

    def _sampler_and_rule(self, step: I) -> tuple[Sampler, AcceptanceRule | None]:
        """The sampler that verifies the step's trees, and its acceptance rule if it has one."""
        return self.sampler, None

    def _model_forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        step = self._step
        if step is not None:
            assert input_ids is not None
            assert positions is not None
            started = perf_counter()
            root_rows = step.trees.rows[step.trees.tensors.starts]
            step.input_ids, step.positions = input_ids, positions
            step.root_positions = positions[root_rows].clone()
            step.drafts = self._draft(step, input_ids[root_rows].to(torch.int32))
            if step.trees.drafted:
                self.draft_seconds += perf_counter() - started
                self._show_bound(step)
        return super()._model_forward(input_ids, positions, *args, **kwargs)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, *args)
        step = self._step
        assert step is not None
        step.scheduled = scheduler_output
        return prepared

    def _why_no_bound_drafts(self) -> str | None:
        return super()._why_no_bound_drafts() or not_in_schedulers_process(self.parallel_config)

    def _bound_proposal(self, name: str, share: int, most_proposed: int) -> Proposal | None:
        """None: the scheduler is given placeholders."""
        return None

    def _show_bound(self, step: I) -> None:
        """Show the trees of requests with a grammar to the scheduler, which masks their nodes."""
        if not self._grammar_bound:
            return
        rows = enumerate(zip(self.input_batch.req_ids, step.trees.tree_sizes, strict=True))
        trees = {
            name: Drafted(
                step.drafts.tokens[row, :size].tolist(), step.drafts.parents[row, :size].tolist()
            )
            for row, (name, size) in rows
            if size > 1 and name in self._grammar_bound
        }
        patches.show_drafted(step.scheduled, lambda: trees)

    def _as_scheduled(self, step: I, trees: DraftTree) -> DraftTree:
        """Truncate or pad trees to the columns that the engine scheduled, `[B, N]`.

        Args:
            step: The step.
            trees: The trees as drafted, with fewer or more columns than were scheduled.
        """
        tensors = step.trees.tensors
        return as_scheduled(trees, tensors.tree_size, tensors.padding)

    def _show_trees(self, step: I, parents: torch.Tensor) -> None:
        """Let attention apply the masks of the trees' first columns.

        Args:
            step: The step.
            parents: Parents of these columns, `int32 [B, n]`.
        """
        assert step.masks is not None
        masks = step.masks.masks
        columns = parents.shape[1]
        padded = torch.full(masks.shape[:2], -1, dtype=torch.int32)
        padded[:, :columns] = parents[step.masks.requests]
        masks.copy_(tree_mask(padded, step.masks.tree_sizes.to(torch.int32).clamp(max=columns)))

    def _verify(self, step: I, logits: StepLogits) -> tuple[SamplerOutput, Verified]:
        sampler, rule = self._sampler_and_rule(step)
        return sample_trees(self.input_batch, sampler, step.trees, step.drafts, logits, rule=rule)
