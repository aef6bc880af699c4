"""SGLang's worker for methods that draft trees, whatever they draft them from.

A decode step, from top to bottom: draft, verify in one forward of the target, accept with our own
rule, move the accepted path's KV, remember what the next step needs.
"""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from tree_kernels.full_mask import full_mask
from tree_kernels.kv_move import KvMover, movers_of
from tree_kernels.mask import depths, tree_mask

from drafttree.drafter import Drafter, DraftTree, HiddenStateDrafter, ModelDrafter
from drafttree.method import Method
from drafttree.metrics import Counters
from drafttree.sglang.counters import report_counters
from drafttree.sglang.options import parse_options
from drafttree.sglang.penalties import RequestPenalties
from drafttree.sglang.request_rows import widen_request_rows
from drafttree.sglang.sampling import has_penalties
from drafttree.sglang.state import RequestStates, is_bound
from drafttree.verify import Verified

# Below SGLang's own logger, or nothing would print it.
logger = logging.getLogger(f"sglang.{__name__}")

Publish = Callable[[torch.Tensor], None]


class TreeWorker(BaseSpecWorker):
    """Drafts and verifies for one target; made by `of`.

    The keyword arguments beside the method are the host's; `ps`, its parallel ranks, is given by
    0.5.17 alone and of no use to a method that runs in one process. A subclass has a drafter of its
    own, and says how it drafts and verifies.
    """

    drafter: Drafter | ModelDrafter | HiddenStateDrafter

    def __init__(
        self,
        method: Method,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: Any,
        ps: Any = None,
    ) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._runner = target_worker.model_runner
        self._device = torch.device(self._runner.device)
        self._vocab_size: int = self._runner.model_config.vocab_size
        spec = get_spec()
        self._options = parse_options(
            method, spec.speculative_num_draft_tokens, spec.speculative_draft_model_path
        )
        self.drafter = self._make_drafter(method)
        self.counters = Counters(self._device)
        self._running: dict[str, Any] = {}
        self._penalties: dict[str, RequestPenalties] = {}
        widen_request_rows()
        report_counters(self)

    @classmethod
    def of(cls, method: Method) -> Callable[..., TreeWorker]:
        """What the host calls to make the worker of a method."""
        return functools.partial(cls, method)

    def _make_drafter(self, method: Method) -> Any:
        return method.make_drafter(self._options, self._vocab_size, self._device)

    @abstractmethod
    def _propose(self, batch: Any) -> DraftTree:
        """The step's trees, one a request, before any is cut."""

    @abstractmethod
    def _verify(self, batch: Any, trees: DraftTree, output: Any) -> Verified:
        """Which path of each tree the target goes, by its output for all nodes."""

    def _requests_ended(self, names: list[str]) -> None:
        """Requests left."""

    def explain(self) -> list[dict[str, Any]]:
        """How the sizes of trees were chosen, where they are chosen."""
        return []

    def acceptance(self) -> dict[str, Any]:
        """How often what was drafted was accepted, where that is counted by node or by source."""
        return {}

    def _forget(self) -> None:
        """What was learnt, if anything is, is of no use any more."""

    def list_external_corpora(self) -> dict[str, int]:
        """The host asks whatever takes its branch for ngrams; there are none."""
        return {}

    def alloc_memory_pool(self, **pools: Any) -> None:
        """Take the target's pools, and build what will move rows in its KV cache."""
        self.req_to_token_pool, self.token_to_kv_pool_allocator = (
            self._target_worker.get_memory_pool()
        )
        slots = self.req_to_token_pool.req_to_token.shape[0]
        self._states = RequestStates(slots, self._device)
        self._movers = movers(self.token_to_kv_pool_allocator.get_kvcache())

    def clear_cache_pool(self) -> None:
        """`flush_cache`: forget all that was learnt, as the host's own ngrams do, and all counts.

        Weights that were updated come with it, so nothing learnt of old ones stays either.
        """
        self._forget()
        self.counters = Counters(self._device)

    def forward_batch_generation(
        self, batch: Any, on_publish: Publish | None = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Serve one batch; `on_publish` hears the new lengths, `int64 [B]`, once they are known."""
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish)

    def _prefill(self, batch: Any, on_publish: Publish | None) -> GenerationBatchResult:
        self._join(batch)
        result = self._forward_prompt(batch)
        lengths = batch.seq_lens.clone()
        if on_publish is not None:
            on_publish(lengths)
        self._states.roots[batch.req_pool_indices] = result.next_token_ids.to(torch.int32)
        result.accept_lens = torch.ones_like(lengths, dtype=torch.int32)
        result.new_seq_lens = lengths
        result.next_draft_input = self._relay(result.next_token_ids, lengths)
        result.speculative_num_draft_tokens = 1
        return result

    def _forward_prompt(self, batch: Any) -> GenerationBatchResult:
        """The host's own prefill, its first tokens sampled."""
        return self._target_worker.forward_batch_generation(batch)

    def _join(self, batch: Any) -> None:
        ended = [name for name, request in self._running.items() if request.finished()]
        for name in ended:
            del self._running[name]
            self._penalties.pop(name, None)
        self._requests_ended(ended)
        arrived = [request for request in batch.reqs if request.rid not in self._running]
        for request in batch.reqs:
            self._running[request.rid] = request
            # A request that was retracted is read again: its penalties start from its output.
            self._penalties.pop(request.rid, None)
        if any(map(is_bound, arrived)):
            _say_undrafted()
        self._states.join(batch.req_pool_indices, batch.reqs)

    # Decoding.

    def _decode(self, batch: Any, on_publish: Publish | None) -> GenerationBatchResult:
        trees, depth = self._cut(batch, self._propose(batch))
        self._prepare_verify(batch, trees, depth)
        result = self._forward_verify(batch)
        output = result.logits_output
        verified = self._verify(batch, trees, output)
        lengths = batch.seq_lens + verified.num_emitted
        self._move_kv(batch, verified)
        if on_publish is not None:
            on_publish(lengths)
        everyone = torch.ones_like(verified.num_emitted, dtype=torch.bool)
        self.counters.add_step(everyone, trees, verified)
        emitted = verified.emitted.clamp(min=0)
        roots = emitted.gather(1, verified.num_emitted.long()[:, None] - 1)[:, 0]
        self._states.roots[batch.req_pool_indices] = roots
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=emitted.flatten(),
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=verified.num_emitted,
            new_seq_lens=lengths,
            next_draft_input=self._relay(roots, lengths),
            # The host reads no more of it than where each request's tokens begin.
            speculative_num_draft_tokens=emitted.shape[1],
        )

    def _forward_verify(self, batch: Any) -> GenerationBatchResult:
        """The target's forward over the trees."""
        return self._target_worker.forward_batch_generation(batch, is_verify=True)

    def _cut(self, batch: Any, trees: DraftTree) -> tuple[DraftTree, torch.Tensor]:
        """The part of the trees that is worth verifying, and its nodes' depths, `int32 [B, N]`."""
        states, slots = self._states, batch.req_pool_indices
        depth = depths(trees.parents, trees.num_nodes)
        # Nodes that could only emit tokens beyond the request's end are not worth verifying.
        left = states.limits[slots] - (batch.seq_lens + 1)
        useful = (trees.tokens >= 0) & (depth < left[:, None]) & states.drafting[slots, None]
        useful[:, 0] = True
        columns = torch.arange(1, useful.shape[1] + 1, dtype=torch.int32, device=self._device)
        num_nodes = (useful * columns).amax(1)
        # Looking at the result would stall a GPU, whose graphs want trees of one width anyway; on
        # a CPU it saves the rows of padding.
        width = int(num_nodes.max()) if self._device.type == "cpu" else useful.shape[1]
        useful, depth = useful[:, :width], depth[:, :width]
        cut = DraftTree(
            tokens=trees.tokens[:, :width].masked_fill(~useful, -1),
            parents=trees.parents[:, :width].masked_fill(~useful, -1),
            num_nodes=num_nodes,
        )
        return cut, depth.masked_fill(~useful, 0)

    def _prepare_verify(
        self, batch: Any, trees: DraftTree, depth: torch.Tensor, first: int = 0
    ) -> None:
        """Make of a decode batch one whose rows are the nodes; the host restores it after.

        Args:
            first: the first of them that becomes a row; those before have their KV. On a CPU only:
                the host's own backends take whole trees.
        """
        width = trees.tokens.shape[1]
        tokens = trees.tokens[:, first:].clamp(min=0).flatten().long()
        columns = batch.seq_lens[:, None] + torch.arange(first, width, device=self._device)
        table = self.req_to_token_pool.req_to_token
        masks = tree_mask(trees.parents, trees.num_nodes)[:, first:]
        if self._device.type != "cpu":
            # The host's own backends take one flat mask, which begins with the context.
            size = width * (int(batch.seq_lens_cpu.sum()) + width * len(masks))
            masks = full_mask(masks, batch.seq_lens, size)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = tokens
        batch.out_cache_loc = table[batch.req_pool_indices[:, None], columns].flatten().long()
        batch.spec_info = NgramVerifyInput(
            draft_token=tokens,
            custom_mask=masks,
            positions=(batch.seq_lens[:, None] + depth[:, first:]).flatten(),
            draft_token_num=width - first,
        )

    def _penalties_of(self, batch: Any) -> list[RequestPenalties | None]:
        if not has_penalties(batch):
            return []
        lengths = batch.seq_lens.tolist()
        roots = self._states.roots[batch.req_pool_indices].tolist()
        found: list[RequestPenalties | None] = []
        for request, length, root in zip(batch.reqs, lengths, roots, strict=True):
            penalties = self._penalties.get(request.rid)
            if penalties is None:
                emitted = list(request.output_ids)
                # With overlapping scheduling the host has not heard of the last token yet.
                if len(request.origin_input_ids) + len(emitted) == length:
                    emitted.append(root)
                penalties = RequestPenalties(request, emitted, self._vocab_size, self._device)
                self._penalties[request.rid] = penalties
            found.append(penalties if penalties.is_required else None)
        return found

    def _move_kv(self, batch: Any, verified: Verified) -> None:
        """Move the accepted path's KV to the slots right after the root's."""
        slots = batch.out_cache_loc.view(len(verified.path), -1)
        for move in self._movers:
            move(slots, verified.path)

    def _relay(self, roots: torch.Tensor, lengths: torch.Tensor) -> NgramVerifyInput:
        """What the host carries from step to step: the roots, as steps that accepted one token."""
        return NgramVerifyInput(
            draft_token_num=1,
            new_seq_lens=lengths,
            accept_tokens=roots.to(torch.int32),
            accept_lens=torch.ones_like(lengths, dtype=torch.int32),
        )


def movers(cache: Any) -> list[KvMover]:
    """What moves rows of the host's KV cache.

    Raises:
        RuntimeError: it is not of the kind that we know.
    """
    if not isinstance(cache, MHATokenToKVPool):
        raise RuntimeError(
            f"draft trees do not know the KV cache that this model has in SGLang, a "
            f"{type(cache).__name__}: leave --speculative-algorithm out"
        )
    # To the mover each slot is a block of one row.
    return movers_of(layer.unsqueeze(2) for layer in (*cache.k_buffer, *cache.v_buffer))


@functools.cache
def _say_undrafted() -> None:
    logger.warning("Requests with a grammar or a custom logit processor are served without drafts")
