"""SGLang's worker for methods that sample drafts from a draft model, which runs beside the target.

Both models share the table of KV slots: a token's KV is in the same slot of both caches. So prompts
are computed by both, cached prefixes are valid for both, and in each step the draft model computes
the KV of the nodes as it drafts them. Where trees are planned, it reads nothing while it does not
draft.

With tensor parallelism each rank has a part of both models and draws the same drafts, as logits,
seeds and the candidates of tables are the same on all of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from time import perf_counter
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import attention_backends
from sglang.srt.speculative.base_spec_worker import EagleDraftWorkerBase
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from tree_kernels.mask import depths, tree_mask

from drafttree.arrays import LongArray
from drafttree.method import Method
from drafttree.model_drafters import DraftModelDrafter, Head
from drafttree.seeds import Seeds
from drafttree.sglang.acceptance_sampler import filter_probs
from drafttree.sglang.drafters.draft_model_texts import DraftModelTexts
from drafttree.sglang.drafters.with_model import ModelDraftingWorker
from drafttree.sglang.graphs.draft_model import DraftModelGraphs
from drafttree.sglang.kv_cache import kv_movers
from drafttree.sglang.limits import whole_trees
from drafttree.sglang.patches import install_acceptance_sampler, replace_logits
from drafttree.sglang.penalties import Penalties, has_penalties
from drafttree.sglang.state import Proposal, Step
from drafttree.sglang.verify_input import prepare_verify
from drafttree.tensor_parallel import broadcast_tensor, broadcast_trees
from drafttree.tree import DraftTree, Verified


class _DraftModel(EagleDraftWorkerBase):
    """The draft model, with the interface that SGLang expects.

    Attributes:
        graphs: Its CUDA graphs; None without any.
    """

    graphs: DraftModelGraphs | None = None

    def __init__(self, bundle: Any) -> None:
        super().__init__()
        self.draft_worker = bundle.draft_worker
        self.draft_runner = bundle.draft_model_runner

    def draft(self) -> None:
        """Not used: the tree worker drafts."""

    def draft_extend(self) -> None:
        """Not used: the tree worker computes prompts."""

    def alloc_memory_pool(self, **pools: Any) -> None:
        """Allocate the draft model's KV cache, in the target's slots."""
        self.draft_worker.alloc_memory_pool(**pools)

    def init_attention_backend(self) -> None:
        """Not used: drafting runs as verification, with the draft worker's own backend."""

    def _capture_cuda_graphs(self) -> None:
        self.graphs = DraftModelGraphs.of(self.draft_runner)


