"""vLLM's V2 model runner with a layer that continues the target's hidden states.

After verification the layer reads the step's tokens, the accepted path as if it came right after
the root. Where shapes are chosen, it reads those of several steps at a time while nothing is
drafted. The host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from tree_kernels.layer_rows import rows_to_read
from tree_kernels.mask import depths
from tree_kernels.scheduled_trees import Layout
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import override_forward_context
from vllm.v1.worker.gpu.input_batch import InputBatch

from drafttree.deferred_rows import DeferredRows
from drafttree.method import Method
from drafttree.model_drafters import HiddenStateDrafter
from drafttree.tree import DraftTree, Verified
from drafttree.vllm.adapters import unadapted_target
from drafttree.vllm.drafters.draft_chains import DraftChains
from drafttree.vllm.drafters.draft_layer import LAYER, DraftLayer
from drafttree.vllm.v2.hooks import check_next_tokens
from drafttree.vllm.v2.in_step import InStepRunnerV2


class HiddenStateRunnerV2(InStepRunnerV2):
    """Drafts with a `HiddenStateDrafter`."""

    dropped = (*InStepRunnerV2.dropped, "_unadapted", "_layer", "_deferred", "_hidden")
    _drafter: HiddenStateDrafter
    _deferred: DeferredRows[int] | None = None

    def _make_drafter(self, method: Method[Any], options: Any) -> None:
        check_next_tokens(self.req_states, self.max_num_reqs)
        # The drafter needs the target's embeddings.
        self._unadapted = unadapted_target(self)
        self._drafter = method.drafter(options, self._target(self._unadapted.embed_input_ids))
        self._layer = DraftLayer(
            *(self._drafter, self.vllm_config, self.max_num_reqs, self.device),
            *(get_tp_group(), self._unadapted.compute_logits),
        )
        self._layer.capture_with(
            *(self.get_model(), lambda: self._step is not None, lambda: self._parts(0, LAYER)),
            plans=self._plans,
        )
        self._deferred = DeferredRows() if self._plans else None

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Build the KV caches, for which no graph of the layer is captured yet."""
        super().initialize_kv_cache(*args, **kwargs)
        self._layer.forget_graphs()

    def _stop(self, row: int) -> None:
        super()._stop(row)
        if self._deferred is not None:
            self._deferred.forget([row])

    def draft(self, batch: InputBatch, step: Layout) -> Layout:
        """Run the layer on its own outputs, and build the trees from its logits."""
        if step.width == 1:
            return step
        if self._plans:
            self._drafter.follow_plan(self._shape_of(step))
            with self._clock.reading():
                self._clock.read_tokens = self._read_deferred(batch)
        sizes = step.sizes.long()
        steps = self._layer.valid_steps(sizes).masked_fill(self._undrafted(batch, step), 0)
        chains = DraftChains(
            *(batch.idx_mapping, *self._roots(batch, step), step.place_of_node, sizes), steps
        )
        trees = self._layer.draft(chains, self._parts(batch.num_reqs, LAYER))
        trees, _ = self._cut(batch, self._scheduled(step, trees))
        self._write_tokens(batch, step, trees)
        depth = depths(trees.parents, step.sizes)
        self._move_rows(batch, step.by_row(depth, batch.expanded_local_pos))
        self._show_trees(step, trees.parents)
        return step._replace(parents=trees.parents)

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any
    ) -> Any:
        """Sample, verify, compact the KV caches, and let the layer read the step's tokens."""
        self._hidden = hidden_states
        return super().sample(hidden_states, input_batch, *args, **kwargs)

    def _on_verified(
        self, batch: InputBatch, step: Layout, trees: DraftTree, verified: Verified
    ) -> None:
        self._drafter.on_verified(batch.idx_mapping, trees, verified)
        if self._deferred is None or not self._defers(self._deferred, batch, verified):
            with self._drafting():
                self._read(batch, step, verified)
        super()._on_verified(batch, step, trees, verified)

    def _defers(self, deferred: DeferredRows[int], batch: InputBatch, verified: Verified) -> bool:
        """Whether the tokens of a step are read later, as nothing else is to be read."""
        if batch.num_draft_tokens:
            return False
        is_alone = batch.num_tokens == batch.num_reqs
        is_due = not is_alone
        if is_alone:
            rows, requests = batch.logits_indices, batch.idx_mapping_np.tolist()
            tokens = self._following(batch, verified)[:, 0]
            is_due = deferred.add(requests, self._hidden[rows], tokens, batch.positions[rows])
        if is_due:
            with override_forward_context(self._context):
                self._read_deferred(batch)
        return is_alone

    def _read_deferred(self, batch: InputBatch) -> int:
        """Let the layer read what was accepted in the steps before; returns how many tokens."""
        deferred = self._deferred
        rows = None if deferred is None else deferred.take(batch.idx_mapping_np.tolist())
        if rows is None:
            return 0
        self._layer.read(rows, batch.idx_mapping, self._parts(batch.num_reqs, LAYER))
        return int(rows.counts.sum())

    def _following(self, batch: InputBatch, verified: Verified) -> torch.Tensor:
        """The tokens after the rows of the accepted paths, `int32 [B, D + 1]`.

        They are those emitted, but a prompt that is read in part goes on with its own next token.
        """
        of_prompts = self.req_states.next_prefill_tokens[0, batch.idx_mapping][:, None]
        return torch.where(verified.emitted < 0, of_prompts, verified.emitted)

    def _read(self, batch: InputBatch, step: Layout, verified: Verified) -> None:
        """Run the layer on the step's tokens, and store its output after each accepted path.

        Rows behind an accepted path are read too: their KV is written again before it is read.
        """
        starts = batch.query_start_loc[: batch.num_reqs + 1]
        following = self._following(batch, verified)
        rows = rows_to_read(
            *(batch.input_ids, batch.positions[: len(batch.input_ids)], starts),
            *(step.sizes, verified.path, following),
        )
        parts = self._parts(batch.num_reqs, LAYER)
        with override_forward_context(self._context):
            self._layer.read_step(rows, self._hidden, batch.idx_mapping, parts)
