"""Base class of SGLang's workers for draft trees.

A decode step, from top to bottom: draft, verify in one forward of the target, accept drafts, move
the accepted path's KV, and store the roots of the next step.
"""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_spec
from sglang.srt.utils.async_probe import sanitize_nan_logits

from drafttree.drafter import Drafter
from drafttree.grammar.forced_tokens import ForcedTokens
from drafttree.method import Method
from drafttree.metrics import Counters
from drafttree.model_files import bos_token, local_folder, reads_files
from drafttree.sglang import long_rope
from drafttree.sglang.grammars import BoundTrees, has_grammars, mask_trees
from drafttree.sglang.graphs.worker import GraphWorker
from drafttree.sglang.kv_cache import kv_movers
from drafttree.sglang.limits import limit_trees, whole_trees
from drafttree.sglang.options import parse_options
from drafttree.sglang.patches import (
    check_stops_in_order,
    keep_computed_kv_of_sessions,
    report_counters,
    report_new_weights,
    widen_request_rows,
)
from drafttree.sglang.penalties import Penalties, has_penalties
from drafttree.sglang.running import RunningRequests
from drafttree.sglang.sampling import verify_trees
from drafttree.sglang.state import (
    Proposal,
    RequestStates,
    Step,
    sampled_tokens,
    why_undrafted,
)
from drafttree.sglang.verify_input import drop_unusable, prepare_verify, relay
from drafttree.target import Target
from drafttree.tensor_parallel import broadcast_trees, broadcast_verified, drafts_alone
from drafttree.transfer import on_device
from drafttree.tree import DraftTree, Verified

# A child of SGLang's logger: other loggers are not printed.
logger = logging.getLogger(f"sglang.{__name__}")

Publish = Callable[[torch.Tensor], None]
"""Receives the requests' new lengths, `int64 [B]`, as soon as they are known."""


