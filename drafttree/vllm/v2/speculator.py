"""Drafts trees where vLLM's V2 model runner asks for chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tree_kernels.kept_trees import next_roots
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from drafttree.chains import first_paths
from drafttree.drafter import ModelFreeDrafter
from drafttree.transfer import on_device
from drafttree.tree import NO_TOKEN, DraftTree
from drafttree.vllm.v2.kept_trees import KeptTrees
from drafttree.vllm.v2.requests import RequestRules


class TreeSpeculator(BaseSpeculator):
    """Takes the place of the engine's own speculator.

    The engine keeps the draft tokens of each request, and `KeptTrees` the shape of its tree.

    Args:
        drafter: Drafts the trees; may be replaced.
        kept: Where the trees' shapes are kept.
        nodes: Greatest number of draft tokens of a tree.
        rules: Which requests are not drafted for, and which get chains.
        sizes: Numbers of draft tokens that the scheduler chooses from; none if it does not choose.

    Attributes:
        expected: `float32 [requests, S]`, what each request's tree is worth at each of the sizes,
            see `Drafter.expected_tokens`; NaN without a tree, and 1 where none is drafted.
        looks_up: Whether drafts are looked up even if none is verified next.
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self,
        drafter: ModelFreeDrafter,
        kept: KeptTrees,
        nodes: int,
        rules: RequestRules,
        sizes: Sequence[int] = (),
    ) -> None:
        self.drafter = drafter
        self._kept = kept
        self._nodes = nodes
        self._rules = rules
        self._sizes = tuple(sizes)
        self.expected = kept.parents.new_full(
            (len(kept.parents), len(self._sizes)), float("nan"), dtype=torch.float32
        )
        self.looks_up = False

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """There is no draft model to capture."""

    def capture(self) -> None:
        """There is no draft model to capture."""

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft the next step's trees; the engine ignores those of prompts that are read in part.

        Returns:
            `int64 [B, K]`, the draft tokens; a token of the vocabulary where there is no node.
        """
        limit = self._nodes if num_speculative_tokens is None else num_speculative_tokens
        rows = input_batch.idx_mapping
        if self._sizes and not dummy_run:
            self.expected[rows] = float("nan")
        if dummy_run or not (limit or self.looks_up):
            return last_sampled.new_zeros(input_batch.num_reqs, self._nodes)
        last, roots = next_roots(last_sampled, rows, num_sampled)
        undrafted = self._rules.undrafted(input_batch.idx_mapping_np)
        which = None if undrafted is None else on_device(undrafted, roots.device)
        if which is not None:
            roots = roots.masked_fill(which, NO_TOKEN)
        if undrafted is not None and undrafted.all():
            trees = DraftTree.of_roots(roots)
        else:
            trees = self._draft(input_batch, roots, limit)
        if which is not None and self._sizes:
            # Of these it is known that no draft is worth anything.
            self.expected[rows] = self.expected[rows].masked_fill(which[:, None], 1.0)
        # The target embeds all of them, so they must be tokens.
        return self._kept.keep(rows, trees, last)

    def _draft(self, batch: InputBatch, roots: torch.Tensor, limit: int) -> DraftTree:
        self.drafter.limit_draft_tokens(limit)
        trees = self.drafter.propose(batch.idx_mapping, roots).truncated(limit)
        if self._sizes and (expected := self.drafter.expected_tokens(self._sizes)) is not None:
            self.expected[batch.idx_mapping] = expected.masked_fill(
                (roots == NO_TOKEN)[:, None], float("nan")
            )
        chained = self._rules.chained(batch.idx_mapping_np)
        if chained is not None:
            which = on_device(chained, roots.device)
            trees, _ = first_paths(trees, which, self.drafter.max_depth)
        return trees
