"""vLLM's model runner with a drafter that needs no model, and learns from the target's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.outputs import SamplerOutput

from drafttree.calibration import calibrate, of_one_request
from drafttree.drafter import Drafter, DraftTree
from drafttree.method import Method
from drafttree.transfer import on_device
from drafttree.verify import Verified
from drafttree.vllm.forward import forward_seconds, step_seconds
from drafttree.vllm.ranks import Follower, drafts_here, shared
from drafttree.vllm.request_slots import RequestSlots
from drafttree.vllm.runner import TreeModelRunner
from drafttree.vllm.sampling import is_plain_greedy, sample_trees
from drafttree.vllm.step import NO_TOKEN, IntArray, StepTrees

# Below vLLM's own logger, or nothing would print it.
logger = init_logger(f"vllm.{__name__}")


class TableRunner(TreeModelRunner):
    """Drafts with a `Drafter`, which sees all of the target's logits."""

    def _set_up(
        self, method: Method, options: dict[str, Any], logits_processors: Sequence[Any] | None
    ) -> None:
        parsed = method.parse(options)
        self._drafter: Drafter = Follower(parsed.depth)
        if drafts_here():
            self._drafter = method.make_drafter(
                parsed,
                self.model_config.get_vocab_size(),
                self.device,
                self.model_config.model,
                logger,
            )
        self._drafter.allot(self.max_num_reqs, self.max_model_len)
        self._slots = RequestSlots(self.max_num_reqs)
        self._of_batch: tuple[list[str], torch.Tensor] | None = None
        super()._set_up(method, options, logits_processors)

    def calibrate(self) -> None:
        """Let the drafter time forwards of the model as it will run; its cache is empty still."""
        if self.parallel_config.tensor_parallel_size > 1:
            return  # one rank's forwards would wait for the others
        if self.device.type != "cpu":
            most = min(self._token_budget, self.max_num_reqs * (1 + self.num_spec_tokens))
            calibrate(self._drafter, lambda tokens: step_seconds(self, tokens), most, logger)
            return
        spec = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        # The engine keeps a block for itself.
        room = min(self.max_model_len, (self.kv_cache_config.num_blocks - 1) * spec.block_size)
        calibrate(
            self._drafter,
            of_one_request(lambda *shape: forward_seconds(self, *shape), room),
            min(room, self._token_budget, self.num_spec_tokens + 1),
            logger,
        )

    def forget(self) -> None:
        """Forget what was learnt."""
        self._drafter.reset()

    def explain(self) -> list[dict[str, Any]]:
        """How the drafter chose the sizes of its trees."""
        return self._drafter.explain()

    def acceptance(self) -> dict[str, Any]:
        """How often what the drafter drafted was accepted."""
        return self._drafter.acceptance()

    def _requests_ended(self, names: list[str]) -> None:
        if names:
            self._drafter.release(self._slots.free(names))
            self._of_batch = None

    def _batch_slots(self) -> torch.Tensor:
        """The slots of the batch's requests, int64 `[B]`; those that are new begin."""
        batch = self.input_batch
        if self._of_batch is not None and self._of_batch[0] == batch.req_ids:
            return self._of_batch[1]
        slots, arrived, lost = self._slots.of(batch.req_ids)
        self._drafter.release(lost)
        for name in arrived:
            row = batch.req_id_to_index[name]
            text = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
            self._drafter.start(slots[row], text)
        tensor = on_device(np.array(slots, np.int64), self.device)
        self._of_batch = list(batch.req_ids), tensor
        return tensor

    def _verify(
        self, step: StepTrees, logits: torch.Tensor
    ) -> tuple[SamplerOutput, DraftTree, Verified]:
        tokens = self._row_tokens(step)
        drafts = step.trees(tokens)
        slots = self._batch_slots()
        roots_before = self._drafter.before(slots)
        unfinished = self.discard_request_mask.np[: len(slots)].astype(np.bool_)
        partly_read = on_device(unfinished, self.device) if unfinished.any() else None
        if partly_read is not None:
            # The text of a prompt that is read in part goes beyond what was read.
            roots_before = roots_before.masked_fill(partly_read, NO_TOKEN)
        before = step.by_row(drafts.before(roots_before))
        target = self._observe(step, slots, tokens, before, logits)
        fixed = target if is_plain_greedy(self.input_batch.sampling_metadata) else None
        output, verified = sample_trees(self, step, drafts, logits, fixed)
        kept = verified
        if partly_read is not None:
            # What is drawn for such a prompt is thrown away.
            emitted = verified.emitted.masked_fill(partly_read[:, None], NO_TOKEN)
            kept = replace(verified, emitted=emitted)
        self._drafter.accepted(slots, drafts, kept)
        return output, drafts, verified

    def _observe(
        self,
        step: StepTrees,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        before: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """Let the drafter learn; grammar masks have already changed some requests' logits."""
        if self._grammar_bound:
            bound = np.array([name in self._grammar_bound for name in self.input_batch.req_ids])
            masked = on_device(bound[step.requests], self.device)
            tokens = tokens.masked_fill(masked, NO_TOKEN)
        of_rows = slots[step.sent.request_of_row] if step.drafted else slots
        return self._drafter.observe(of_rows, tokens, before, logits)

    def _propose(self, roots: IntArray) -> DraftTree:
        if (roots < 0).all():
            return DraftTree.of_roots(on_device(roots, self.device))
        trees = self._drafter.propose(self._batch_slots(), on_device(roots, self.device))
        return shared(trees, self.num_spec_tokens)
