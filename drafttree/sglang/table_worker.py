"""The worker of methods that draft without a model, from what the target said before."""

from __future__ import annotations

import functools
from typing import Any

import torch

from drafttree.drafter import Drafter, DraftTree
from drafttree.sglang.sampling import verify_trees
from drafttree.sglang.worker import TreeWorker
from drafttree.verify import Verified


class TableWorker(TreeWorker):
    """Drafts with a `Drafter`, which sees all of the target's logits."""

    drafter: Drafter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._learn_from_prefill()

    @property
    def draft_worker(self) -> None:
        """There is no draft model."""
        return None

    def _learn_from_prefill(self) -> None:
        """Sampling writes into the logits, so the drafter must look at them right before.

        The runner is this process's own instance and has no hook there.
        """
        sample = self._runner.sample

        @functools.wraps(sample)
        def sample_after_learning(logits_output: Any, forward_batch: Any) -> torch.Tensor:
            if forward_batch.forward_mode.is_extend_without_speculative():
                last = forward_batch.extend_seq_lens.cumsum(0) - 1
                tokens = forward_batch.input_ids[last].to(torch.int32)
                self.drafter.observe(tokens, logits_output.next_token_logits)
            return sample(logits_output, forward_batch)

        self._runner.sample = sample_after_learning

    def _requests_began(self, names: list[str]) -> None:
        self.drafter.start(names)

    def _requests_ended(self, names: list[str]) -> None:
        self.drafter.release(names)

    def _forget(self) -> None:
        self.drafter.reset()

    def _propose(self, batch: Any) -> DraftTree:
        names = [request.rid for request in batch.reqs]
        return self.drafter.propose(names, self._states.roots[batch.req_pool_indices])

    def _verify(self, batch: Any, trees: DraftTree, output: Any) -> Verified:
        best = self.drafter.observe(trees.tokens.flatten(), output.next_token_logits)
        return verify_trees(
            self._runner,
            batch,
            trees,
            self.drafter.max_depth,
            output,
            best.view_as(trees.tokens),
            self._penalties_of(batch),
        )
