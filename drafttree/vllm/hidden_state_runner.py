"""vLLM's model runner with a layer that continues the target's hidden states.

The layer's KV is one more layer of the engine's cache groups. At the end of a step it reads what
the step accepted, each row with the target's hidden state and the token after it. At the beginning
of the next it goes on by itself, in the slots that the scheduler granted for drafts, and the tree
is built from the logits of all its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tree_kernels.adjacency import top_candidates
from tree_kernels.mask import depths, tree_mask
from vllm.config import set_current_vllm_config
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from drafttree.drafter import Attend, DraftTree, HiddenStateDrafter, TargetParts
from drafttree.method import Method
from drafttree.verify import Verified
from drafttree.vllm.request_slots import RequestSlots
from drafttree.vllm.runner import TreeModelRunner
from drafttree.vllm.sampling import is_plain_greedy, sample_trees
from drafttree.vllm.step import NO_TOKEN, IntArray, StepMasks, StepTrees

LAYER = "draft_layer.0.attn"
"""The layer's name in the engine's list of all layers."""

PLACEHOLDER = 0


class HiddenStateRunner(TreeModelRunner):
    """Drafts with a `HiddenStateDrafter`.

    Attributes:
        draft_seconds: the host's time spent in steps with drafts, apart from the target's.
    """

    def _set_up(
        self, method: Method, options: dict[str, Any], logits_processors: Sequence[Any] | None
    ) -> None:
        self._method = method
        self._options = method.parse(options)
        self._slots = RequestSlots(self.max_num_reqs)
        self._masks: StepMasks | None = None
        self.draft_seconds = 0.0
        super()._set_up(method, options, logits_processors)

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load the target, and then the layer."""
        super().load_model(load_dummy_weights)
        model = self.get_model()
        self._drafter: HiddenStateDrafter = self._method.make_drafter(
            self._options,
            TargetParts(
                folder=Path(self.model_config.model),
                embed=model.embed_input_ids,
                dtype=self.model_config.dtype,
                device=self.device,
            ),
        )
        self._drafter.allot(self.max_num_reqs)
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
        width = self.model_config.get_hidden_size()
        self._first = torch.zeros(
            self.max_num_reqs, width, dtype=self.model_config.dtype, device=self.device
        )

    def _requests_ended(self, names: list[str]) -> None:
        self._slots.free(names)

    def _batch_slots(self) -> torch.Tensor:
        """The slots of the batch's requests, int64 `[B]`."""
        slots, _, _ = self._slots.of(self.input_batch.req_ids)
        return torch.tensor(slots)

    def _propose(self, roots: IntArray) -> DraftTree:
        """Columns by which the scheduler grants slots; the tree is built in the next step."""
        sizes = 1 + self._drafter.most_nodes(self._batch_slots())
        tokens = torch.full((len(roots), int(sizes.max())), PLACEHOLDER, dtype=torch.int32)
        parents = torch.zeros_like(tokens)
        parents[:, 0] = -1
        return DraftTree(tokens, parents, sizes.int())

    # One step.

    def _step_masks(self, step: StepTrees) -> StepMasks:
        self._masks = super()._step_masks(step)
        return self._masks

    def _model_forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        step = self._step
        if step is None:
            return super()._model_forward(input_ids, positions, *args, **kwargs)
        assert input_ids is not None
        assert positions is not None
        self._context = get_forward_context()
        self._roots_at = positions[step.rows[torch.from_numpy(step.starts)]].clone()
        if step.drafted:
            started = perf_counter()
            self._step = self._draft(step, input_ids, positions)
            self.draft_seconds += perf_counter() - started
        hidden = super()._model_forward(input_ids, positions, *args, **kwargs)
        self._read = hidden, input_ids, positions
        return hidden

    def _draft(
        self, step: StepTrees, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> StepTrees:
        """Go on from the last hidden states, and build the step's trees."""
        nodes = step.by_node(step.rows)
        sizes = torch.from_numpy(step.sizes)
        slots = self._batch_slots()
        most = self._drafter.max_depth
        self._show_chain()
        state = self._first[slots]
        states, before = [state], list[torch.Tensor]()
        for ahead in range(min(most - 1, nodes.shape[1])):
            state = self._drafter.layer(
                self._drafter.between(state),
                self._roots_at + ahead,
                self._attend_at(nodes[:, ahead], before, len(input_ids)),
            )
            states.append(state)
        states += states[-1:] * (most - len(states))
        logits = self.get_model().compute_logits(torch.stack(states, 1).flatten(0, 1))
        steps = (1 + sizes.clamp(max=most - 1)).masked_fill(sizes == 1, 0)
        trees = self._drafter.propose(
            slots, input_ids[nodes[:, 0]].int(), logits.view(len(nodes), most, -1), steps
        )
        return self._take(step, trees, nodes, input_ids, positions)

    def _take(
        self,
        step: StepTrees,
        trees: DraftTree,
        nodes: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> StepTrees:
        """Cut the trees to what was scheduled of them, and make them the step's rows."""
        width = nodes.shape[1]
        missing = max(width - trees.tokens.shape[1], 0)
        tokens, parents = (
            torch.nn.functional.pad(each, (0, missing), value=-1)[:, :width]
            for each in (trees.tokens, trees.parents)
        )
        depth = depths(parents, trees.num_nodes.clamp(max=width))
        left = torch.tensor([self._tokens_left(name) for name in self.input_batch.req_ids])
        kept = (torch.arange(width) < torch.from_numpy(step.sizes)[:, None]) & (tokens >= 0)
        # Nodes beyond the request's end have no position.
        kept &= depth < left[:, None].clamp(min=1)
        kept[:, 0] = True
        tokens, parents = tokens.masked_fill(~kept, NO_TOKEN), parents.masked_fill(~kept, -1)
        own = kept.clone()
        own[:, 0] = False
        input_ids[nodes[own]] = tokens[own].to(input_ids.dtype)
        positions[nodes[own]] = (self._roots_at[:, None] + depth)[own].to(positions.dtype)
        assert self._masks is not None
        rows = self._masks.requests
        shown = torch.full(self._masks.masks.shape[:2], -1, dtype=torch.int32)
        shown[:, :width] = parents[rows]
        self._masks.masks.copy_(tree_mask(shown, self._masks.nodes.to(torch.int32)))
        self._drawn = DraftTree(tokens, parents, kept.sum(1).int())
        return replace(step, parents=parents.numpy(), max_depth=int(depth[kept].max()))

    def _verify(
        self, step: StepTrees, logits: torch.Tensor
    ) -> tuple[SamplerOutput, DraftTree, Verified]:
        drafts = self._drawn if step.drafted else step.trees(self._row_tokens(step))
        greedy = is_plain_greedy(self.input_batch.sampling_metadata)
        fixed = top_candidates(logits, 1)[:, 0] if greedy else None
        output, verified = sample_trees(self, step, drafts, logits, fixed)
        self._verified = verified
        return output, drafts, verified

    def _sample(
        self, logits: torch.Tensor, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        step = self._step
        output = super()._sample(logits, spec_decode_metadata)
        if step is not None:
            started = perf_counter()
            self._read_accepted(step, self._verified)
            if step.drafted:
                self.draft_seconds += perf_counter() - started
        return output

    def _read_accepted(self, step: StepTrees, verified: Verified) -> None:
        """Have the layer read the step's accepted rows, and keep its state after the last."""
        hidden, input_ids, positions = self._read
        batch = self.input_batch
        slots = self._batch_slots()
        nodes = step.by_node(step.rows)
        path, emitted = verified.path.long(), verified.emitted
        here = path >= 0
        # A row and the one after it are neighbours, but for the accepted path.
        tokens = input_ids.roll(-1)
        source = torch.arange(len(tokens))
        places = nodes[:, :1] + torch.arange(path.shape[1])
        source[places[here]] = nodes.gather(1, path.clamp(min=0))[here]
        tokens[places[here]] = emitted[here].to(tokens.dtype)
        # A prompt that is read in part goes on with its own next token.
        unfinished = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs])
        for row in unfinished.tolist():
            place = int(nodes[row, 0])
            tokens[place] = int(batch.token_ids_cpu[row, int(self._roots_at[row]) + 1])
        at = positions.clone()
        own = torch.arange(nodes.shape[1]) < torch.from_numpy(step.sizes)[:, None]
        along = self._roots_at[:, None] + torch.arange(nodes.shape[1])
        at[nodes[own]] = along[own].to(at.dtype)
        if step.drafted:
            self._show_chain()
        # Rows of drafts that were rejected mean nothing; most of a tree is that.
        read = torch.ones(len(tokens), dtype=torch.bool)
        read[nodes[own]] = False
        read[places[here]] = True
        rows = read.nonzero()[:, 0]
        x = self._drafter.fuse(hidden[source[rows]], tokens[rows])
        attend = self._attend_at(rows, [], len(tokens)) if step.drafted else self._attend
        with override_forward_context(self._context), torch.inference_mode():
            states = self._drafter.layer(x, at[rows], attend)
        last = nodes[:, 0] + here.sum(1) - 1
        self._first[slots] = states[read.cumsum(0)[last] - 1].to(self._first.dtype)
        drafted = torch.from_numpy(step.sizes > 1)
        self._drafter.accepted(slots[drafted], (here.sum(1) - 1)[drafted])
        self._drafter.forget(slots[~drafted])

    def _show_chain(self) -> None:
        """Let attention see the rows of every tree as a chain."""
        assert self._masks is not None
        width = self._masks.masks.shape[1]
        self._masks.masks.copy_(torch.ones(width, width, dtype=torch.bool).tril())

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The engine's attention for all of a step's rows."""
        return self._attention(q.flatten(1), k.flatten(1), v.flatten(1)).view_as(q)

    def _attend_at(self, rows: torch.Tensor, before: list[torch.Tensor], count: int) -> Attend:
        """The same for some of a step's `count` rows.

        The others write KV that means nothing into slots that are written again before they are
        read.

        Args:
            before: keys and values of all rows, in which those of earlier steps stay; empty in the
                first.
        """

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if not before:
                before.extend(each.new_zeros(count, *each.shape[1:]) for each in (k, v))
            before[0][rows], before[1][rows] = k, v
            queries = q.new_zeros(count, *q.shape[1:])
            queries[rows] = q
            return self._attend(queries, *before)[rows]

        return attend
