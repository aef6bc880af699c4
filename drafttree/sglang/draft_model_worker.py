"""The worker of methods that draw their drafts from a draft model, which runs beside the target.

The two share the table of KV slots: what the target has read lies in the same slots of the draft
model's cache. So prompts are read by both, cached prefixes hold for both, and in each step the
draft model reads the nodes as it drafts them.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import attention_backends
from sglang.srt.speculative.base_spec_worker import EagleDraftWorkerBase
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from tree_kernels.mask import depths

from drafttree.drafter import DraftTree, ModelDrafter
from drafttree.sglang.penalties import RequestPenalties
from drafttree.sglang.rule_sampler import RuleSampler, filter_probs
from drafttree.sglang.sampling import verify_trees
from drafttree.sglang.worker import TreeWorker, movers
from drafttree.verify import Verified


class _DraftModel(EagleDraftWorkerBase):
    """What the host wants to know of a draft model."""

    def __init__(self, bundle: Any) -> None:
        super().__init__()
        self.draft_worker = bundle.draft_worker
        self.draft_runner = bundle.draft_model_runner

    def draft(self) -> None:
        """The tree worker drafts."""

    def draft_extend(self) -> None:
        """The tree worker reads prompts."""

    def alloc_memory_pool(self, **pools: Any) -> None:
        """A KV cache of its own, in the target's slots."""
        self.draft_worker.alloc_memory_pool(**pools)

    def init_attention_backend(self) -> None:
        """The worker's own is enough: drafts are verified, not decoded."""

    def _capture_cuda_graphs(self) -> None:
        pass


class DraftModelWorker(TreeWorker):
    """Drafts with a `ModelDrafter` and the draft model that the host was given.

    Attributes:
        draft_seconds: the host's time spent drafting.
    """

    drafter: ModelDrafter

    def __init__(
        self, method: Any, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any
    ) -> None:
        super().__init__(method, server_args, gpu_id, nccl_port, target_worker)
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
        self.draft_seconds = 0.0
        # The worker's own object: other engines of the process keep theirs.
        self._runner.sampler = RuleSampler()

    def alloc_memory_pool(self, **pools: Any) -> None:
        """Take the target's pools, and give the draft model a cache in the same slots."""
        super().alloc_memory_pool(**pools)
        self._draft_worker.alloc_memory_pool(**pools)
        self._movers += movers(self._draft_worker.draft_runner.token_to_kv_pool)

    def _forward_prompt(self, batch: Any) -> GenerationBatchResult:
        roots = torch.zeros(len(batch.reqs), dtype=torch.int32, device=self._device)
        before = [length - 1 for length in batch.seq_lens.tolist()]
        rule = self.drafter.verify_undrafted(roots, _seeds(batch), before)
        self._runner.sampler.choose = lambda probs: rule(probs, roots)
        result = super()._forward_prompt(batch)
        batch.spec_info = None
        self._draft_worker.draft_worker.forward_batch_generation(batch, is_verify=True)
        return result

    def _propose(self, batch: Any) -> DraftTree:
        started = perf_counter()
        info = batch.sampling_info
        sampled = (info.top_ks != 1).view(-1)

        penalties = self._penalties_of(batch)

        def forward(trees: DraftTree, first: int) -> torch.Tensor:
            logits = self._forward_draft(batch, trees, first)
            if trees.tokens.shape[1] == len(self.drafter.columns):
                return logits  # nothing is drawn below the leaves
            logits = logits.float()
            for row, own in enumerate(penalties):
                if own is not None:
                    _penalise(logits[row], own, trees, row, first)
            return _distributions(logits, info, sampled)

        trees, self._drawn = self.drafter.draw(
            self._states.roots[batch.req_pool_indices],
            _seeds(batch),
            batch.seq_lens.tolist(),
            sampled,
            forward,
        )
        self.draft_seconds += perf_counter() - started
        return trees

    def _forward_draft(self, batch: Any, trees: DraftTree, first: int) -> torch.Tensor:
        """The draft model's logits of the nodes from `first` on, `[B, N - first, V]`."""
        depth = depths(trees.parents, trees.num_nodes)
        self._prepare_verify(batch, trees, depth, first)
        worker = self._draft_worker.draft_worker
        output = worker.forward_batch_generation(batch, is_verify=True).logits_output
        logits: torch.Tensor = output.next_token_logits
        return logits.view(len(depth), -1, self._vocab_size)

    def _verify(self, batch: Any, trees: DraftTree, output: Any) -> Verified:
        return verify_trees(
            self._runner,
            batch,
            trees,
            self.drafter.max_depth,
            output,
            None,
            self._penalties_of(batch),
            self.drafter.verify_with(trees, self._drawn),
        )


def _seeds(batch: Any) -> list[int | None]:
    return [request.sampling_params.sampling_seed for request in batch.reqs]


def _penalise(
    logits: torch.Tensor, penalties: RequestPenalties, trees: DraftTree, row: int, first: int
) -> None:
    """Change a request's logits `[n, V]` of the nodes from `first` on, as the target's will be."""
    for column in range(first, trees.tokens.shape[1]):
        with penalties.ahead(trees.path(row, column)):
            penalties.apply(logits[column - first][None])


def _distributions(logits: torch.Tensor, info: Any, sampled: torch.Tensor) -> torch.Tensor:
    """What children are drawn from, `float32 [B, n, V]`: as the target's tokens are.

    Any distribution would do; the closer to the target's, the more is accepted. Requests that are
    not sampled keep all tokens.
    """
    if info.logit_bias is not None:
        logits = logits + info.logit_bias[:, None]
    probs = (logits / info.temperatures[:, :, None]).softmax(-1)
    if info.is_all_greedy:
        return probs
    return torch.where(sampled[:, None, None], filter_probs(probs, info), probs)