class TreeWorker(GraphWorker):
    """Drafts and verifies for one target; made by `of`. A subclass serves one kind of drafter.

    The arguments after the method are SGLang's. `ps`, its parallel ranks, is given by version
    0.5.17 alone and is not needed.

    Attributes:
        drafter: The method's drafter.
        counters: Counts of drafted and accepted tokens.
    """

    _may_have_new_weights = False

    def __init__(
        self,
        method: Method[Any],
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: Any,
        ps: Any = None,
    ) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._runner = target_worker.model_runner
        self._group = get_tp_group()
        self._device = torch.device(self._runner.device)
        self._vocab_size: int = self._runner.model_config.vocab_size
        spec = get_spec()
        tree_size = spec.speculative_num_draft_tokens
        self._num_draft_tokens = tree_size - 1
        # Chains may have fewer tokens than the trees that a method's options declare.
        declared = None if self.in_chains else tree_size
        options = parse_options(method, declared, spec.speculative_draft_model_path)
        self._verify_sizes(adaptive=options.is_adaptive)
        # The model that was loaded; the arguments have the name that the user gave.
        server, loaded = self._runner.server_args, self._runner.model_config
        target = Target(
            model=loaded.model_path,
            vocab_size=self._vocab_size,
            device=self._device,
            dtype=self._runner.dtype,
            logger=logger,
            embed=self._embed if method.kind.needs_hidden_states else None,
            bos=bos_token(self._runner.model_config.hf_text_config, self._vocab_size),
            folder=local_folder(loaded.model_path, loaded.revision, server.download_dir),
            changed_by=_changed_by(server),
            pads_trees=True,
            # With overlapping steps a step is launched before the last one's tokens are there.
            late_steps=int(_overlaps_steps(server)),
            longest_chain=self._num_draft_tokens if self.in_chains else None,
            group=self._group,
        )
        # Before the memory pools are sized, so that the drafter's memory is counted.
        self.drafter = self._make_drafter(method, options, target)
        self.counters = Counters(self._device)
        self._forced = ForcedTokens(self._device)
        self._last_short = long_rope.last_short_position(self._runner.model)
        self._requests = RunningRequests()
        widen_request_rows()
        report_counters()
        report_new_weights()
        check_stops_in_order()
        if getattr(server, "enable_streaming_session", False):
            keep_computed_kv_of_sessions()

    @classmethod
    def of(cls, method: Method[Any]) -> Callable[..., TreeWorker]:
        """The function that SGLang calls to make the worker of a method."""
        return functools.partial(cls, method)

    def _make_drafter(self, method: Method[Any], options: Any, target: Target) -> Drafter:
        """The drafter of this process, which may be one of several ranks."""
        return method.drafter(options, target)

    @property
    def _may_plan(self) -> bool:
        """Whether the drafter may choose the trees of each step by the times of steps before."""
        # On a GPU drafts are verified in trees of a few sizes, and steps may overlap.
        on_cpu = self._device.type == "cpu"
        return on_cpu and drafts_alone(self._group) and not self.in_chains

    @property
    def _max_depth(self) -> int:
        """Greatest depth of a draft token, the same on all ranks."""
        return self.drafter.max_depth

    @abstractmethod
    def _propose(self, batch: Any) -> Proposal:
        """Draft a tree for each request."""

    @abstractmethod
    def _verify(self, step: Step, output: Any) -> Verified:
        """Verify the step's trees by the target's output for all nodes; the same on all ranks."""

    def explain(self) -> list[dict[str, Any]]:
        """How the sizes of trees were chosen; see `Drafter.explain`."""
        return self.drafter.explain()

    def acceptance(self) -> dict[str, Any]:
        """How often drafts were accepted; see `Drafter.acceptance`."""
        return self._forced.beside(self.drafter.acceptance())

    def alloc_memory_pool(self, **pools: Any) -> None:
        """Take the target's memory pools, and allocate the state of their requests."""
        self.req_to_token_pool, self.token_to_kv_pool_allocator = (
            self._target_worker.get_memory_pool()
        )
        slots, length = self.req_to_token_pool.req_to_token.shape
        self._states = RequestStates(slots, self._device)
        self._penalties = Penalties(slots, self._vocab_size, self._device)
        cache = self.token_to_kv_pool_allocator.get_kvcache()
        self._movers = [] if self.in_chains else kv_movers(cache)
        self.drafter.allocate(slots, length)

    def clear_cache_pool(self) -> None:
        """Forget everything learned and counted; SGLang calls this for `flush_cache`."""
        self.weights_changed()
        self.counters = Counters(self._device)

    def weights_changed(self) -> None:
        """Forget everything learned from the old weights; called after SGLang has loaded new ones.

        The drafter reads the new weights at the next batch, when the update is complete.
        """
        self._await_steps()
        self.drafter.reset()
        self._may_have_new_weights = True
        self._forget_corpora()
        self._forced = ForcedTokens(self._device)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """None: SGLang's updates of weights bring those of the target, whose names may be alike.

        SGLang calls this in updates of all models, also where others write the weights, and in
        checks of weights. So the drafter reads them again, but nothing is forgotten.
        """
        self._may_have_new_weights = True
        return []

    def forward_batch_generation(
        self, batch: Any, on_publish: Publish | None = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Serve one batch."""
        if self._may_have_new_weights:
            self.drafter.on_new_weights()
            self._may_have_new_weights = False
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish)

    def _prefill(self, batch: Any, on_publish: Publish | None) -> GenerationBatchResult:
        self._start(batch)
        self._penalties.resume(batch)
        result = self._forward_prompt(batch)
        # The tensor itself: without overlapping scheduling SGLang would copy another one back.
        lengths = batch.seq_lens
        if on_publish is not None:
            on_publish(lengths)
        sampled = sampled_tokens(batch, result.next_token_ids)
        self._penalties.add(batch.req_pool_indices, sampled[:, None])
        self._states.roots[batch.req_pool_indices] = result.next_token_ids.to(torch.int32)
        result.accept_lens = torch.ones_like(lengths, dtype=torch.int32)
        result.new_seq_lens = lengths
        result.next_draft_input = relay(result.next_token_ids, lengths)
        result.speculative_num_draft_tokens = 1
        return result

    def _forward_prompt(self, batch: Any) -> GenerationBatchResult:
        """SGLang's own prefill, its first tokens sampled."""
        return self._target_worker.forward_batch_generation(batch)

    def _prompts_verified(self, batch: Any, next_tokens: torch.Tensor) -> None:
        """Report the first tokens after prompts to the drafter, as of steps without drafts.

        Args:
            batch: SGLang's batch, once its prompts are read.
            next_tokens: `int [B]`, the token that was sampled after each of them.
        """
        ends = on_device(np.cumsum(batch.extend_lens, dtype=np.int64) - 1, self._device)
        trees = DraftTree.of_roots(batch.input_ids[ends].int())
        verified = Verified(
            path=torch.zeros_like(trees.tokens),
            emitted=sampled_tokens(batch, next_tokens)[:, None],
            num_emitted=torch.ones_like(trees.tree_size),
            reads_prompts=True,
        )
        self.drafter.on_verified(batch.req_pool_indices, trees, verified)

    def _start(self, batch: Any) -> None:
        """Release requests that are gone, and start those whose prompts are read."""
        started = self._requests.start(batch)
        self._release(started.released)
        for request, slot in started.starting:
            self._start_request(request, slot)
        self._penalties.start(started.starting)
        for reason in filter(None, map(why_undrafted, started.arrived)):
            _warn_of_undrafted(reason)
        self._states.start(batch.req_pool_indices, batch.reqs)

    def drafttree_release(self) -> None:
        """While no request is running: release those that are gone, whose texts are then kept."""
        if released := self._requests.forget_gone():
            self._release(released)

    def _release(self, slots: list[int]) -> None:
        """Requests in these slots are gone, or start again."""
        self.drafter.release(slots)

    def _start_request(self, request: Any, slot: int) -> None:
        """A request starts or restarts in a slot, before the first part of its prompt is read."""

    # Decoding.

    def _decode(self, batch: Any, on_publish: Publish | None) -> GenerationBatchResult:
        step = self._draft(batch)
        slot_table = self.req_to_token_pool.req_to_token
        prepare_verify(batch, step.trees, step.depths, slot_table)
        result = self._forward_verify(batch)
        output = result.logits_output
        # As before SGLang's own sampling: if asked to, it replaces NaN, which would be the argmax.
        sanitize_nan_logits(output.next_token_logits, "logits of draft trees")
        verified = self._verify(step, output)
        self._learn_outcome(step, verified)
        if has_penalties(batch):
            self._penalties.add(batch.req_pool_indices, verified.emitted)
        lengths = batch.seq_lens + verified.num_emitted
        self._move_kv(batch, verified)
        if on_publish is not None:
            on_publish(lengths)
        if step.trees.drafted:
            counted = torch.ones_like(verified.num_emitted, dtype=torch.bool)
            self.counters.add_step(counted, step.trees, verified)
        else:
            self.counters.add_plain_step(len(verified.num_emitted))
        emitted = verified.emitted.clamp(min=0)
        roots = emitted.gather(1, verified.num_emitted.long()[:, None] - 1)[:, 0]
        self._states.roots[batch.req_pool_indices] = roots
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=emitted.flatten(),
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=verified.num_emitted,
            new_seq_lens=lengths,
            next_draft_input=relay(roots, lengths),
            # SGLang uses it only to find where each request's tokens begin.
            speculative_num_draft_tokens=emitted.shape[1],
        )

    def _draft(self, batch: Any) -> Step:
        requests = len(batch.reqs)
        most = self._sizes.largest(requests)
        if self._sizes.are_several:
            self.drafter.limit_draft_tokens(most)
        proposal = self._propose(batch)
        trees = proposal.trees
        if not drafts_alone(self._group):
            trees = limit_trees(trees, self._num_draft_tokens, self.drafter)
            trees = broadcast_trees(trees, self._num_draft_tokens, self._group)
        bound = None
        if has_grammars(batch):
            bound = self._bind(batch, replace(proposal, trees=trees), most)
            trees = bound.trees
        trees = limit_trees(trees, self._num_draft_tokens, self.drafter).truncated(most)
        if self._device.type != "cpu":
            columns = trees.tokens.shape[1]
            trees = whole_trees(trees, self._sizes.fitting(requests, columns - 1))
        states, slots = self._states, batch.req_pool_indices
        left = states.limits[slots] - batch.seq_lens
        if self._last_short is not None:
            left = long_rope.tokens_left(self._last_short, left, batch.seq_lens)
        trees, depths = drop_unusable(trees, left)
        penalties = self._penalties if has_penalties(batch) else None
        return Step.of(batch, trees, depths, penalties, proposal.rule, bound)

    def _bind(self, batch: Any, proposal: Proposal, most: int) -> BoundTrees:
        """Bind the trees to the requests' grammars; as a rule they are verified as they are.

        Args:
            batch: SGLang's batch.
            proposal: What was drafted.
            most: Greatest number of draft tokens of a tree in this step.
        """
        return mask_trees(batch.reqs, proposal.trees, self._vocab_size)

    def _learn_outcome(self, step: Step, verified: Verified) -> None:
        trees, bound = step.trees, step.bound
        if bound is not None:
            bound.count_forced(self._forced, trees, verified)
            trees, verified = bound.as_proposed(trees, verified)
        self.drafter.on_verified(step.batch.req_pool_indices, trees, verified)

    def _verify_trees(
        self,
        step: Step,
        output: Any,
        argmax: torch.Tensor | None = None,
    ) -> Verified:
        """Call `verify_trees` with the target's sampler; the first rank's outcome counts."""
        sampler = self._runner.sampler
        rule = None if step.rule is None else step.rule(step.trees)
        verified = verify_trees(sampler, step, self._max_depth, output, argmax, rule)
        # With several ranks SGLang does the same for its own methods.
        return broadcast_verified(verified, self._group)

    def _move_kv(self, batch: Any, verified: Verified) -> None:
        """Move the accepted path's KV to the slots right after the root's."""
        slots = batch.out_cache_loc.view(len(verified.path), -1)
        for move in self._movers:
            move(slots, verified.path)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's embeddings `[N, d]` of `tokens [N]`; all ranks ask for the same together."""
        # Older versions, which serve other methods, do not have it.
        from sglang.srt.lora.layers import unwrap_lora_layer

        embedding = unwrap_lora_layer(self._runner.model.get_input_embeddings())
        embedded: torch.Tensor = embedding(tokens)
        return embedded


def _overlaps_steps(server: Any) -> bool:
    """Whether SGLang launches a step before the last one's tokens are there."""
    try:
        from sglang.srt.runtime_context import get_schedule
    except ImportError:
        return not server.disable_overlap_schedule  # in older versions
    # `server` has the values that the user gave; what plugins have set is in the context alone.
    return not get_schedule().disable_overlap_schedule


def _changed_by(server: Any) -> str | None:
    """The option with which the target may differ from the model in its files, if any."""
    if not reads_files(server.load_format):
        return f"--load-format {server.load_format!s}"
    overrides = server.json_model_override_args
    return "--json-model-override-args" if overrides.strip() != "{}" else None


@functools.cache
def _warn_of_undrafted(reason: str) -> None:
    logger.warning("Requests with %s are served without drafts", reason)
