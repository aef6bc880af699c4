"""vLLM's model runner with a drafter that needs no model, and learns from the target's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.outputs import SamplerOutput

from drafttree.drafter import Drafter, DraftTree
from drafttree.method import Method
from drafttree.verify import Verified
from drafttree.vllm.forward import forward_seconds
from drafttree.vllm.request_slots import RequestSlots
from drafttree.vllm.runner import TreeModelRunner
from drafttree.vllm.sampling import is_plain_greedy, sample_trees
from drafttree.vllm.step import FILLER, StepTrees

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


# Below vLLM's own logger, or nothing would print it.
logger = init_logger(f"vllm.{__name__}")

_CONTEXT = 128
"""Cached tokens of the request whose forwards are timed."""


class TableRunner(TreeModelRunner):
    """Drafts with a `Drafter`, which sees all of the target's logits."""

    def _set_up(
        self, method: Method, options: dict[str, Any], logits_processors: Sequence[Any] | None
    ) -> None:
        self._drafter: Drafter = method.make_drafter(
            method.parse(options),
            self.model_config.get_vocab_size(),
            self.device,
            self.model_config.model,
            logger,
        )
        self._drafter.allot(self.max_num_reqs, self.max_model_len)
        self._slots = RequestSlots(self.max_num_reqs)
        super()._set_up(method, options, logits_processors)

    def calibrate(self) -> None:
        """Let the drafter time forwards of the model as it will run; its cache is empty still."""
        spec = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        # The engine keeps a block for itself.
        room = min(self.max_model_len, (self.kv_cache_config.num_blocks - 1) * spec.block_size)

        def forward(tokens: int) -> float:
            context = min(_CONTEXT, room - tokens)
            tree = tokens > 1
            return forward_seconds(self, 1, tokens, context, tree=tree, repeat=1)[0]

        most = min(room, self.num_spec_tokens + 1)
        self._drafter.calibrate(forward, most)

    def forget(self) -> None:
        """Forget what was learnt."""
        self._drafter.reset()

    def explain(self) -> list[dict[str, Any]]:
        """How the drafter chose the sizes of its trees."""
        return self._drafter.explain()

    def acceptance(self) -> dict[str, Any]:
        """How often what the drafter drafted was accepted."""
        return self._drafter.acceptance()

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        # Who is preempted is read again from the beginning.
        self._requests_ended(list(scheduler_output.preempted_req_ids or ()))
        return super()._update_states(scheduler_output)

    def _requests_began(self, names: list[str]) -> None:
        self._requests_ended(names)

    def _requests_ended(self, names: list[str]) -> None:
        self._drafter.release(self._slots.free(names))

    def _batch_slots(self) -> torch.Tensor:
        """The slots of the batch's requests, int64 `[B]`; those that are new begin."""
        batch = self.input_batch
        slots, arrived = self._slots.of(batch.req_ids)
        for name in arrived:
            row = batch.req_id_to_index[name]
            text = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
            self._drafter.start(slots[row], text)
        return torch.tensor(slots)

    def _verify(
        self, step: StepTrees, logits: torch.Tensor
    ) -> tuple[SamplerOutput, DraftTree, Verified]:
        tokens = self._row_tokens(step)
        drafts = step.trees(tokens)
        slots = self._batch_slots()
        unfinished = torch.from_numpy(self.discard_request_mask.np[: len(slots)].astype(np.bool_))
        # The text of a prompt that is read in part goes beyond what was read.
        before = drafts.before(self._drafter.before(slots).masked_fill(unfinished, FILLER))
        target = self._observe(step, slots, tokens, step.by_row(before), logits)
        fixed = target if is_plain_greedy(self.input_batch.sampling_metadata) else None
        output, verified = sample_trees(self, step, drafts, logits, fixed)
        # What is drawn for such a prompt is thrown away.
        emitted = verified.emitted.masked_fill(unfinished[:, None], FILLER)
        self._drafter.accepted(slots, drafts, replace(verified, emitted=emitted))
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
            masked = [name in self._grammar_bound for name in self.input_batch.req_ids]
            tokens = tokens.masked_fill(torch.from_numpy(np.repeat(masked, step.counts)), FILLER)
        of_rows = slots.repeat_interleave(torch.from_numpy(step.counts))
        return self._drafter.observe(of_rows, tokens, before, logits)

    def _propose(self, roots: torch.Tensor) -> DraftTree:
        return self._drafter.propose(self._batch_slots(), roots)
