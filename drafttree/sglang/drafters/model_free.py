"""SGLang's worker for model-free drafters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.managers.utils import GenerationBatchResult

from drafttree.drafter import Drafter, ModelFreeDrafter
from drafttree.grammar import JumpForwardTokenizer
from drafttree.method import Method
from drafttree.sglang.drafters.observing import ObservingWorker
from drafttree.sglang.grammars import BoundTrees, bind_trees
from drafttree.sglang.state import Proposal, Step, is_drafted_bound, sampled_tokens
from drafttree.target import Target
from drafttree.tensor_parallel import NonDraftingRank, drafts_alone, is_drafting_rank
from drafttree.transfer import on_device
from drafttree.tree import DraftTree, Verified


class ModelFreeWorker(ObservingWorker):
    """Drafts with a `ModelFreeDrafter`, which observes all of the target's logits."""

    drafter: ModelFreeDrafter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tokenizer = self._target_worker.tokenizer
        self._tokenizer = None if tokenizer is None else JumpForwardTokenizer(tokenizer)

    def _make_drafter(self, method: Method[Any], options: Any, target: Target) -> Drafter:
        self._deepest = min(options.depth, self._num_draft_tokens)
        if not is_drafting_rank(self._group):
            return NonDraftingRank(self._deepest)
        return super()._make_drafter(method, options, target)

    @property
    def _max_depth(self) -> int:
        if drafts_alone(self._group):
            return super()._max_depth
        # The first rank's drafter, which the others do not know, may draft less deep.
        return self._deepest

    @property
    def _observing(self) -> ModelFreeDrafter:
        return self.drafter

    @property
    def draft_worker(self) -> None:
        """None, because there is no draft model."""
        return None

    def _forward_prompt(self, batch: Any) -> GenerationBatchResult:
        result = super()._forward_prompt(batch)
        sampled = sampled_tokens(batch, result.next_token_ids)
        self.drafter.extend(batch.req_pool_indices, sampled[:, None])
        return result

    def _propose(self, batch: Any) -> Proposal:
        slots = batch.req_pool_indices
        roots, drafting = self._states.roots[slots], self._states.drafting[slots]
        if self._device.type == "cpu" and not drafting.any():
            return Proposal(DraftTree.of_roots(roots))
        asked = roots.masked_fill(~drafting, -1)
        most_proposed = None
        bound = [row for row, each in enumerate(batch.reqs) if is_drafted_bound(each)]
        if bound and drafts_alone(self._group):
            places = on_device(np.array(bound, np.int64), self._device)
            trees, verified = self.drafter.propose_candidates(slots, asked, places)
            most_proposed = torch.zeros_like(roots).index_copy(0, places, verified)
        else:
            trees = self.drafter.propose(slots, asked)
        return Proposal(trees.rooted(roots), most_proposed=most_proposed)

    def _bind(self, batch: Any, proposal: Proposal, most: int) -> BoundTrees:
        """Let nodes that grammars allow and tokens that they force take the place of others."""
        if not drafts_alone(self._group):
            return super()._bind(batch, proposal, most)
        trees, proposed = proposal.trees, proposal.most_proposed
        rooms = [0 if proposed is None else _room(each) for each in batch.reqs]
        return bind_trees(
            batch.reqs,
            trees,
            torch.zeros_like(trees.tree_size) if proposed is None else proposed,
            rooms,
            most,
            self._vocab_size,
            self._tokenizer,
            chains=self.in_chains,
        )

    def _verify(self, step: Step, output: Any) -> Verified:
        return self._verify_trees(step, output, self._observe_trees(step, output))


def _room(request: Any) -> int:
    """The greatest depth of a node for a request with a grammar; 0 if it is not drafted for."""
    if not is_drafted_bound(request):
        return 0
    return max(0, request.sampling_params.max_new_tokens - len(request.output_ids) - 1)
