"""vLLM's model runner for model-free drafters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tree_kernels.adjacency import top_candidates
from vllm.logger import init_logger
from vllm.v1.outputs import SamplerOutput

from drafttree.budget.forward_profile import of_one_request, profile_drafter
from drafttree.drafter import ModelFreeDrafter
from drafttree.method import Method
from drafttree.transfer import on_device
from drafttree.tree import DraftTree, Verified
from drafttree.vllm.forward import forward_seconds, step_seconds
from drafttree.vllm.request_slots import RequestSlots
from drafttree.vllm.runner import TreeModelRunner
from drafttree.vllm.sampling import is_plain_greedy, sample_trees
from drafttree.vllm.step import NO_TOKEN, IntArray, StepState, StepTrees
from drafttree.vllm.tensor_parallel import NonDraftingRank, broadcast_trees, is_drafting_rank

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")


class ModelFreeRunner(TreeModelRunner[StepState]):
    """Drafts with a `ModelFreeDrafter`, which observes all of the target's logits."""

    _drafter: ModelFreeDrafter

    def _set_up_drafter(self, method: Method[Any], options: dict[str, Any]) -> None:
        parsed = method.parse(options)
        self._drafter = NonDraftingRank(parsed.depth)
        if is_drafting_rank():
            self._drafter = method.drafter(parsed, self._target())
        self._drafter.allocate(self.max_num_reqs, self.max_model_len)
        self._slots = RequestSlots(self.max_num_reqs)
        self._slots_of_batch: tuple[list[str], torch.Tensor] | None = None

    def profile_forwards(self) -> None:
        """Let the drafter measure forwards of the model, while the KV cache is still empty."""
        if self.parallel_config.tensor_parallel_size > 1:
            return  # a forward of one rank would wait for the others
        if self.device.type != "cpu":
            profile_drafter(
                self._drafter,
                lambda tokens: step_seconds(self, tokens),
                self._max_step_rows,
                logger,
            )
            return
        spec = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        # The engine keeps one block for itself.
        room = min(self.max_model_len, (self.kv_cache_config.num_blocks - 1) * spec.block_size)
        profile_drafter(
            self._drafter,
            of_one_request(lambda *shape: forward_seconds(self, *shape), room),
            min(room, self._token_budget, self.num_spec_tokens + 1),
            logger,
        )

    def _requests_ended(self, names: list[str]) -> None:
        if names:
            self._drafter.release(self._slots.free(names))
            self._slots_of_batch = None

    def _batch_slots(self) -> torch.Tensor:
        """Return the slots of the batch's requests, `int64 [B]`, and start new requests."""
        batch = self.input_batch
        if self._slots_of_batch is not None and self._slots_of_batch[0] == batch.req_ids:
            return self._slots_of_batch[1]
        slots, arrived, taken = self._slots.of(batch.req_ids)
        self._drafter.release(taken)
        for name in arrived:
            row = batch.req_id_to_index[name]
            text = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
            self._drafter.start(slots[row], text)
        tensor = on_device(np.array(slots, np.int64), self.device)
        self._slots_of_batch = list(batch.req_ids), tensor
        return tensor

    def _new_step(self, trees: StepTrees) -> StepState:
        return StepState(trees)

    def _verify(self, step: StepState, logits: torch.Tensor) -> tuple[SamplerOutput, Verified]:
        tokens = self._row_tokens(step.trees)
        step.drafts = step.trees.trees(tokens)
        slots = self._batch_slots()
        roots_previous = self._drafter.previous_tokens(slots)
        unfinished = self.discard_request_mask.np[: len(slots)].astype(np.bool_)
        partial = on_device(unfinished, self.device) if unfinished.any() else None
        if partial is not None:
            # The drafter's text of a partially prefilled prompt goes beyond the root.
            roots_previous = roots_previous.masked_fill(partial, NO_TOKEN)
        previous = step.trees.by_row(step.drafts.previous_tokens(roots_previous))
        argmax = self._observe(step.trees, slots, tokens, previous, logits)
        if not is_plain_greedy(self.input_batch.sampling_metadata):
            argmax = None
        elif argmax is None:
            argmax = top_candidates(logits, 1)[:, 0]
        output, verified = sample_trees(
            self.input_batch, self.sampler, step.trees, step.drafts, logits, argmax
        )
        learned = verified
        if partial is not None:
            # The engine drops the token that it samples after a partial prefill.
            emitted = verified.emitted.masked_fill(partial[:, None], NO_TOKEN)
            learned = replace(verified, emitted=emitted)
        self._drafter.on_verified(slots, step.drafts, learned)
        return output, verified

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
