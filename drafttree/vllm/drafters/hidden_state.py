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
from vllm.config import set_current_vllm_config
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.model_executor.layers.attention import Attention

from drafttree.drafter import Attend, HiddenStateDrafter
from drafttree.method import Method
from drafttree.tree import DraftTree, Verified
from drafttree.vllm.drafters.in_step import PLACEHOLDER, InStepRunner, InStepState, without_nodes
from drafttree.vllm.step import IntArray, StepTrees

LAYER = "draft_layer.0.attn"
"""Name of the layer in the engine's registry of layers."""


@dataclass
class HiddenStateStep(InStepState):
    """A step whose accepted hidden states the layer reads.

    Attributes:
        context: The engine's forward context, without which attention cannot run.
        hidden: The target's hidden states, `[tokens, d]`.
    """

    context: Any = field(init=False)
    hidden: torch.Tensor = field(init=False)


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
        heads, kv_heads, size = self._drafter.heads
        with set_current_vllm_config(self.vllm_config):
            self._attention = Attention(
                heads,
                size,
                size**-0.5,
                num_kv_heads=kv_heads,
                cache_config=self.cache_config,
                prefix=LAYER,
            )
        # The layer's output after each request's last token, by slot.
        self._states = torch.zeros(
            self.max_num_reqs,
            self.model_config.get_hidden_size(),
            dtype=self.model_config.dtype,
            device=self.device,
        )

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
        hidden = super()._model_forward(*args, **kwargs)
        if step is not None:
            step.hidden = hidden
        return hidden

    def _draft(self, step: HiddenStateStep, roots: torch.Tensor) -> DraftTree:
        """Run the layer on its own outputs, and build the step's trees from the logits."""
        if not step.trees.drafted:
            return DraftTree.of_roots(roots)
        rows = step.trees.by_node(step.trees.rows)
        sizes = torch.from_numpy(step.trees.tree_sizes)
        slots = self._batch_slots()
        num_steps = self._drafter.max_depth
        self._show_chains(step)
        state = self._states[slots]
        states, cache = [state], list[torch.Tensor]()
        for ahead in range(min(num_steps - 1, rows.shape[1])):
            state = self._drafter.layer(
                self._drafter.between(state),
                step.root_positions + ahead,
                self._attend_at(rows[:, ahead], cache, len(step.input_ids)),
            )
            states.append(state)
        states += states[-1:] * (num_steps - len(states))
        logits = self.get_model().compute_logits(torch.stack(states, 1).flatten(0, 1))
        valid_steps = (1 + sizes.clamp(max=num_steps - 1)).masked_fill(sizes == 1, 0)
        trees = self._drafter.propose(
            slots, roots, logits.view(len(rows), num_steps, -1), valid_steps
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
        attend = self._attend_at(read, [], len(tokens)) if step.trees.drafted else self._attend
        with override_forward_context(step.context), torch.inference_mode():
            states = self._drafter.layer(x, positions[read], attend)
        last = rows[:, 0] + accepted.sum(1) - 1
        self._states[slots] = states[needed.cumsum(0)[last] - 1].to(self._states.dtype)

    def _show_chains(self, step: HiddenStateStep) -> None:
        """Let attention treat the rows of every tree as a chain."""
        assert step.masks is not None
        width = step.masks.masks.shape[1]
        step.masks.masks.copy_(torch.ones(width, width, dtype=torch.bool).tril())

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The engine's attention for all rows of a step."""
        return self._attention(q.flatten(1), k.flatten(1), v.flatten(1)).view_as(q)

    def _attend_at(self, rows: torch.Tensor, cache: list[torch.Tensor], count: int) -> Attend:
        """The engine's attention for some rows of a step.

        The other rows write meaningless KV into slots that are written again before they are read.

        Args:
            rows: The rows, `int [n]`.
            cache: Keys and values of all rows, which keeps those of earlier calls; empty in the
                first.
            count: Number of rows of the step.
        """

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if not cache:
                cache.extend(each.new_zeros(count, *each.shape[1:]) for each in (k, v))
            cache[0][rows], cache[1][rows] = k, v
            queries = q.new_zeros(count, *q.shape[1:])
            queries[rows] = q
            return self._attend(queries, *cache)[rows]

        return attend
