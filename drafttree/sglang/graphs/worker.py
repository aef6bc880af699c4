"""What a worker for draft trees does at start-up with CUDA graphs and with times of forwards."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import sglang
import torch
from sglang.srt.managers.utils import GenerationBatchResult

from drafttree.budget import candidate_sizes
from drafttree.budget.forward_profile import (
    CONTEXT,
    MOST_ON_CPU,
    of_trees,
    profile_drafter,
)
from drafttree.ranks import Group
from drafttree.sglang.corpus import CorpusWorker
from drafttree.sglang.forward import forward_seconds, verification_seconds
from drafttree.sglang.graphs.sizes import GraphSizes
from drafttree.sglang.patches import refuse_recaptures
from drafttree.sglang.versions import is_tested
from drafttree.tensor_parallel import (
    drafts_alone,
    follow_measurements,
    is_drafting_rank,
    leading_measurements,
)

if TYPE_CHECKING:
    from drafttree.sglang.graphs.runners import TreeGraphs

# A child of SGLang's logger: other loggers are not printed.
logger = logging.getLogger(f"sglang.{__name__}")


class GraphWorker(CorpusWorker):
    """Verifies trees with CUDA graphs of several sizes, and lets its drafter time forwards.

    Attributes:
        in_chains: Whether chains are drafted in place of trees.
        has_own_graphs: Whether CUDA graphs of the target's weights are captured beside SGLang's, or
            as SGLang alone would not capture them.
    """

    in_chains = False
    has_own_graphs = False
    _target_worker: Any
    _runner: Any
    _group: Group
    _device: torch.device
    _num_draft_tokens: int

    def _verify_sizes(self, *, adaptive: bool) -> None:
        """Set up the sizes of trees.

        Args:
            adaptive: Whether the drafter may draft fewer tokens than `_num_draft_tokens`.
        """
        self._sizes = GraphSizes.one(self._num_draft_tokens)
        self._graphs: TreeGraphs | None = None
        self._adaptive = adaptive and not self.in_chains and self._device.type == "cuda"

    def init_attention_backends(self) -> None:
        """SGLang's last call before it captures CUDA graphs: plan them."""
        super().init_attention_backends()
        if not self._adaptive:
            return
        reason = self._why_one_size()
        if reason is not None:
            logger.warning(
                "Each step verifies %d draft tokens of each request, as %s",
                self._num_draft_tokens,
                reason,
            )
            return
        from drafttree.sglang.graphs.runners import TreeGraphs

        draft_tokens = candidate_sizes(self._num_draft_tokens, self._device)
        self._graphs = TreeGraphs.plan(self._runner, draft_tokens)
        self._sizes = self._graphs.sizes
        self._keep_own_graphs()

    def _keep_own_graphs(self) -> None:
        self.has_own_graphs = True
        refuse_recaptures()

    def _why_one_size(self) -> str | None:
        """Why all steps verify equally many draft tokens; None if they need not."""
        if not is_tested(sglang.__version__):
            return f"this is SGLang {sglang.__version__}"
        if not drafts_alone(self._group):
            return "the ranks of tensor parallelism do not know of fewer"
        from drafttree.sglang.graphs.runners import why_one_size

        return why_one_size(self._runner)

    def init_cuda_graphs(self) -> None:
        """SGLang's last call before it serves: let the drafter time forwards of the target."""
        super().init_cuda_graphs()
        if self._device.type == "cpu":
            self._time_trees()
        elif self._graphs is not None:
            self._graphs.capture()
            profile_drafter(self.drafter, self._replay_seconds, self._sizes.most_rows, logger)

    def _time_trees(self) -> None:
        pool = self.token_to_kv_pool_allocator.size
        longest = min(pool, self._runner.model_config.context_len)
        tree_tokens = min(longest, self._num_draft_tokens + 1)
        measure = of_trees(
            lambda *shape: forward_seconds(self._runner, *shape), tree_tokens, longest, pool
        )
        if not is_drafting_rank(self._group):
            follow_measurements(measure, self._group, self._device)
            return
        requests = self.req_to_token_pool.size
        most = min(pool, requests * tree_tokens, max(tree_tokens, MOST_ON_CPU))
        with leading_measurements(measure, self._group, self._device) as led:
            profile_drafter(self.drafter, led, most, logger)

    def _replay_seconds(self, rows: int) -> float:
        """Seconds of the step with a graph that has that many rows, or a few more.

        Raises:
            ValueError: The KV pool is too small.
        """
        assert self._graphs is not None
        requests, num_draft_tokens = self._sizes.step_of(rows)
        tokens = num_draft_tokens + 1
        length = self.req_to_token_pool.req_to_token.shape[1]
        room = min(self.token_to_kv_pool_allocator.size // requests, length) - tokens
        if room < 0:
            raise ValueError(f"the KV pool has no room for {requests} requests of {tokens} tokens")
        with self._graphs.used(tokens):
            return verification_seconds(self._runner, requests, tokens, min(CONTEXT, room))

    def _forward_verify(self, batch: Any) -> GenerationBatchResult:
        """The target's forward over the trees."""
        graphs, rows = self._graphs, batch.spec_info.draft_token_num
        with nullcontext() if graphs is None else graphs.used(rows):
            return self._target_worker.forward_batch_generation(batch, is_verify=True)
