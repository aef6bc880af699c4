"""vLLM's model runner with draft trees: the order of a step.

The scheduler schedules draft tokens as a chain. The chain is a tree in breadth-first order, and
everything that a tree needs happens here, in the order of a step: positions by depth, masks,
acceptance, KV compaction, and the next draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.v1.outputs import DraftTokenIds, SamplerOutput

from drafttree.arrays import BoolArray, IntArray
from drafttree.transfer import on_device
from drafttree.tree import NO_TOKEN, DraftTree, Verified
from drafttree.vllm import patches
from drafttree.vllm.model_inputs import rope_positions
from drafttree.vllm.pending_drafts import PendingDrafts
from drafttree.vllm.request_slots import RequestSlots
from drafttree.vllm.step import StepState, StepTrees
from drafttree.vllm.step_logits import GrammarMasks, StepLogits
from drafttree.vllm.step_share import share_of_step
from drafttree.vllm.structured.grammar_runner import GrammarRunner

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")

S = TypeVar("S", bound=StepState)


class TreeModelRunner(GrammarRunner, Generic[S]):
    """Base class of the model runners of all kinds of drafter.

    A subclass drafts in `_propose` and verifies in `_verify`. What a step passes from one of the
    engine's callbacks to the next is a `StepState`, or a subclass of it, which lives from
    `_prepare_inputs` to `_sample`.
    """

    _step: S | None = None
    _pending: PendingDrafts | None = None
    _verified: torch.Tensor | None = None
    _root_logits: torch.Tensor | None = None

    def set_up(self, *args: Any, **kwargs: Any) -> None:
        """Prepare an adopted runner, before its model is loaded."""
        super().set_up(*args, **kwargs)
        self._slots = RequestSlots(self.max_num_reqs)
        self._slots_of_batch: tuple[list[str], torch.Tensor] | None = None
        patches.skip_rejection_sampling(self)

    def _new_step(self, trees: StepTrees) -> S:
        """The state of a step that begins."""
        raise NotImplementedError

    def _verify(self, step: S, logits: StepLogits) -> tuple[SamplerOutput, Verified]:
        """Verify the step's trees; sets `step.drafts` if it is not set yet.

        Args:
            step: The step.
            logits: The target's raw logits.
        """
        raise NotImplementedError

    def _propose(self, roots: IntArray) -> DraftTree:
        """Draft the next step's trees, of at most `num_spec_tokens` draft tokens.

        Args:
            roots: Last token of each request, `int32 [B]`; -1 for those not drafted for.
        """
        raise NotImplementedError

    def _request_started(self, name: str, slot: int) -> None:
        """A request starts or restarts in `slot`."""

    def _step_verified(self, step: S, verified: Verified) -> None:
        """Called at the end of a step, after KV compaction."""

    # The slots of the batch's requests.

    def _requests_ended(self, names: list[str]) -> None:
        """Requests finished, were preempted or restart: drop their state."""
        if names:
            self._drafter.release(self._slots.free(names))
            self._slots_of_batch = None

    def _batch_slots(self) -> torch.Tensor:
        """Slots of the batch's requests, `int64 [B]`; starts the requests that are new."""
        names = self.input_batch.req_ids
        if self._slots_of_batch is not None and self._slots_of_batch[0] == names:
            return self._slots_of_batch[1]
        slots, arrived, taken = self._slots.of(names)
        self._drafter.release(taken)
        slot_of = dict(zip(names, slots, strict=True))
        for name in arrived:
            self._request_started(name, slot_of[name])
        tensor = on_device(np.array(slots, np.int64), self.device)
        self._slots_of_batch = list(names), tensor
        return tensor

    # One step, in the order of the engine's callbacks.

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        finished = list(scheduler_output.finished_req_ids)
        arrived = [request.req_id for request in scheduler_output.scheduled_new_reqs]
        # A preempted request is computed again from the beginning. A streaming session that goes on
        # arrives again under its old name.
        self._requests_ended([*finished, *(scheduler_output.preempted_req_ids or ()), *arrived])
        self._finished(finished)
        going_on = {*arrived}.intersection(self.requests).difference(finished)
        deferred = super()._update_states(scheduler_output)
        for request_id in arrived:
            self._arrived(request_id, goes_on=request_id in going_on)
        return deferred

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._take_bound(scheduler_output)
        trees = StepTrees.of_batch(
            self.input_batch.req_ids,
            scheduler_output.scheduled_spec_decode_tokens,
            self._stored,
            num_scheduled_tokens,
            self._decoding(),
            rows=prepared[0],
        )
        # The engine has laid out KV slots and positions along a chain. The slots can stay until the
        # accepted path is known, but rotary positions must follow the depth now.
        if trees.drafted:
            offsets = trees.tensors.position_offsets
            self.positions[: len(offsets)] += offsets
            rope = rope_positions(self)
            if rope is not None:
                # Drafts are text, along which all dimensions advance together.
                rope[:, : len(offsets)] += offsets
        self._step = self._new_step(trees)
        # The engine computes the logits of these rows, and `StepLogits` those of the others.
        return prepared[0][: self._max_logits_rows], *prepared[1:]

    def _decoding(self) -> BoolArray:
        """Whether each request has output tokens and no unread prompt, `bool [B]`."""
        batch = self.input_batch
        count = batch.num_reqs
        begun = batch.num_tokens_no_spec[:count] > batch.num_prompt_tokens[:count]
        unfinished = self.discard_request_mask.np[:count]
        decoding: BoolArray = begun & ~unfinished.astype(np.bool_)
        return decoding

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        # Without a step the engine runs a dummy batch, for instance to warm up.
        self._show_masks(self._step)
        return super()._build_attention_metadata(*args, **kwargs)

    def _show_masks(self, step: S | None) -> None:
        """Show the masks of a step's trees to the attention backends."""
        if step is not None and step.trees.drafted:
            step.masks = step.trees.masks()
        for builder in self._builders():
            builder.step_masks = None if step is None else step.masks

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = super()._model_forward(*args, **kwargs)
        step = self._step
        if step is not None:
            step.hidden = hidden
        return hidden

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, verify and draft."""
        step = self._step
        if grammar_output and step:
            # The drafter learns from the logits before they are masked, and where there are many
            # rows, the engine would mask them all at once.
            scheduled = self.execute_model_state.scheduler_output.scheduled_spec_decode_tokens
            rows = dict(zip(self.input_batch.req_ids, step.trees.starts.tolist(), strict=True))
            step.grammars = GrammarMasks.of(grammar_output, scheduled, rows)
            grammar_output = None
        # After a partial prefill the engine samples a token and then rewinds the generator, which
        # CPU generators do not support. Without its generator the request's state is unchanged.
        generators = self.input_batch.generators
        unfinished = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        hidden = {row: generators.pop(row) for row in unfinished.tolist() if row in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(hidden)

    def _sample(
        self, logits: torch.Tensor, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        step, self._step = self._step, None
        if step is None:
            return super()._sample(logits, spec_decode_metadata)
        of_step = self._logits(step, logits)
        output, verified = self._verify(step, of_step)
        if envs.VLLM_COMPUTE_NANS_IN_LOGITS:
            self._root_logits = of_step.of(step.trees.root_rows)
        self._move_kv(step.trees, verified)
        if step.trees.drafted:
            self.counters.add_step(step.trees.tensors.counted, step.drafts, verified)
        else:
            self.counters.add_plain_step(int(step.trees.counted.sum()))
        self._count_forced(step.trees, step.drafts, verified)
        self._step_verified(step, verified)
        learned = self._learned(step.trees, verified)
        drafts, learned = step.trees.as_proposed(step.drafts, learned)
        self._drafter.on_verified(self._batch_slots(), drafts, learned)
        return output

    def _get_nans_in_logits(self, logits: torch.Tensor | None) -> dict[str, int]:
        # The engine takes the first rows for those of the requests.
        roots, self._root_logits = self._root_logits, None
        counts: dict[str, int] = super()._get_nans_in_logits(logits if roots is None else roots)
        return counts

    def _logits(self, step: S, first: torch.Tensor) -> StepLogits:
        """The logits of a step, of whose first rows the engine has computed them."""

        def compute(rows: torch.Tensor) -> Any:
            return self.model.compute_logits(step.hidden[step.trees.rows[rows]])

        return StepLogits(first, compute, len(step.trees.rows), step.grammars)

    def _partial_prefills(self) -> torch.Tensor | None:
        """The requests with a partial prefill, `bool [B]`; None if there are none."""
        unfinished = self.discard_request_mask.np[: self.input_batch.num_reqs].astype(np.bool_)
        return on_device(unfinished, self.device) if unfinished.any() else None

    def _learned(self, trees: StepTrees, verified: Verified) -> Verified:
        """The outcome without the tokens that the engine drops after partial prefills.

        It says whether prompts were read. The last part of one looks like a decode step: its
        request may have been in the step before, and has its first token.
        """
        if not trees.counted.all():
            verified = replace(verified, reads_prompts=True)
        partial = self._partial_prefills()
        if partial is None:
            return verified
        emitted = verified.emitted.masked_fill(partial[:, None], NO_TOKEN)
        return replace(verified, emitted=emitted)

    def _move_kv(self, trees: StepTrees, verified: Verified) -> None:
        """Move the KV of the accepted path to the slots right after the root's."""
        if not trees.drafted:
            return
        tables = self.input_batch.block_table.block_tables
        for table, movers in zip(tables, self._movers, strict=True):
            slots = trees.by_node(table.slot_mapping.gpu[trees.rows])
            for move in movers:
                move(slots, verified.path)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # The engine asks for the whole batch; `take_draft_token_ids` truncates each tree instead.
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: list[list[int]],
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Draft the next step's trees, which `take_draft_token_ids` hands to the engine."""
        request_ids = self.input_batch.req_ids
        self._verified = None
        roots = np.array(
            [
                ids[-1] if ids and name not in self._drafts_off else NO_TOKEN
                for name, ids in zip(request_ids, sampled_token_ids, strict=True)
            ],
            np.int32,
        )
        trees = self._propose(roots)
        if trees.drafted:
            self._pending = PendingDrafts.of(request_ids, roots >= 0, trees, self._verified)
        return [[] for _ in request_ids]

    def _as_declared(self, trees: DraftTree) -> DraftTree:
        """Truncate trees to the method's declared size, which the engine relies on."""
        excess = trees.tokens.shape[1] - 1 - self.num_spec_tokens
        if excess > 0:
            logger.warning_once(
                "%s drafts %d tokens, but its options declare num_draft_tokens=%d: the rest of its "
                "trees is dropped",
                type(self._drafter).__name__,
                self.num_spec_tokens + excess,
                self.num_spec_tokens,
            )
        return trees.truncated(self.num_spec_tokens)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Hand the trees to the scheduler, which counts draft tokens on the host.

        This is the only place in a step where the host waits for the device.
        """
        pending, self._pending = self._pending, None
        share = self._share_of_step()
        if pending is not None:
            left = np.array([*map(self._tokens_left, pending.request_ids)], np.int32)
            stops = self._ends_of_drafts(pending.request_ids)
            # Of the candidates of requests with a grammar, the scheduler chooses.
            width = pending.packed.values.shape[1]
            shares = [
                width if name in self._grammar_bound else share for name in pending.request_ids
            ]
            self._draft_token_ids, trees = pending.truncate(np.array(shares), left, stops)
            self._stored.update(zip(pending.request_ids, trees, strict=True))
        taken: DraftTokenIds | None = super().take_draft_token_ids()
        if taken is not None and self._grammar_bound:
            self._propose_bound(taken, share, pending.to_verify() if pending else {})
        return taken

    def _share_of_step(self) -> int:
        """Greatest number of nodes of a request's tree in the next step, the root counted."""
        requests = max(self.input_batch.num_reqs, 1)
        return max(share_of_step(self._token_budget, requests, self.max_num_reqs), 1)

    def _ending_tokens(self, request_id: str) -> set[int]:
        """The tokens that end a request."""
        parameters = self.requests[request_id].sampling_params
        if parameters is None:
            return set()
        # None where the request ignores it.
        eos = getattr(parameters, "eos_token_id", None)
        return {*(parameters.stop_token_ids or ())} | ({eos} if eos is not None else set())

    def _ends_of_drafts(self, request_ids: Sequence[str]) -> list[set[int]] | None:
        """The tokens below which nothing is drafted for each request; None for no such tokens."""
        return None

    def _ends_of_seeded(self) -> dict[int, set[int]]:
        """The tokens that end each seeded request of the batch, by its row."""
        names = self.input_batch.req_ids
        return {row: self._ending_tokens(names[row]) for row in self.input_batch.generators}
