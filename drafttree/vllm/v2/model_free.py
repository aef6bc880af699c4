"""vLLM's V2 model runner with model-free drafters, which draft each step's trees in the one before.

The speculator asks the drafter for trees where the engine drafts, after a step is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tree_kernels.scheduled_trees import Layout, NodeTokens
from vllm.v1.worker.gpu.input_batch import InputBatch

from drafttree.drafter import ModelFreeDrafter
from drafttree.method import Method
from drafttree.tree import DraftTree, Verified
from drafttree.vllm.model_inputs import text_without_placeholders
from drafttree.vllm.priming import prime
from drafttree.vllm.v2.chunks import Chunk
from drafttree.vllm.v2.runner import TreeRunnerV2


class ModelFreeRunnerV2(TreeRunnerV2):
    """The runner for model-free drafters.

    Until the engine's warm-up is over, the speculator has a drafter that drafts and learns nothing.
    """

    _drafter: ModelFreeDrafter

    def _set_up_drafter(self, method: Method[Any], options: Any) -> None:
        self._drafter = method.drafter(options, self._target(sizes_trees=True))
        self._drafter.allocate(self.max_num_reqs, self.max_model_len)

    def warmed_up(self) -> None:
        """The engine has run all its forwards that serve no request: now the drafter takes part."""
        self._trees.drafter = self._drafter

    def prime(self, blocks: Sequence[int], *, idle: bool) -> tuple[int, int]:
        """Let the drafter compute something beforehand, if it can."""
        return prime(self, self._drafter, blocks, idle=idle)

    def _start(self, row: int, tokens: Sequence[int]) -> None:
        self._trees.drafter.start(row, text_without_placeholders(self, tokens))

    def _stop(self, row: int) -> None:
        self._trees.drafter.release([row])

    def _laid_out(self, batch: InputBatch, step: Layout) -> None:
        self._show_bound(batch, step)

    def _begin_report(self, batch: InputBatch) -> None:
        # The next trees take the places of those of this step.
        self._reports.begin(self._trees.expected, batch.idx_mapping)

    def _learn(
        self, batch: InputBatch, tokens: NodeTokens, logits: torch.Tensor, chunk: Chunk
    ) -> None:
        self._trees.drafter.observe(
            chunk.rows_of(batch.expanded_idx_mapping),
            chunk.rows_of(tokens.observed),
            chunk.rows_of(tokens.previous),
            logits,
        )

    def _on_verified(
        self, batch: InputBatch, step: Layout, trees: DraftTree, verified: Verified
    ) -> None:
        self._trees.drafter.on_verified(batch.idx_mapping, trees, verified)
