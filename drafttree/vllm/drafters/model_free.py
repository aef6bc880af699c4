"""vLLM's model runner for model-free drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tree_kernels.adjacency import top_candidates
from vllm.v1.outputs import SamplerOutput

from drafttree.drafter import ModelFreeDrafter
from drafttree.method import Method
from drafttree.transfer import on_device
from drafttree.tree import DraftTree, Verified
from drafttree.vllm.model_inputs import text_without_placeholders
from drafttree.vllm.priming import prime
from drafttree.vllm.runner import TreeModelRunner
from drafttree.vllm.sampling import is_plain_greedy, sample_trees
from drafttree.vllm.step import NO_TOKEN, IntArray, StepState, StepTrees
from drafttree.vllm.tensor_parallel import NonDraftingRank, broadcast_trees, is_drafting_rank


class ModelFreeRunner(TreeModelRunner[StepState]):
    """Drafts with a `ModelFreeDrafter`, which observes all of the target's logits."""

    _drafter: ModelFreeDrafter

    def _set_up_drafter(self, method: Method[Any], options: dict[str, Any]) -> None:
        parsed = method.parse(options)
        self._drafter = NonDraftingRank(parsed.depth)
        if is_drafting_rank():
            self._drafter = method.drafter(parsed, self._target())
        self._drafter.allocate(self.max_num_reqs, self.max_model_len)

    def _ending_tokens(self, request_id: str) -> set[int]:
        parameters = self.requests[request_id].sampling_params
        if parameters is None:
            return set()
        # None where the request ignores it.
        eos = getattr(parameters, "eos_token_id", None)
        return {*(parameters.stop_token_ids or ())} | ({eos} if eos is not None else set())

    def prime(self, blocks: Sequence[int], *, idle: bool) -> tuple[int, int]:
        """Let the drafter compute something beforehand, if it can."""
        return prime(self, self._drafter, blocks, idle=idle)

    def _request_started(self, name: str, slot: int) -> None:
        batch = self.input_batch
        row = batch.req_id_to_index[name]
        text = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
        self._drafter.start(slot, text_without_placeholders(self, text))

    def _new_step(self, trees: StepTrees) -> StepState:
        return StepState(trees)

    def _verify(self, step: StepState, logits: torch.Tensor) -> tuple[SamplerOutput, Verified]:
        tokens = self._row_tokens(step.trees)
        step.drafts = step.trees.trees(tokens)
        slots = self._batch_slots()
        roots_previous = self._drafter.previous_tokens(slots)
        partial = self._partial_prefills()
        if partial is not None:
            # The drafter's text of a partially prefilled prompt goes beyond the root.
            roots_previous = roots_previous.masked_fill(partial, NO_TOKEN)
        previous = step.trees.by_row(step.drafts.previous_tokens(roots_previous))
        argmax = self._observe(step.trees, slots, tokens, previous, logits)
        if not is_plain_greedy(self.input_batch.sampling_metadata):
            argmax = None
        elif argmax is None:
            argmax = top_candidates(logits, 1)[:, 0]
        return sample_trees(self.input_batch, self.sampler, step.trees, step.drafts, logits, argmax)

    def _observe(
        self,
        trees: StepTrees,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        previous: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor | None:
        """Let the drafter learn, and return the argmax of each row if it computed one.

        Requests with a grammar are skipped: the engine has already masked their logits.
        """
        if self._grammar_bound:
            bound = np.array([name in self._grammar_bound for name in self.input_batch.req_ids])
            masked = on_device(bound[trees.request_of_row], self.device)
            tokens = tokens.masked_fill(masked, NO_TOKEN)
        of_rows = slots[trees.tensors.request_of_row] if trees.drafted else slots
        return self._drafter.observe(of_rows, tokens, previous, logits)

    def _propose(self, roots: IntArray) -> DraftTree:
        tensor = on_device(roots, self.device)
        if (roots < 0).all():
            return DraftTree.of_roots(tensor)
        trees = self._as_declared(self._drafter.propose(self._batch_slots(), tensor))
        return broadcast_trees(trees, self.num_spec_tokens)
