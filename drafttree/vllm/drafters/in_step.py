"""Base class of model runners that draft at the beginning of the step that verifies.

Such drafters write KV, so they need slots first. The scheduler grants slots for placeholders, and
the next step replaces these by draft tokens before the target runs. Where trees are planned, those
in which the model has no part are drafted before the step, but take the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from tree_kernels.mask import depths, tree_mask
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

from drafttree.acceptance_rules import AcceptanceRule
from drafttree.arrays import IntArray, LongArray
from drafttree.model_drafters import ModelDrafter
from drafttree.tensor_parallel import broadcast_trees, is_drafting_rank
from drafttree.transfer import AsyncHostCopy, on_device
from drafttree.tree import DraftTree, Verified
from drafttree.vllm.drafters.columns import as_scheduled, of_first_rank, without_nodes
from drafttree.vllm.drafters.known_trees import KnownTrees
from drafttree.vllm.drafters.observing import observer, start_text
from drafttree.vllm.drafters.step_parts import StepCache, StepParts
from drafttree.vllm.priming import prime
from drafttree.vllm.runner import TreeModelRunner
from drafttree.vllm.sampling import Observe, sample_trees
from drafttree.vllm.step import StepState
from drafttree.vllm.step_logits import StepLogits
from drafttree.vllm.structured.shapes import Drafted, Proposal
from drafttree.vllm.structured.shown_trees import TreeSender, why_not_shown

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
        rows: Place of each node among these tokens, `int [B, N]`; padding repeats a request's last.
        root_positions: Positions of the roots, `int64 [B]`.
        scheduled: The step as the scheduler has scheduled it.
        ends: Number of tokens of each request up to and with its last row in the step, drafts
            counted, `int64 [B]`, on the host.
        read_tokens: Tokens of texts that a draft model had missed, and has read in this step.
        read_seconds: The time that this took.
        model_drafts: Whether the drafter's model has drafted.
    """

    input_ids: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)
    rows: torch.Tensor = field(init=False)
    root_positions: torch.Tensor = field(init=False)
    scheduled: SchedulerOutput = field(init=False)
    ends: LongArray = field(init=False)
    read_tokens: int = 0
    read_seconds: float = 0.0
    model_drafts: bool = False


I = TypeVar("I", bound=InStepState)  # noqa: E741


