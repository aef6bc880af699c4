"""vLLM's V2 model runner with drafters that write KV: they draft within the step that verifies.

The KV of such a drafter is that of more layers in the engine's cache groups, so it can draft when
the step's slots exist: right before the target runs. Until then the engine's draft tokens are
placeholders, and the speculator's trees, which have no nodes, only reserve places.

Where shapes are chosen, the scheduler has chosen one when it scheduled the placeholders: their
number names it. It learns from what travels with a step's output.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tree_kernels.mask import tree_mask
from tree_kernels.scheduled_trees import Layout
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.v1.worker.gpu.input_batch import InputBatch

from drafttree.chains import first_paths
from drafttree.method import Method
from drafttree.transfer import on_device
from drafttree.tree import DraftTree, Verified
from drafttree.tree_shape import TreeShape
from drafttree.vllm.drafters.columns import as_scheduled
from drafttree.vllm.drafters.step_parts import StepCache, StepParts
from drafttree.vllm.step_masks import StepMasks
from drafttree.vllm.v2.draft_clock import DraftClock
from drafttree.vllm.v2.hooks import check_forward, check_graphs
from drafttree.vllm.v2.runner import TreeRunnerV2


class InStepRunnerV2(TreeRunnerV2):
    """Base class of runners that draft within the step.

    Attributes:
        _context: The engine's forward context in this step.
        _clock: Measures the drafts of this step.
    """

    dropped = (*TreeRunnerV2.dropped, "_batch", "_seen", "_context", "_shown")
    _batch: InputBatch | None = None
    _seen: InputBatch | None = None
    _context: ForwardContext
    _clock: DraftClock

    def draft(self, batch: InputBatch, step: Layout) -> Layout:
        """Draft within the engine's forward context, and write the trees into the step.

        Called in each step, even if no draft tokens were scheduled.

        Returns:
            The step with its trees.
        """
        raise NotImplementedError

    @property
    def _plans(self) -> bool:
        """Whether the scheduler chooses the shapes of the trees."""
        return bool(self._reports.shapes)

    def _shape_of(self, step: Layout) -> TreeShape:
        """The shape that was chosen for a step with drafts.

        Where the scheduler has cut the trees of all requests it is the smallest one that has as
        many nodes, of which the first ones are drafted.
        """
        drafts = step.width - 1
        return next(shape for shape in self._reports.shapes if shape.nodes >= drafts)

    def _num_unread(self, batch: InputBatch) -> int:
        """How many tokens of the batch's texts the drafter has to read before it can draft."""
        return 0

    def _make_drafter(self, method: Method[Any], options: Any) -> None:
        """Make the drafter, when the target has been loaded."""
        raise NotImplementedError

    def _set_up_drafter(self, method: Method[Any], options: Any) -> None:
        self._method = method
        self._options = options

    def _load_drafter(self) -> None:
        self._make_drafter(self._method, self._options)
        self._drafter.allocate(self.max_num_reqs, self.max_model_len)
        self.get_model().register_forward_pre_hook(self._before_forward)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Build the KV caches, and choose the CUDA graphs."""
        super().initialize_kv_cache(*args, **kwargs)
        check_graphs(self)

    def warmed_up(self) -> None:
        """Forget the requests of the engine's warm-up."""
        self._drafter.reset()

    def prepare_attn(self, input_batch: InputBatch) -> Any:
        """Lay out the step, in which no tree has a node yet."""
        self._batch = input_batch
        return super().prepare_attn(input_batch)

    def _set_step_masks(self, masks: StepMasks | None) -> None:
        if masks is not None:
            self._shown = masks.masks
        super()._set_step_masks(masks)

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any
    ) -> Any:
        """Sample, verify, and compact the KV caches."""
        check_forward(self._seen, input_batch)
        return super().sample(hidden_states, input_batch, *args, **kwargs)

    def _before_forward(self, *args: Any) -> None:
        step, batch = self._step, self._batch
        if step is None or batch is None:  # a forward that serves no request
            return
        self._context, self._seen = get_forward_context(), batch
        self._clock = DraftClock(self.device)
        with self._drafting():
            self._step = drafted = self.draft(batch, step)
        self._show_bound(batch, drafted)

    def _drafting(self) -> AbstractContextManager[None]:
        """While it is open, drafting is measured, if shapes are chosen by it."""
        return self._clock.drafting() if self._plans else nullcontext()

    def _on_verified(
        self, batch: InputBatch, step: Layout, trees: DraftTree, verified: Verified
    ) -> None:
        if self._plans:
            unread = self._num_unread(batch)
            self._reports.begin_drafts(trees.parents, verified.path, self._clock, unread)

    # What drafting needs.

    def _parts(self, requests: int, prefix: str) -> StepParts:
        """The parts of the step's first `requests` requests, for one drafter's layers.

        The names of these layers begin with `prefix`.
        """
        tables = self.block_tables
        blocks = (each[:requests] for each in tables.input_block_tables)
        caches = zip(blocks, tables.slot_mappings, tables.block_sizes, strict=True)
        return StepParts(self, prefix, [StepCache(*each) for each in caches])

    @staticmethod
    def _roots(batch: InputBatch, step: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """The roots' tokens, `int32 [B]`, and their positions, `int64 [B]`."""
        places = step.place_of_node[:, 0]
        return batch.input_ids[places].int(), batch.positions[places]

    def _write_tokens(self, batch: InputBatch, step: Layout, trees: DraftTree) -> None:
        """Replace the placeholders by the trees' tokens, `[B, N]`.

        The models embed all columns, so those without a node hold the root's token.
        """
        tokens = torch.where(trees.tokens >= 0, trees.tokens, trees.tokens[:, :1])
        batch.input_ids[batch.logits_indices] = step.by_row(tokens, batch.expanded_local_pos).to(
            batch.input_ids.dtype
        )

    @staticmethod
    def _move_rows(batch: InputBatch, by: torch.Tensor) -> None:
        """Add to the positions of the trees' rows, `[R]`, which at first are the roots'."""
        batch.positions.index_add_(0, batch.logits_indices, by.to(batch.positions.dtype))

    def _show_trees(self, step: Layout, parents: torch.Tensor) -> None:
        """Let attention apply the masks of trees, `int32 [B, N]`."""
        self._shown.copy_(tree_mask(parents, step.sizes))
        for builder in self._builders():
            builder.masks_changed()

    @staticmethod
    def _scheduled(
        step: Layout, trees: DraftTree, undrafted: torch.Tensor | None = None
    ) -> DraftTree:
        """Trees in the columns that the engine scheduled.

        Args:
            step: The step.
            trees: The trees as drafted.
            undrafted: Requests that get no nodes, `bool [B]`; None for none.
        """
        sizes = step.sizes if undrafted is None else step.sizes.masked_fill(undrafted, 1)
        columns = torch.arange(step.width, device=sizes.device)
        return as_scheduled(trees, step.sizes, columns >= sizes[:, None])

    def _undrafted(self, batch: InputBatch, step: Layout) -> torch.Tensor:
        """Which requests get no draft tokens in this step, `bool [B]`."""
        flags = self._rules.undrafted(batch.idx_mapping_np)
        return ~step.begun if flags is None else on_device(flags, self.device) | ~step.begun

    def _cut(self, batch: InputBatch, trees: DraftTree) -> tuple[DraftTree, torch.Tensor | None]:
        """Cut the trees of requests whose logits depend on their texts to chains.

        Returns:
            The trees, and which columns their nodes had, see `first_paths`; None for the same.
        """
        chained = self._rules.chained(batch.idx_mapping_np)
        if chained is None:
            return trees, None
        return first_paths(trees, on_device(chained, self.device), self._drafter.max_depth)
