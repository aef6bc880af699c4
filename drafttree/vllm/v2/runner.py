"""vLLM's V2 model runner with draft trees: the order of a step.

The scheduler schedules a chain of draft tokens for each request, before the last step's outcome
is known. The draft tokens are a tree whose shape never leaves the device. The host waits for no
part of a step: positions by depth, masks, acceptance, KV compaction and the next draft follow one
another in the order of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tree_kernels.kv_move import KvMover
from tree_kernels.scheduled_trees import Layout, NodeTokens, node_tokens
from vllm.logger import init_logger
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from drafttree.acceptance_rules import AcceptanceRule
from drafttree.budget.tier_explanation import TierExplanation
from drafttree.drafter import Drafter
from drafttree.method import Method
from drafttree.metrics import Counters
from drafttree.tensor_parallel import NonDraftingRank
from drafttree.tree import DraftTree, Verified
from drafttree.vllm import patches, step_logits
from drafttree.vllm.drafting import DraftingRunner, allocated
from drafttree.vllm.model_inputs import without_placeholders
from drafttree.vllm.step_masks import StepMasks
from drafttree.vllm.structured.binding import no_bound_drafts
from drafttree.vllm.structured.shown_trees import TreeSender, why_not_shown
from drafttree.vllm.v2.chunks import Chunk, mask_chunk
from drafttree.vllm.v2.hooks import check_hooks
from drafttree.vllm.v2.kept_trees import KeptTrees
from drafttree.vllm.v2.requests import RequestRules
from drafttree.vllm.v2.rope import TreeRope, adopt_rope
from drafttree.vllm.v2.sampling import sample_trees
from drafttree.vllm.v2.speculator import TreeSpeculator
from drafttree.vllm.v2.step import StepLayouts
from drafttree.vllm.v2.step_drafts import StepDrafts
from drafttree.vllm.v2.tier_profile import forward_seconds_by_rows
from drafttree.vllm.v2.tier_report import TierReports
from drafttree.vllm.v2.tiers import max_nodes, max_rows, sizes_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")


class TreeRunnerV2(DraftingRunner, GPUModelRunner):
    """Base class of runners, each made from a stock V2 model runner by `patches.adopt`.

    The drafter's slots are the rows of the engine's own state, which stay the same from a request's
    start to its end.
    """

    dropped = (*DraftingRunner.dropped, "_trees", "_rope")
    _drafter: Drafter
    _step: Layout | None = None
    _rope: TreeRope | None = None

    def set_up(self, method: Method[Any], options: dict[str, Any]) -> None:
        """Prepare an adopted runner, before its model is loaded.

        Args:
            method: The method that drafts.
            options: The method's options, as the user gave them.
        """
        check_hooks()
        patches.keep_texts_on_host(self)
        before = allocated(self.device)
        parsed = method.parse(options)
        self.counters = Counters(self.device)
        self._set_up_drafter(method, parsed)
        why_not = no_bound_drafts(self) or why_not_shown(self.parallel_config)
        if why_not is None:
            self._tree_sender = TreeSender(self.vllm_config, self.device)
        self._rules = RequestRules(self.max_num_reqs, why_not)
        self._kept = KeptTrees(self.max_num_reqs, self.num_speculative_steps, self.device)
        self._layouts = StepLayouts(self._kept)
        self._tiers = self.speculative_config.num_speculative_tokens_per_batch_size
        sizes = sizes_of(parsed, self.num_speculative_steps) if patches.chooses_tiers(self) else ()
        self._reports = TierReports(sizes, parsed.shapes if sizes else ())
        self._trees = TreeSpeculator(
            NonDraftingRank(parsed.depth),
            self._kept,
            self.num_speculative_steps,
            self._rules,
            () if parsed.shapes else sizes,
        )
        self._explanation = TierExplanation()
        patches.replace_speculator(self, self._trees)
        self._state_bytes = allocated(self.device) - before
        self._check_tiers()

    def _set_up_drafter(self, method: Method[Any], options: Any) -> None:
        """Make the drafter, or note what it is to be made of when the target has been loaded.

        Args:
            method: The method that drafts.
            options: The method's options, validated.
        """
        raise NotImplementedError

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and take part in the layout of its M-RoPE positions if it has them."""
        super().load_model(*args, **kwargs)
        self._rope = adopt_rope(self)
        if self.structured_outputs_worker is not None:
            patches.limit_grammar_masks(self.structured_outputs_worker, self._max_step_rows)

    def _check_tiers(self) -> None:
        """Check that the running requests' trees fit in a step, and say how large they are."""
        budget, most = self._step_budget(), max_nodes(self._tiers, self.max_num_reqs)
        if most > budget:
            raise RuntimeError(
                f"draft trees of {most} nodes do not fit in a step of {budget} tokens: set "
                f"max_num_batched_tokens={most} or more"
            )
        logger.info(
            "Draft tokens for each request, by the number of requests: %s",
            ", ".join(f"{size} for {first} to {last}" for first, last, size in self._tiers),
        )

    @property
    def draft_sizes(self) -> list[int]:
        """The numbers of draft tokens that a request may have in a step, the greatest first."""
        sizes = {size for *_, size in self._tiers} | {*self._reports.sizes}
        return sorted(sizes - {0}, reverse=True)

    @property
    def _max_step_rows(self) -> int:
        """Greatest number of rows of a step that have logits."""
        return min(max_rows(self._tiers, self.max_num_reqs), self._step_budget())

    @property
    def _most_drafted(self) -> int:
        # Where the scheduler chooses, more requests have smaller trees: as many nodes at most.
        most = self._tiers[0][1] if self._reports.sizes else self.max_num_reqs
        return min(most, self.max_num_reqs)

    @property
    def _logits_bytes(self) -> int:
        return min(self._max_step_rows, self._max_logits_rows) * self._logits_row_bytes

    @cached_property
    def _max_logits_rows(self) -> int:
        """Greatest number of rows whose logits are computed at a time."""
        if self.lora_config is not None:
            # Adapters of the output layer are applied to the rows of a whole step.
            return self._max_step_rows
        return max(step_logits.max_rows(self._logits_row_bytes), 1 + self.num_speculative_steps)

    @property
    def _logits_row_bytes(self) -> int:
        """Bytes of a row of logits, and of the copy in float32 that is sampled from."""
        return int(self.vocab_size * (self.model_config.dtype.itemsize + 4))

    def profile_forwards(self) -> None:
        """Measure forwards, if the scheduler chooses tiers."""
        if self._reports.sizes:
            self._reports.forward_seconds = forward_seconds_by_rows(self, self._max_step_rows)

    def explain(self) -> list[dict[str, Any]]:
        """How tiers were chosen, as the scheduler tells; or how the drafter chose its sizes."""
        return self._explanation.rows() if self._reports.sizes else super().explain()

    def choices(self) -> list[dict[str, Any]]:
        """The scheduler's last choices, the newest at the end; see `TierChoice.row`."""
        return self._explanation.choices()

    # Requests.

    def _remove_request(self, req_id: str) -> bool:
        # A request ends, is preempted, or goes on as a streaming session with more of a prompt.
        row = self.req_states.req_id_to_index.get(req_id)
        if row is not None:
            self._stop(row)
        removed: bool = super()._remove_request(req_id)
        return removed

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Add the requests that start, or start again after preemption."""
        super().add_requests(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            row = self.req_states.req_id_to_index[request.req_id]
            self._rules.start(request.req_id, row, request.sampling_params, self.sampler)
            self._start(row, request.prefill_token_ids)

    def _start(self, row: int, tokens: Sequence[int]) -> None:
        """A request starts in a row, with these tokens to read."""

    def _stop(self, row: int) -> None:
        """The request in a row ends."""
        self._drafter.release([row])

    # One step, in the order of the engine's callbacks.

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Run the target; the scheduler may want drafts looked up after it only for its report."""
        with self._shows_trees(scheduler_output):
            self._trees.looks_up = patches.wants_lookup(scheduler_output)
            self._scheduler_output = scheduler_output
            self._rules.finish(scheduler_output.finished_req_ids)
            update = patches.update_of(scheduler_output)
            if update is not None:
                self._explanation.add(update)
            return super().execute_model(scheduler_output, *args, **kwargs)

    def prepare_attn(self, input_batch: InputBatch) -> Any:
        """Lay out the step: KV slots along a chain, then positions and masks of the trees."""
        prepared = super().prepare_attn(input_batch)
        self._ends_of_logits = input_batch.cu_num_logits_np
        chained = None if self._rope is None else input_batch.positions.clone()
        self._step = self._layouts.lay_out(input_batch, self.req_states.prefill_len.gpu)
        if self._rope is not None:
            self._rope.move(input_batch.positions - chained)
        masks = None
        if input_batch.num_draft_tokens:
            masks = StepMasks(self._step.requests, self._step.sizes, self._step.masks)
        self._set_step_masks(masks)
        self._laid_out(input_batch, self._step)
        return prepared

    def _laid_out(self, batch: InputBatch, step: Layout) -> None:
        """A step is laid out, with the trees that were drafted before it."""

    def _show_bound(self, batch: InputBatch, step: Layout) -> None:
        """Show the trees of requests with a grammar to the scheduler, which masks their nodes."""
        if self._tree_sender and batch.has_structured_output_reqs and step.width > 1:
            trees = StepDrafts.of(batch, step)
            self._tree_sender.show(self._scheduler_output, trees.by_request)

    def _set_active_loras(self, of_logits: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """Activate LoRA adapters: one for each row of logits, where vLLM names each request's."""
        if self._step is not None and len(of_logits) == len(self._ends_of_logits) - 1:
            of_logits = tuple(np.repeat(of_logits, np.diff(self._ends_of_logits)).tolist())
        super()._set_active_loras(of_logits, *args, **kwargs)

    def prepare_dummy_attn(self, *args: Any, **kwargs: Any) -> Any:
        """Lay out a step without requests."""
        self._set_step_masks(None)
        return super().prepare_dummy_attn(*args, **kwargs)

    def _set_step_masks(self, masks: StepMasks | None) -> None:
        for builder in self._builders():
            builder.step_masks = masks

    def sample(
        self,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        grammar_output: GrammarOutput | None,
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Sample, verify, and compact the KV caches."""
        step, self._step = self._step, None
        assert step is not None
        # Graphs may be captured next.
        self._set_step_masks(None)
        batch = input_batch
        self._begin_report(batch)
        # The drafter's text of a prompt that is read in part goes beyond the root.
        tokens = node_tokens(
            without_placeholders(self, batch.input_ids),
            *(batch.cu_num_logits, step, step.parents),
            self._trees.drafter.previous_tokens(batch.idx_mapping),
        )
        trees = DraftTree(tokens.nodes, step.parents, step.tree_sizes)
        nans: list[torch.Tensor] = []

        def logits_of(chunk: Chunk) -> torch.Tensor:
            logits: torch.Tensor = self.model.compute_logits(
                hidden_states[chunk.rows_of(batch.logits_indices)]
            )
            self._learn(batch, tokens, logits, chunk)
            if grammar_output is not None:
                mask_chunk(self.structured_outputs_worker, logits, batch, grammar_output, chunk)
            if self.sampler.compute_nans:
                roots = chunk.requests_of(batch.cu_num_logits[:-1]).long() - chunk.rows.start
                nans.append(get_num_nans(logits)[roots])
            return logits

        verified, logprobs = sample_trees(
            *(self.sampler, batch, step, trees, logits_of, tokens.rows),
            self._trees.drafter.max_depth,
            self._max_logits_rows,
            self._rule,
        )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            verified.num_emitted,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        self._move_kv(step, verified)
        self._on_verified(batch, step, trees, verified)
        self.counters.add_step(step.begun, trees, verified)
        output = SamplerOutput(
            sampled_token_ids=verified.emitted,
            logprobs_tensors=logprobs,
            num_nans=torch.cat(nans) if nans else None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output, num_sampled, num_rejected

    def _begin_report(self, batch: InputBatch) -> None:
        """Begin the step's report to the scheduler, before its trees are verified."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The draft tokens, none of which the scheduler drops: they are in the step already."""
        taken: DraftTokenIds | None = super().take_draft_token_ids()
        if taken is not None:
            patches.send_proposals(taken, dict.fromkeys(taken.req_ids))
        return taken

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Sample, verify and draft; let the report for the scheduler travel with the tokens."""
        return self._reports.attach(super().sample_tokens(grammar_output))

    def _learn(
        self, batch: InputBatch, tokens: NodeTokens, logits: torch.Tensor, chunk: Chunk
    ) -> None:
        """Learn from the logits after the nodes of a chunk."""

    def _rule(self, trees: DraftTree, requests: slice) -> AcceptanceRule | None:
        """The acceptance rule of some of the step's requests; None for the engine's sampler."""
        return None

    def _on_verified(
        self, batch: InputBatch, step: Layout, trees: DraftTree, verified: Verified
    ) -> None:
        """The step's trees are verified, and the KV has been moved."""

    def _move_kv(self, step: Layout, verified: Verified) -> None:
        """Move the KV of the accepted path to the slots right after the root's."""
        self._compact(step, verified.path, self._movers)

    def _compact(
        self, step: Layout, path: torch.Tensor, movers: Sequence[Sequence[KvMover]]
    ) -> None:
        """Move the KV of the nodes of `path`, `int32 [B, D + 1]`, in some of the caches."""
        if step.width == 1:
            return
        for group, of_group in enumerate(movers):
            slots = self.block_tables.slot_mappings[group]
            for move in of_group:
                move(slots, path, step.place_of_node)