class InStepRunner(TreeModelRunner[I]):
    """Base class of runners that draft within the step."""

    _drafter: ModelDrafter
    # What was proposed for the step to come, if the model is to have no part in it.
    _known: KnownTrees | None = None

    def set_up(self, *args: Any, **kwargs: Any) -> None:
        """Prepare an adopted runner, before its model is loaded."""
        super().set_up(*args, **kwargs)
        if self._no_bound_drafts is None and is_drafting_rank(get_tp_group()):
            self._tree_sender = TreeSender(self.vllm_config, self.device)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Run the target, after the step's trees were drafted."""
        with self._shows_trees(scheduler_output):
            return super().execute_model(scheduler_output, *args, **kwargs)

    def prime(self, blocks: Sequence[int], *, idle: bool) -> tuple[int, int]:
        """Let the drafter's tables compute something beforehand, if there are any."""
        tables = self._drafter.tables
        return (0, 0) if tables is None else prime(self, tables, blocks, idle=idle)

    def _request_started(self, name: str, slot: int) -> None:
        if self._drafter.tables is not None:
            start_text(self, self._drafter.tables, name, slot)

    def _propose_without_model(self, slots: torch.Tensor, roots: IntArray) -> DraftTree:
        """Draft the trees of the step to come, and propose placeholders for them.

        Args:
            slots: Slots of the requests, `int64 [B]`.
            roots: Their last tokens; -1 for requests that are not drafted for.
        """
        tensor = on_device(roots, self.device)
        trees = DraftTree.of_roots(tensor)
        if (roots >= 0).any():
            trees = self._as_declared(self._drafter.propose_without_model(slots, tensor))
            trees = broadcast_trees(trees, self.num_spec_tokens, get_tp_group())
        self._known = KnownTrees([*self.input_batch.req_ids], trees)
        if not trees.drafted:
            return trees
        return self._placeholders(trees.tree_size, trees.tokens.shape[1])

    def _placeholders(self, sizes: torch.Tensor, width: int) -> DraftTree:
        """Trees of `sizes [B]` columns, at most `width`, to be drafted in the step.

        The drafter may know the sizes on the device alone.
        """
        shape = len(sizes), width
        tokens = torch.full(shape, PLACEHOLDER, dtype=torch.int32, device=self.device)
        parents = torch.zeros_like(tokens)
        parents[:, 0] = -1
        return self._as_declared(DraftTree(tokens, parents, sizes.int()))

    def _trees_without_model(self, step: I, roots: torch.Tensor) -> DraftTree | None:
        """The trees of a step in which the model has no part; None if it is to draft.

        Requests that were left out of the step before get none.
        """
        if not step.trees.drafted:
            return DraftTree.of_roots(roots)
        if self._known is None:
            return None
        return self._place_trees(step, self._known.of_batch(self.input_batch.req_ids, roots))

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
            step.rows = step.trees.by_node(step.trees.rows)
            step.input_ids, step.positions = input_ids, positions
            step.root_positions = positions[step.rows[:, 0]]
            step.drafts = self._draft(step, input_ids[step.rows[:, 0]].to(torch.int32))
            if step.trees.drafted:
                seconds = perf_counter() - started
                self.draft_seconds += seconds
                drafting = seconds - step.read_seconds
                self._drafter.drafted(drafting, step.read_tokens, step.read_seconds)
                self._show_bound(step)
        return super()._model_forward(input_ids, positions, *args, **kwargs)

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        step = self._step
        assert step is not None
        step.scheduled = scheduler_output
        computed = self.input_batch.num_computed_tokens_cpu[: len(num_scheduled_tokens)]
        step.ends = computed.astype(np.int64) + num_scheduled_tokens
        return prepared

    def _why_no_bound_drafts(self) -> str | None:
        return super()._why_no_bound_drafts() or why_not_shown(self.parallel_config)

    def _bound_proposal(self, name: str, share: int, most_proposed: int) -> Proposal | None:
        """None: the scheduler is given placeholders."""
        return None

    def _show_bound(self, step: I) -> None:
        """Show the trees of requests with a grammar to the scheduler, which masks their nodes."""
        if self._tree_sender is None or not self._grammar_bound:
            return
        drafts, names = step.drafts, [*self.input_batch.req_ids]
        sizes, bound = step.trees.tree_sizes, {*self._grammar_bound}
        packed = AsyncHostCopy.of(torch.cat((drafts.tokens, drafts.parents), 1))

        def drafted() -> dict[str, Drafted]:
            tokens, parents = packed.wait().chunk(2, 1)
            return {
                name: Drafted(tokens[row, :size].tolist(), parents[row, :size].tolist())
                for row, (name, size) in enumerate(zip(names, sizes, strict=True))
                if size > 1 and name in bound
            }

        self._tree_sender.show(step.scheduled, drafted)

    def _as_scheduled(self, step: I, trees: DraftTree) -> DraftTree:
        """Truncate or pad trees to the columns that the engine scheduled, `[B, N]`.

        Args:
            step: The step.
            trees: The trees as drafted, with fewer or more columns than were scheduled.
        """
        tensors = step.trees.tensors
        return as_scheduled(trees, tensors.tree_size, tensors.padding)

    def step_parts(self, prefix: str) -> StepParts:
        """The parts of this step, for the layers whose names begin with `prefix`."""
        tables, requests = self.input_batch.block_table.block_tables, self.input_batch.num_reqs
        caches = [
            StepCache(each.get_device_tensor(requests), each.slot_mapping.gpu, each.block_size)
            for each in tables
        ]
        return StepParts(self, prefix, caches)

    def _show_trees(self, step: I, parents: torch.Tensor) -> None:
        """Let attention apply the masks of the trees' first columns; others see themselves alone.

        Args:
            step: The step.
            parents: Parents of these columns, `int32 [B, n]`.
        """
        assert step.masks is not None
        masks = step.masks.masks
        missing = masks.shape[1] - parents.shape[1]
        padded = torch.nn.functional.pad(parents[step.masks.requests], (0, missing), value=-1)
        masks.copy_(tree_mask(padded, step.masks.tree_sizes.to(torch.int32)))
        for builder in self._builders():
            builder.masks_changed()

    def _write_tokens(self, step: I, tokens: torch.Tensor) -> None:
        """Replace the step's placeholders by draft tokens.

        Args:
            step: The step.
            tokens: Tokens of the trees' first columns, `int32 [B, n]`; -1 where there is none.
        """
        missing = step.rows.shape[1] - tokens.shape[1]
        known = torch.nn.functional.pad(tokens.clamp(min=PLACEHOLDER), (0, missing))
        step.input_ids[step.trees.rows] = step.trees.by_row(known).to(step.input_ids.dtype)

    def _place_trees(self, step: I, trees: DraftTree) -> DraftTree:
        """Put trees, as drafted on this rank, in the place of the step's placeholders.

        Args:
            step: The step.
            trees: The trees, whose depths the scheduler does not know.

        Returns:
            The trees to verify.
        """
        placed = self._place_nodes(step, of_first_rank(self._as_scheduled(step, trees)))
        self._write_tokens(step, placed.tokens)
        self._show_trees(step, placed.parents)
        return placed

    def _place_nodes(self, step: I, trees: DraftTree) -> DraftTree:
        """Give the rows of nodes the positions of their depths.

        Args:
            step: The step.
            trees: The trees' first columns, whose depths the scheduler does not know.

        Returns:
            The trees without nodes beyond the end of a request, which have no position.
        """
        depth = depths(trees.parents, trees.tree_size)
        left = np.array([*map(self._tokens_left, self.input_batch.req_ids)])
        within = depth < on_device(left, self.device)[:, None]
        kept = without_nodes(trees, ~within)
        missing = step.rows.shape[1] - depth.shape[1]
        depth = torch.nn.functional.pad(depth.masked_fill(~within, 0), (0, missing))
        positions = step.trees.by_row(step.root_positions[:, None] + depth)
        step.positions[step.trees.rows] = positions.to(step.positions.dtype)
        return kept

    def _observer(self, step: I) -> Observe | None:
        """What observes the step's logits before they are masked, if anything does."""
        tables = self._drafter.tables
        if tables is None:
            return None
        tokens = step.trees.by_row(step.drafts.tokens)
        slots, partial = self._batch_slots(), self._partial_prefills()
        return observer(tables, slots, step.trees, step.drafts, tokens, partial)

    def _max_depth(self, step: I) -> int:
        """Greatest depth of a node of the step's trees, or more."""
        if step.model_drafts:
            # The scheduler has been given placeholders of depth 1.
            return min(self._drafter.max_depth, step.rows.shape[1] - 1)
        if not step.trees.drafted:
            return 0
        return int(depths(step.drafts.parents, step.drafts.tree_size).max())

    def _verify(self, step: I, logits: StepLogits) -> tuple[SamplerOutput, Verified]:
        sampler, rule = self._sampler_and_rule(step)
        depth = self._max_depth(step)
        return sample_trees(
            self.input_batch,
            sampler,
            step.trees,
            step.drafts,
            logits,
            depth,
            self._observer(step),
            rule,
            self._ends_of_seeded(),
        )
