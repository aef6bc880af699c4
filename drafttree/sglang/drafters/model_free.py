"""SGLang's worker for model-free drafters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from drafttree.drafter import ModelFreeDrafter
from drafttree.sglang.patches import observe_prefill
from drafttree.sglang.state import Step
from drafttree.sglang.worker import Penalties, TreeWorker
from drafttree.tree import DraftTree, Verified


class ModelFreeWorker(TreeWorker):
    """Drafts with a `ModelFreeDrafter`, which observes all of the target's logits."""

    drafter: ModelFreeDrafter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        observe_prefill(self._runner, self._observe_prefill)

    @property
    def draft_worker(self) -> None:
        """None, because there is no draft model."""
        return None

    def _observe_prefill(self, batch: Any, logits: torch.Tensor) -> None:
        lengths = batch.extend_seq_lens
        last = lengths.cumsum(0) - 1
        tokens = batch.input_ids.int()
        previous = tokens[(last - 1).clamp(min=0)].masked_fill(lengths < 2, -1)
        self.drafter.observe(batch.req_pool_indices, tokens[last], previous, logits)

    def _forward_prompt(self, batch: Any) -> GenerationBatchResult:
        for request in batch.reqs:
            text = [*request.origin_input_ids, *request.output_ids]
            self.drafter.start(self._slots[request.rid], text)
        result = super()._forward_prompt(batch)
        self.drafter.extend(batch.req_pool_indices, result.next_token_ids[:, None].int())
        return result

    def _propose(self, batch: Any, penalties: Penalties) -> tuple[DraftTree, Any]:
        slots = batch.req_pool_indices
        roots, drafting = self._states.roots[slots], self._states.drafting[slots]
        if self._device.type == "cpu" and not drafting.any():
            return DraftTree.of_roots(roots), None
        trees = self.drafter.propose(slots, roots.masked_fill(~drafting, -1))
        # A copy, as the tensors belong to the drafter.
        tokens = torch.cat((roots[:, None], trees.tokens[:, 1:]), 1)
        return replace(trees, tokens=tokens), None

    def _verify(self, step: Step, output: Any) -> Verified:
        slots, tokens = step.batch.req_pool_indices, step.trees.tokens
        previous = step.trees.previous_tokens(self.drafter.previous_tokens(slots))
        argmax = self.drafter.observe(
            slots.repeat_interleave(tokens.shape[1]),
            tokens.flatten(),
            previous.flatten(),
            output.next_token_logits,
        )
        return self._verify_trees(step, output, argmax)