class DraftModelWorker(ModelDraftingWorker):
    """Drafts with a `DraftModelDrafter` and the draft model that SGLang loads."""

    drafter: DraftModelDrafter

    def __init__(
        self,
        method: Method[Any],
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: Any,
    ) -> None:
        super().__init__(method, server_args, gpu_id, nccl_port, target_worker)
        most = self._num_draft_tokens
        # Number of columns of the trees that are being drafted.
        self._columns = len(self.drafter.columns)
        if self._columns > 1 + most:
            # The draft model writes KV while it drafts, so truncating its trees would be too late.
            raise ValueError(
                f"{type(self.drafter).__qualname__} samples {self._columns - 1} draft tokens, but "
                f"the options of {method.title} declare {most}: they must agree"
            )
        self._draft_worker = _DraftModel(
            build_draft_tp_worker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_model_config=self._runner.model_config,
                algo_label=method.title,
                attention_backend_override=attention_backends()[0],
            )
        )
        # Whether the forward under way is of nodes whose children are drawn. The last of a step is
        # not, and none of a prompt.
        self._draws = False
        runner = self._draft_worker.draft_runner
        head = replace_logits(runner.model, self._draft_logits)
        self.drafter.read_head(head, runner.model_config.hidden_size, runner.dtype)
        self._seeds = Seeds(self._device, target_worker.random_seed)
        install_acceptance_sampler(self._runner)

    def _draft_logits(self, states: torch.Tensor, head: Head) -> torch.Tensor:
        """The draft model's logits in a forward; on a CPU none unless something is drawn from them.

        CUDA graphs compute them in any case.
        """
        needed = self._draws or self._device.type != "cpu"
        return self.drafter.logits(states, head) if needed else states[:, :0]

    def alloc_memory_pool(self, **pools: Any) -> None:
        """Take the target's memory pools, and give the draft model a KV cache in the same slots."""
        super().alloc_memory_pool(**pools)
        self._draft_worker.alloc_memory_pool(**pools)
        runner = self._draft_worker.draft_runner
        self._movers += kv_movers(runner.token_to_kv_pool)
        self._unread_texts = DraftModelTexts(runner) if self._plans else None

    def _start_request(self, request: Any, slot: int) -> None:
        super()._start_request(request, slot)
        if self._unread_texts is not None:
            self._unread_texts.start(slot, request)

    def _forward_prompt(self, batch: Any) -> GenerationBatchResult:
        roots = torch.zeros(len(batch.reqs), dtype=torch.int32, device=self._device)
        rule = self.drafter.undrafted_rule(roots, self._seeds_of(batch), batch.seq_lens - 1)
        with self._runner.sampler.using(rule, roots):
            result = super()._forward_prompt(batch)
        # As in `forward` below, and texts must not differ.
        broadcast_tensor(result.next_token_ids, self._group)
        self._prompts_verified(batch, result.next_token_ids)
        if self._unread_texts is not None:
            self._unread_texts.written(batch.out_cache_loc.numpy(), read=False)
            return result
        # Prompts that are given as the target's embeddings are read as the tokens in their place.
        batch = copy(batch)
        batch.spec_info = batch.input_embeds = None
        batch.replace_embeds = batch.replace_positions = None
        batch.return_logprob = False
        self._draft_worker.draft_worker.forward_batch_generation(batch, is_verify=True)
        return result

    def _seeds_of(self, batch: Any) -> torch.Tensor:
        """Seeds of the requests, `int64 [B]`: their own in SGLang's deterministic mode alone.

        In other modes SGLang uses none, and the samples of one request (`n`), which have the same
        seed, differ.
        """
        seeds: torch.Tensor | None = batch.sampling_info.sampling_seed
        return self._seeds.of([None] * len(batch.reqs)) if seeds is None else seeds

    def _propose(self, batch: Any) -> Proposal:
        if self._unread_texts is None:
            return self._sample_trees(batch)
        slots, lengths = batch.req_pool_indices, batch.seq_lens
        unread, texts = self._unread_texts, [*zip(slots.tolist(), lengths.tolist(), strict=True)]
        drafted = int(self._states.drafting[slots].sum())
        shape = self.drafter.plan(slots, drafted, lambda: unread.count(texts))
        started = perf_counter()
        if not shape.depth:
            trees = self._propose_without_model(slots)
            unread.written(self._slots_of_trees(batch, trees.tokens.shape[1]), read=False)
            self.draft_seconds += perf_counter() - started
            roots = self._states.roots[slots]
            rule = self.drafter.undrafted_rule(roots, self._seeds_of(batch), lengths)
            return Proposal(trees, lambda _: rule)
        self._columns = len(self.drafter.follow_plan(shape))
        read_tokens = unread.read(texts)
        ready = perf_counter()
        proposal = self._sample_trees(batch)
        unread.written(self._slots_of_trees(batch, self._columns), read=True)
        self.drafter.drafted(perf_counter() - ready, read_tokens, ready - started)
        self.draft_seconds += ready - started
        return proposal

    def _slots_of_trees(self, batch: Any, columns: int) -> LongArray:
        """The KV slots of the nodes of trees, `int64 [B, columns]`."""
        rows = batch.seq_lens[:, None] + torch.arange(columns)
        table = self.req_to_token_pool.req_to_token
        slots: LongArray = table[batch.req_pool_indices[:, None], rows].long().numpy()
        return slots

    def _sample_trees(self, batch: Any) -> Proposal:
        """Sample the step's trees from the draft model, which has read the texts."""
        started = perf_counter()
        info = batch.sampling_info
        sampled = (info.top_ks != 1).view(-1)

        def forward(trees: DraftTree, first: int) -> torch.Tensor:
            # On a GPU the ranks' sums may be rounded differently, and a rare draw with them: all
            # parts of a node's KV must be of one token.
            trees = broadcast_trees(trees, trees.tokens.shape[1] - 1, self._group)
            logits = self._forward_draft(batch, trees, first)
            if not self._draws:
                return logits
            logits = logits.float()
            if has_penalties(batch):
                logits = _penalised(logits, self._penalties, trees, slots, first)
            return _distributions(logits, info, sampled)

        slots = batch.req_pool_indices
        trees, drawn = self.drafter.propose(
            slots,
            self._states.roots[slots],
            self._seeds_of(batch),
            batch.seq_lens,
            sampled,
            forward,
        )
        self.draft_seconds += perf_counter() - started
        return Proposal(trees, lambda verified: self.drafter.acceptance_rule(verified, drawn))

    def _forward_draft(self, batch: Any, trees: DraftTree, first: int) -> torch.Tensor:
        """The draft model's logits of the nodes from column `first` on, `[B, N - first, V]`.

        They are arbitrary if nothing is drawn from them.
        """
        read, columns = trees, trees.tokens.shape[1]
        cached = first
        if self._device.type != "cpu":
            # SGLang's own backends take whole trees of one size. They write the KV of earlier
            # columns again, and that of columns without a node yet before it is read.
            read, cached = whole_trees(trees, self._num_draft_tokens), 0
        depth = depths(read.parents, read.tree_size)
        if self.drafter.tables is not None or self._near_the_end(batch):
            # Copies may be longer than an answer, and models may have no position beyond the
            # context's end; nodes beyond an answer's end are not verified.
            left = self._states.limits[batch.req_pool_indices] - batch.seq_lens
            depth = depth.minimum((left - 1).clamp(min=0).int()[:, None])
        prepare_verify(batch, read, depth, self.req_to_token_pool.req_to_token, cached)
        worker, graphs = self._draft_worker.draft_worker, self._draft_worker.graphs
        with nullcontext() if graphs is None else graphs.used():
            self._draws = columns < self._columns  # nothing is drawn below the leaves
            output = worker.forward_batch_generation(batch, is_verify=True).logits_output
        logits: torch.Tensor = output.next_token_logits
        if not self._draws:
            return logits
        return logits.view(len(depth), -1, self._vocab_size)[:, first - cached : columns - cached]

    def _near_the_end(self, batch: Any) -> bool:
        """Whether the model's nodes may reach beyond the context's end, as the host can tell."""
        deepest = int(batch.seq_lens_cpu.max()) + self.drafter.max_depth
        return bool(deepest >= self._runner.model_config.context_len)

    def _verify(self, step: Step, output: Any) -> Verified:
        return self._verify_trees(step, output, self._observe_trees(step, output))


