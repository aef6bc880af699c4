"""vLLM's V2 model runner with a layer that continues the target's hidden states.

The layer's KV is one more layer of the engine's cache groups, so it can draft when the step's slots
exist: right before the target runs. Until then the engine's draft tokens are placeholders. After
verification the layer reads the step's tokens, the accepted path as if it came right after the
root. The host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tree_kernels.mask import depths
from tree_kernels.scheduled_trees import Layout
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.worker.gpu.input_batch import InputBatch

from drafttree.drafter import HiddenStateDrafter
from drafttree.method import Method
from drafttree.transfer import on_device
from drafttree.tree import DraftTree, Verified
from drafttree.vllm.drafters.columns import as_scheduled
from drafttree.vllm.drafters.draft_layer import DraftLayer
from drafttree.vllm.step_masks import StepMasks
from drafttree.vllm.v2.chains import first_paths
from drafttree.vllm.v2.requests import in_chains
from drafttree.vllm.v2.runner import TreeRunnerV2
from drafttree.vllm.v2.step import masks_of


class HiddenStateRunnerV2(TreeRunnerV2):
    """Drafts with a `HiddenStateDrafter`, within the step that verifies.

    The speculator only reserves places: the trees that it keeps have no nodes.
    """

    _drafter: HiddenStateDrafter  # type: ignore[assignment]
    _batch: InputBatch | None = None

    def _set_up_drafter(self, method: Method[Any], options: Any) -> None:
        # The drafter needs the target's embeddings.
        self._method = method
        self._options = options

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target, and then the drafter with its layer."""
        super().load_model(*args, **kwargs)
        self._drafter = self._method.drafter(
            self._options, self._target(self.get_model().embed_input_ids)
        )
        self._drafter.allocate(self.max_num_reqs, self.max_model_len)
        self._layer = DraftLayer(self._drafter, self.vllm_config, self.max_num_reqs, self.device)
        self.get_model().register_forward_pre_hook(self._before_forward)

    def warmed_up(self) -> None:
        """Forget the requests of the engine's warm-up."""
        self._drafter.reset()

    def prime(self, blocks: Sequence[int], *, idle: bool) -> tuple[int, int]:
        """There is nothing to compute beforehand."""
        return 0, 0

    def _start(self, row: int, tokens: Sequence[int]) -> None:
        """The layer reads a prompt with the target."""

    def _stop(self, row: int) -> None:
        self._drafter.release([row])

    def _learn(self, *args: Any) -> None:
        """Nothing is learned from logits."""

    def prepare_attn(self, input_batch: InputBatch) -> Any:
        """Lay out the step, in which no tree has a node yet."""
        self._batch = input_batch
        return super().prepare_attn(input_batch)

    def _tell_builders(self, masks: StepMasks | None) -> None:
        if masks is not None:
            # Attention reads them when it runs, so they may be changed within the step.
            self._shown = masks.masks
        super()._tell_builders(masks)

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any
    ) -> Any:
        """Sample, verify, compact the KV caches, and let the layer read the step's tokens."""
        self._hidden = hidden_states
        return super().sample(hidden_states, input_batch, *args, **kwargs)

    def _before_forward(self, *args: Any) -> None:
        """Draft, within the engine's forward context."""
        step, batch = self._step, self._batch
        if step is None or batch is None:  # a forward that serves no request
            return
        self._context = get_forward_context()
        if step.width > 1:
            self._step = self.draft(batch, step)

    def draft(self, batch: InputBatch, step: Layout) -> Layout:
        """Run the layer on its own outputs, and write the trees of its logits into the step.

        Returns:
            The step with its trees.
        """
        slots, places = batch.idx_mapping, step.place_of_node
        root_positions = batch.positions[places[:, 0]]
        roots = batch.input_ids[places[:, 0]].int()
        self._show_chains()
        states = self._layer.unroll(slots, root_positions, places, len(batch.input_ids))
        logits = self.model.compute_logits(states.flatten(0, 1))
        undrafted = on_device(self._rules.undrafted(batch.idx_mapping_np), roots.device)
        steps = self._layer.valid_steps(step.sizes.long()).masked_fill(undrafted | ~step.begun, 0)
        trees = self._drafter.propose(slots, roots, logits.view(*states.shape[:2], -1), steps)
        columns_of_trees = torch.arange(step.width, device=roots.device)
        trees = as_scheduled(trees, step.sizes, columns_of_trees >= step.sizes[:, None])
        chained = in_chains(self.sampler, batch.idx_mapping_np)
        if chained.any():
            which = on_device(chained, roots.device)
            trees = first_paths(trees, which, self._drafter.max_depth)
        drawn = step._replace(parents=trees.parents)
        # The target embeds all columns, so those without a node hold the root's token.
        columns = batch.expanded_local_pos
        tokens = torch.where(trees.tokens >= 0, trees.tokens, roots[:, None])
        batch.input_ids[batch.logits_indices] = step.by_row(tokens, columns).to(
            batch.input_ids.dtype
        )
        # Without nodes all positions are the root's.
        depth = step.by_row(depths(trees.parents, step.sizes), columns)
        batch.positions.index_add_(0, batch.logits_indices, depth.to(batch.positions.dtype))
        self._shown.copy_(masks_of(drawn).masks)
        return drawn

    def _show_chains(self) -> None:
        """Let attention treat the rows of every tree as a chain."""
        self._shown.copy_(torch.ones_like(self._shown).tril())

    def _on_verified(
        self, batch: InputBatch, step: Layout, trees: DraftTree, verified: Verified
    ) -> None:
        self._drafter.on_verified(batch.idx_mapping, trees, verified)
        self._read(batch, step, verified)

    def _read(self, batch: InputBatch, step: Layout, verified: Verified) -> None:
        """Run the layer on the step's tokens, and store its output after each accepted path.

        Rows behind an accepted path are read too: their KV is written again before it is read.
        """
        rows, indices = batch.idx_mapping, batch.logits_indices.long()
        columns = batch.expanded_local_pos.long()
        column = columns.clamp(max=verified.path.shape[1] - 1)
        path = verified.path[step.request_of_row, column].long()
        accepted = (path >= 0) & (columns == column)
        places = step.place_of_node
        # The token after a row is that of the next row, except along the accepted path. A prompt
        # that is read in part goes on with its own next token.
        tokens = batch.input_ids.roll(-1)
        following = verified.emitted[step.request_of_row, column]
        of_prompt = self.req_states.next_prefill_tokens[0, rows][step.request_of_row]
        following = torch.where(following < 0, of_prompt, following).to(tokens.dtype)
        tokens[indices] = torch.where(accepted, following, tokens[indices])
        source = torch.arange(len(tokens), device=tokens.device)
        node = places[step.request_of_row, path.clamp(min=0)]
        source[indices] = torch.where(accepted, node, indices)
        positions = batch.positions[: len(tokens)].clone()
        if step.width > 1:
            positions[indices] = positions[places[:, 0]][step.request_of_row] + columns
            self._show_chains()
        x = self._drafter.fuse(self._hidden[source], tokens)
        with override_forward_context(self._context):
            states = self._drafter.layer(x, positions, self._layer.attend)
        last = places[:, 0] + (verified.path >= 0).sum(1) - 1
        self._layer.states[rows] = states[last].to(self._layer.states.dtype)
