"""vLLM's model runner for model-free drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.outputs import SamplerOutput

from drafttree.arrays import IntArray, LongArray
from drafttree.drafter import ModelFreeDrafter
from drafttree.method import Method
from drafttree.tensor_parallel import (
    NonDraftingRank,
    broadcast_tensor,
    broadcast_trees,
    drafts_alone,
    is_drafting_rank,
)
from drafttree.transfer import on_device
from drafttree.tree import DraftTree, Verified
from drafttree.vllm.drafters.observing import observer, start_text
from drafttree.vllm.model_inputs import without_placeholders
from drafttree.vllm.priming import prime
from drafttree.vllm.runner import TreeModelRunner
from drafttree.vllm.sampling import sample_trees
from drafttree.vllm.step import StepState, StepTrees
from drafttree.vllm.step_logits import StepLogits


class ModelFreeRunner(TreeModelRunner[StepState]):
    """Drafts with a `ModelFreeDrafter`, which observes all of the target's logits."""

    _drafter: ModelFreeDrafter

    def _set_up_drafter(self, method: Method[Any], options: dict[str, Any]) -> None:
        parsed, group = method.parse(options), get_tp_group()
        self._drafter = NonDraftingRank(parsed.depth)
        if is_drafting_rank(group):
            self._drafter = method.drafter(parsed, self._target())
        if not drafts_alone(group):
            # Each rank may have a scheduler of its own, and all must be given the same proposals.
            shares = torch.tensor([int(self._drafter.shares_texts)], device=self.device)
            broadcast_tensor(shares, group)
            self._drafter.shares_texts = bool(shares)
        self._drafter.allocate(self.max_num_reqs, self.max_model_len)

    def _ends_of_drafts(self, request_ids: Sequence[str]) -> list[set[int]]:
        return [*map(self._ending_tokens, request_ids)]

    def prime(self, blocks: Sequence[int], *, idle: bool) -> tuple[int, int]:
        """Let the drafter compute something beforehand, if it can."""
        return prime(self, self._drafter, blocks, idle=idle)

    def _request_started(self, name: str, slot: int) -> None:
        start_text(self, self._drafter, name, slot)

    def _new_step(self, trees: StepTrees) -> StepState:
        return StepState(trees)

    def _verify(self, step: StepState, logits: StepLogits) -> tuple[SamplerOutput, Verified]:
        tokens = self._row_tokens(step.trees)
        step.drafts = step.trees.trees(tokens)
        observe = observer(
            self._drafter,
            self._batch_slots(),
            step.trees,
            step.drafts,
            tokens,
            self._partial_prefills(),
        )
        depth = step.trees.max_depth
        return sample_trees(
            self.input_batch,
            self.sampler,
            step.trees,
            step.drafts,
            logits,
            depth,
            observe,
            ends=self._ends_of_seeded(),
        )

    def _row_tokens(self, trees: StepTrees) -> torch.Tensor:
        """The input tokens of the rows that have logits, `int32 [R]`."""
        rows = len(trees.rows)
        # If all rows of the batch have logits, no gathering is needed.
        all_rows = rows == len(trees.position_offsets)
        tokens = self.input_ids.gpu[:rows] if all_rows else self.input_ids.gpu[trees.rows]
        return without_placeholders(self, tokens)

    def _propose(self, roots: IntArray) -> DraftTree:
        tensor = on_device(roots, self.device)
        room = min(self._share_of_step() - 1, self.num_spec_tokens)
        if not room or (roots < 0).all():
            return DraftTree.of_roots(tensor)
        # A larger tree would be cut level by level, and lose the deepest nodes of its best path.
        self._drafter.limit_draft_tokens(room)
        slots, bound = self._batch_slots(), self._bound_rows(roots)
        if not len(bound):
            trees = self._as_declared(self._drafter.propose(slots, tensor))
            return broadcast_trees(trees, self.num_spec_tokens, get_tp_group())
        places = on_device(bound, self.device)
        trees, verified = self._drafter.propose_candidates(slots, tensor, places)
        most = verified.clamp(max=self.num_spec_tokens)
        self._verified = (trees.tree_size - 1).index_copy(0, places, most)
        return trees

    def _bound_rows(self, roots: IntArray) -> LongArray:
        """The requests with a grammar that more candidates are proposed for, `int64 [G]`."""
        names = self.input_batch.req_ids
        if not self._grammar_bound or not drafts_alone(get_tp_group()):
            return np.zeros(0, np.int64)
        bound = [name in self._grammar_bound for name in names]
        return np.flatnonzero(np.array(bound) & (roots >= 0))