def _penalised(
    logits: torch.Tensor, penalties: Penalties, trees: DraftTree, slots: torch.Tensor, first: int
) -> torch.Tensor:
    """The logits `[B, n, V]` of the nodes from column `first` on, with penalties."""
    rows = logits.shape[1]
    masks = tree_mask(trees.parents, trees.tree_size)[:, first:]
    path = trees.tokens[:, None].masked_fill(~masks, -1)
    path[..., 0] = -1  # the root has been emitted
    penalised = logits.flatten(0, 1)
    penalties.apply(penalised, slots.repeat_interleave(rows), path.flatten(0, 1))
    return penalised.view_as(logits)


def _distributions(logits: torch.Tensor, info: Any, sampled: torch.Tensor) -> torch.Tensor:
    """The distributions from which children are sampled, `float32 [B, n, V]`.

    Verification is lossless with any distribution here, but the closer it is to the target's, the
    more drafts are accepted. So temperature and filters are applied as to the target's logits.
    Requests that are not sampled keep all tokens.
    """
    if info.logit_bias is not None:
        logits = logits + info.logit_bias[:, None]
    probs = (logits / info.temperatures[:, :, None]).softmax(-1)
    if info.is_all_greedy:
        return probs
    return torch.where(sampled[:, None, None], filter_probs(probs, info), probs)
