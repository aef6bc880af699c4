"""vLLM's model runner, verifying draft trees.

The scheduler believes that it scheduled a chain of drafts. The chain is a tree in breadth-first
order, and what differs for a tree happens here, in the order of a step: positions by depth, masks,
acceptance, the move of the accepted path's KV, and the next draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tree_kernels.kv_move import KvMover, movers_of
from vllm.logger import init_logger
from vllm.v1.outputs import DraftTokenIds, SamplerOutput
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from drafttree.drafter import DraftTree
from drafttree.metrics import Counters
from drafttree.verify import Verified
from drafttree.vllm.backends import TreeBackend, TreeMetadataBuilder
from drafttree.vllm.coming_trees import ComingTrees
from drafttree.vllm.graphs import capture_small_batches
from drafttree.vllm.sampling import build_logits_processors
from drafttree.vllm.step import NO_TOKEN, IntArray, StepMasks, StepTrees, StoredTree

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from drafttree.method import Method

# Below vLLM's own logger, or nothing would print it.
logger = init_logger(f"vllm.{__name__}")

OPT_OUT = "drafttree"
"""The key of `SamplingParams.extra_args` that turns drafting off for a request when false."""


class HostProposer:
    """What the engine builds in place of a proposer; the runner drafts by itself."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        pass

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Called by the engine; there is nothing to load."""

    def propose(self, *args: object, **kwargs: object) -> list[list[int]]:
        """Never called: `TreeModelRunner.propose_draft_token_ids` stands before it."""
        raise NotImplementedError("draft trees are proposed by TreeModelRunner")


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class TreeModelRunner(GPUModelRunner):
    """Made from a stock runner by `adopt`, on a CPU from the one that derives from the GPU's. A
    subclass says how it drafts and verifies."""

    @classmethod
    def adopt(
        cls,
        runner: GPUModelRunner,
        method: Method,
        options: dict[str, Any],
        logits_processors: Sequence[Any] | None,
    ) -> TreeModelRunner:
        """Turn a stock runner that has not loaded its model into one that verifies trees."""
        runner.__class__ = type(cls.__name__, (cls, type(runner)), {})
        tree_runner = cast(TreeModelRunner, runner)
        before = _allocated(runner.device)
        tree_runner._set_up(method, options, logits_processors)
        tree_runner._kept_bytes = _allocated(runner.device) - before
        return tree_runner

    def _set_up(
        self, method: Method, options: dict[str, Any], logits_processors: Sequence[Any] | None
    ) -> None:
        self._plan_budget()
        self.input_batch.logitsprocs = build_logits_processors(
            self.vllm_config, self.device, logits_processors
        )
        self.input_batch.logitsprocs_need_output_token_ids = bool(logits_processors)
        self.counters = Counters(self.device)
        self._stored: dict[str, StoredTree] = {}
        self._step: StepTrees | None = None
        self._coming: ComingTrees | None = None
        self._drafts_off: set[str] = set()
        self._grammar_bound: set[str] = set()

    def _plan_budget(self) -> None:
        scheduler = self.scheduler_config
        budget: int = min(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        )
        self._token_budget = budget
        full = budget // self.max_num_reqs - 1
        if full < self.num_spec_tokens:
            logger.warning(
                "A budget of %d tokens a step cuts draft trees to %d of %d nodes when all "
                "max_num_seqs=%d requests run; %d tokens would verify whole trees",
                budget,
                max(full, 0),
                self.num_spec_tokens,
                self.max_num_reqs,
                self.max_num_reqs * (1 + self.num_spec_tokens),
            )
        logger.info(
            "Draft trees reserve up to %d KV slots a request, beside its own tokens",
            self.num_spec_tokens,
        )

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """Let the engine see what a step takes before it sizes its KV cache.

        By itself it sees one row of logits a request, where trees have one for each node.
        """
        super().profile_run(*args, **kwargs)
        rows = min(self._token_budget, self.max_num_reqs * (1 + self.num_spec_tokens))
        vocab = self.model_config.get_vocab_size()
        logits = torch.empty(rows, vocab, dtype=self.model_config.dtype, device=self.device)
        logger.info(
            "Logits of %d nodes, the most that max_num_batched_tokens and max_num_seqs let into "
            "a step, take %.1f MiB",
            rows,
            logits.nbytes / 2**20,
        )

    def _check_and_update_cudagraph_mode(self, *args: Any, **kwargs: Any) -> None:
        """Called by the engine before it captures graphs."""
        super()._check_and_update_cudagraph_mode(*args, **kwargs)
        capture_small_batches(
            self.speculative_config, self.compilation_config, self.cudagraph_dispatcher
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and count what drafting keeps with its weights: the engine sizes its KV
        cache by these and by what a step takes, and overlooks what was there before."""
        super().load_model(*args, **kwargs)
        if self.device.type == "cuda":
            self.model_memory_usage += self._kept_bytes
            logger.info("What drafting keeps takes %.1f MiB", self._kept_bytes / 2**20)

    def reset_drafting(self) -> None:
        """Forget what was learnt, and all counts."""
        self.forget()
        self.counters = Counters(self.device)

    def forget(self) -> None:
        """Forget what was learnt, if anything is: the weights have changed, say."""

    def calibrate(self) -> None:
        """The model is ready to run, and no request has come yet."""

    def explain(self) -> list[dict[str, Any]]:
        """How the sizes of trees were chosen, where they are chosen."""
        return []

    def acceptance(self) -> dict[str, Any]:
        """How often what was drafted was accepted, where that is counted by node or by source."""
        return {}

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Build the caches, and what will move rows in them."""
        super().initialize_kv_cache(*args, **kwargs)
        # The batch's holder counts the rows of a chain; this one sees a row a request, as trees are
        # drawn level by level.
        self.input_batch.thinking_budget_state_holder = maybe_create_thinking_budget_state_holder(
            self.vllm_config.reasoning_config, self.max_num_reqs, 0, self.device, False
        )
        layers = self.compilation_config.static_forward_context
        self._movers: list[list[KvMover]] = []
        for group in self.kv_cache_config.kv_cache_groups:
            rows = []
            for name in group.layer_names:
                backend = layers[name].get_attn_backend()
                assert issubclass(backend, TreeBackend)
                rows.append(backend.kv_rows(layers[name].kv_cache))
            self._movers.append(movers_of(chain.from_iterable(rows)))

    # One step, from top to bottom.

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        finished = list(scheduler_output.finished_req_ids)
        arrived = [request.req_id for request in scheduler_output.scheduled_new_reqs]
        # Who is preempted is read again from the beginning; a streaming session that goes on begins
        # anew under its old name.
        self._requests_ended([*finished, *(scheduler_output.preempted_req_ids or ()), *arrived])
        self._drafts_off.difference_update(finished)
        self._grammar_bound.difference_update(finished)
        for request_id in finished:
            self._stored.pop(request_id, None)
        deferred = super()._update_states(scheduler_output)
        for request_id in arrived:
            parameters = self.requests[request_id].sampling_params
            bound = parameters is not None and parameters.structured_outputs is not None
            if bound:
                logger.warning_once("Requests with structured output are served without drafts")
            extra = parameters.extra_args if parameters is not None else None
            wanted = parameters is not None and (extra or {}).get(OPT_OUT) is not False
            for names, holds in ((self._grammar_bound, bound), (self._drafts_off, not wanted)):
                (names.add if holds else names.discard)(request_id)
        return deferred

    def _requests_ended(self, names: list[str]) -> None:
        """Requests left, or begin anew: what was known of them goes."""

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        # The engine laid KV slots and positions out as a chain. The slots stay so until the
        # accepted path is known; rotary positions must go by depth at once.
        self._step = StepTrees.of_batch(
            self.input_batch.req_ids,
            scheduler_output.scheduled_spec_decode_tokens,
            self._stored,
            num_scheduled_tokens,
            self._answering(),
            rows=prepared[0],
        )
        if self._step.drafted:
            offsets = self._step.sent.position_offsets
            self.positions[: len(offsets)] += offsets
        return prepared

    def _answering(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """The requests that have an answer already and go on with it, `bool [B]`."""
        batch = self.input_batch
        count = batch.num_reqs
        begun = batch.num_tokens_no_spec[:count] > batch.num_prompt_tokens[:count]
        unfinished = self.discard_request_mask.np[:count]
        answering: np.ndarray[Any, np.dtype[np.bool_]] = begun & ~unfinished.astype(np.bool_)
        return answering

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        trees = self._step_masks(step) if step is not None and step.drafted else None
        for groups in self.attn_groups:
            for group in groups:
                builder = group.get_metadata_builder(0)
                assert isinstance(builder, TreeMetadataBuilder)
                builder.step_trees = trees
        return super()._build_attention_metadata(*args, **kwargs)

    def _step_masks(self, step: StepTrees) -> StepMasks:
        return step.masks()

    def _row_tokens(self, step: StepTrees) -> torch.Tensor:
        """The input tokens of the rows that have logits, `int32 [R]`."""
        rows = len(step.rows)
        # Where all of the batch's rows have logits they need no gathering.
        every = rows == len(step.position_offsets)
        return self.input_ids.gpu[:rows] if every else self.input_ids.gpu[step.rows]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, verify and draft."""
        # For a prompt read in part the engine draws and then takes the draw back, which generators
        # on a CPU cannot do. Without its generator the request loses no draw.
        generators = self.input_batch.generators
        unfinished = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        kept = {row: generators.pop(row) for row in unfinished.tolist() if row in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(kept)

    def _sample(
        self, logits: torch.Tensor, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        step = self._step
        if step is None:
            return super()._sample(logits, spec_decode_metadata)
        output, drafts, verified = self._verify(step, logits)
        self._move_kv(step, verified)
        self.counters.add_step(step.sent.counted, drafts, verified)
        self._step = None
        return output

    def _verify(
        self, step: StepTrees, logits: torch.Tensor
    ) -> tuple[SamplerOutput, DraftTree, Verified]:
        """What the target says of the step's trees, by its raw logits, `[R, V]`."""
        raise NotImplementedError

    def _move_kv(self, step: StepTrees, verified: Verified) -> None:
        """Move the accepted path's KV to the slots right after the root's."""
        if not step.drafted:
            return
        tables = self.input_batch.block_table.block_tables
        for table, movers in zip(tables, self._movers, strict=True):
            slots = step.by_node(table.slot_mapping.gpu[step.rows])
            for move in movers:
                move(slots, verified.path)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # The engine asks for the whole batch at once; drafts are cut request by request below.
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: list[list[int]],
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Draft the next step's trees; `take_draft_token_ids` has them."""
        request_ids = self.input_batch.req_ids
        undrafted = self._drafts_off | self._grammar_bound
        roots = np.array(
            [
                ids[-1] if ids and name not in undrafted else NO_TOKEN
                for name, ids in zip(request_ids, sampled_token_ids, strict=True)
            ],
            np.int32,
        )
        trees = self._propose(roots)
        if trees.drafted:
            self._coming = ComingTrees.of(request_ids, roots >= 0, trees)
        return [[] for _ in request_ids]

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Hand the trees to the scheduler, which counts drafts on the host: here it waits for the
        device, and not before."""
        coming, self._coming = self._coming, None
        if coming is not None:
            # A running request must never wait because others draft: each gets its share at most.
            # While more may join, a quarter of the budget is left for their prompts.
            budget = self._token_budget
            if len(coming.request_ids) < self.max_num_reqs:
                budget -= budget // 4
            share = max(budget // len(coming.request_ids), 1)
            left = np.array([*map(self._tokens_left, coming.request_ids)], np.int32)
            self._draft_token_ids, trees = coming.cut(share, left)
            self._stored.update(zip(coming.request_ids, trees, strict=True))
        taken: DraftTokenIds | None = super().take_draft_token_ids()
        return taken

    def _propose(self, roots: IntArray) -> DraftTree:
        """The next step's trees under `roots`, `int32 [B]`, before any is cut; -1 for none."""
        raise NotImplementedError

    def _tokens_left(self, request_id: str) -> int:
        state = self.requests[request_id]
        room = self.max_model_len - state.num_tokens
        limit = state.sampling_params.max_tokens if state.sampling_params else None
        return room if limit is None else min(room, limit - len(state.output_token_ids))
