"""vLLM's model runner with a layer that continues the target's hidden states.

The layer's KV is one more layer of the engine's cache groups. At the end of a step the layer reads
the accepted rows, each with the target's hidden state and the token after it. At the beginning of
the next step it runs on its own outputs, in the slots granted for draft tokens, and the tree is
built from the logits of all its steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tree_kernels.mask import depths
from vllm.forward_context import get_forward_context, override_forward_context

from drafttree.drafter import HiddenStateDrafter
from drafttree.method import Method
from drafttree.tree import DraftTree, Verified
from drafttree.vllm.arrays import IntArray
from drafttree.vllm.drafters.columns import without_nodes
from drafttree.vllm.drafters.draft_layer import DraftLayer
from drafttree.vllm.drafters.in_step import PLACEHOLDER, InStepRunner, InStepState
from drafttree.vllm.step import StepTrees


@dataclass
class HiddenStateStep(InStepState):
    """A step whose accepted hidden states the layer reads.

    Attributes:
        context: The engine's forward context, without which attention cannot run.
    """

    context: Any = field(init=False)


class HiddenStateRunner(InStepRunner[HiddenStateStep]):
    """Drafts with a `HiddenStateDrafter`."""

    _drafter: HiddenStateDrafter

    def _set_up_drafter(self, method: Method[Any], options: dict[str, Any]) -> None:
        self._method = method
        self._options = method.parse(options)

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load the target, and then the drafter with its layer."""
        super().load_model(load_dummy_weights)
        target = self._target(self.get_model().embed_input_ids)
        self._drafter = self._method.drafter(self._options, target)
        self._drafter.allocate(self.max_num_reqs, self.max_model_len)
        self._layer = DraftLayer(self._drafter, self.vllm_config, self.max_num_reqs, self.device)

    def _propose(self, roots: IntArray) -> DraftTree:
        """Propose placeholders, for which the scheduler grants KV slots."""
        sizes = 1 + self._drafter.max_draft_tokens(self._batch_slots())
        tokens = torch.full((len(roots), int(sizes.max())), PLACEHOLDER, dtype=torch.int32)
        parents = torch.zeros_like(tokens)
        parents[:, 0] = -1
        return self._as_declared(DraftTree(tokens, parents, sizes.int()))

    def _new_step(self, trees: StepTrees) -> HiddenStateStep:
        return HiddenStateStep(trees)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if step is not None:
            step.context = get_forward_context()
        return super()._model_forward(*args, **kwargs)

    def _draft(self, step: HiddenStateStep, roots: torch.Tensor) -> DraftTree:
        """Run the layer on its own outputs, and build the step's trees from the logits."""
        if not step.trees.drafted:
            return DraftTree.of_roots(roots)
        rows = step.trees.by_node(step.trees.rows)
        sizes = torch.from_numpy(step.trees.tree_sizes)
        slots = self._batch_slots()
        self._show_chains(step)
        states = self._layer.unroll(slots, step.root_positions, rows, len(step.input_ids))
        logits = self.get_model().compute_logits(states.flatten(0, 1))
        trees = self._drafter.propose(
            slots,
            roots,
            logits.view(len(rows), states.shape[1], -1),
            self._layer.valid_steps(sizes),
        )
        return self._write_drafts(step, self._as_scheduled(step, trees), rows)

    def _write_drafts(
        self, step: HiddenStateStep, drafts: DraftTree, rows: torch.Tensor
    ) -> DraftTree:
        """Replace the step's placeholders by draft tokens; `rows [B, N]` are their places.

        Returns:
            The trees without nodes beyond the end of a request, which have no position.
        """
        depth = depths(drafts.parents, drafts.tree_size)
        left = torch.tensor([self._tokens_left(name) for name in self.input_batch.req_ids])
        drafts = without_nodes(drafts, depth >= left[:, None])
        written = drafts.tokens >= 0
        written[:, 0] = False
        positions = step.root_positions[:, None] + depth
        step.input_ids[rows[written]] = drafts.tokens[written].to(step.input_ids.dtype)
        step.positions[rows[written]] = positions[written].to(step.positions.dtype)
        self._show_trees(step, drafts.parents)
        max_depth = int(depth.masked_fill(~written, 0).max())
        step.trees = replace(step.trees, parents=drafts.parents.numpy(), max_depth=max_depth)
        return drafts

    def _step_verified(self, step: HiddenStateStep, verified: Verified) -> None:
        started = perf_counter()
        self._read_accepted(step, verified)
        if step.trees.drafted:
            self.draft_seconds += perf_counter() - started

    def _read_accepted(self, step: HiddenStateStep, verified: Verified) -> None:
        """Run the layer on the step's accepted rows, and store its output after the last."""
        batch = self.input_batch
        slots = self._batch_slots()
        rows = step.trees.by_node(step.trees.rows)
        path, emitted = verified.path.long(), verified.emitted
        accepted = path >= 0
        # The token after a row is that of the next row, except along the accepted path, whose rows
        # are read as if they came right after the root.
        tokens = step.input_ids.roll(-1)
        source = torch.arange(len(tokens))
        places = rows[:, :1] + torch.arange(path.shape[1])
        source[places[accepted]] = rows.gather(1, path.clamp(min=0))[accepted]
        tokens[places[accepted]] = emitted[accepted].to(tokens.dtype)
        # A partially prefilled prompt continues with its own next token.
        unfinished = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs])
        for row in unfinished.tolist():
            position = int(step.root_positions[row])
            tokens[rows[row, 0]] = int(batch.token_ids_cpu[row, position + 1])
        positions = step.positions.clone()
        of_trees = torch.arange(rows.shape[1]) < torch.from_numpy(step.trees.tree_sizes)[:, None]
        along = step.root_positions[:, None] + torch.arange(rows.shape[1])
        positions[rows[of_trees]] = along[of_trees].to(positions.dtype)
        if step.trees.drafted:
            self._show_chains(step)
        # Rows of rejected drafts, most of a tree, need not be read.
        needed = torch.ones(len(tokens), dtype=torch.bool)
        needed[rows[of_trees]] = False
        needed[places[accepted]] = True
        read = needed.nonzero()[:, 0]
        x = self._drafter.fuse(step.hidden[source[read]], tokens[read])
        attend = (
            self._layer.attend_at(read, [], len(tokens))
            if step.trees.drafted
            else self._layer.attend
        )
        with override_forward_context(step.context), torch.inference_mode():
            states = self._drafter.layer(x, positions[read], attend)
        last = rows[:, 0] + accepted.sum(1) - 1
        stored = self._layer.states
        stored[slots] = states[needed.cumsum(0)[last] - 1].to(stored.dtype)

    def _show_chains(self, step: HiddenStateStep) -> None:
        """Let attention treat the rows of every tree as a chain."""
        assert step.masks is not None
        width = step.masks.masks.shape[1]
        step.masks.masks.copy_(torch.ones(width, width, dtype=torch.bool).tril())
