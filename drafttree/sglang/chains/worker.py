"""SGLang's worker for chains that a model-free drafter drafts.

A chain is a tree without branches, so a step is that of trees, down to the verification with
SGLang's own sampler. But no KV has to be moved, and recurrent layers go on from the state after the
last token that was accepted, which SGLang chooses among those it kept for the tokens of the chain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.spec_utils import (
    commit_mamba_states_after_verify,
    prepare_mamba_track_for_verify,
)
from torch.nn.functional import pad

from drafttree.chains import as_chains
from drafttree.sglang.drafters.model_free import ModelFreeWorker
from drafttree.sglang.state import Proposal, Step
from drafttree.sglang.target_config import recurrent_config
from drafttree.tree import Verified


class ChainWorker(ModelFreeWorker):
    """Drafts chains, which SGLang verifies with its own attention and state handling."""

    in_chains = True

    def _propose(self, batch: Any) -> Proposal:
        proposal = super()._propose(batch)
        chains = as_chains(proposal.trees).truncated(self._num_draft_tokens)
        return replace(proposal, trees=chains)

    def _draft(self, batch: Any) -> Step:
        step = super()._draft(batch)
        missing = 1 + self._num_draft_tokens - step.trees.tokens.shape[1]
        if missing <= 0 or recurrent_config(self._runner.model_config) is None:
            return step
        # SGLang lays states out for as many tokens of each request as a chain may have.
        trees = replace(
            step.trees,
            tokens=pad(step.trees.tokens, (0, missing), value=-1),
            parents=pad(step.trees.parents, (0, missing), value=-1),
        )
        return replace(step, trees=trees, depths=pad(step.depths, (0, missing)))

    def _forward_verify(self, batch: Any) -> GenerationBatchResult:
        prepare_mamba_track_for_verify(batch)
        return super()._forward_verify(batch)

    def _move_kv(self, batch: Any, verified: Verified) -> None:
        """Keep the recurrent states after the last accepted tokens; KV is in its place already."""
        path = verified.path.long()
        width = len(batch.out_cache_loc) // len(path)
        rows = path + width * torch.arange(len(path), device=path.device)[:, None]
        commit_mamba_states_after_verify(
            self._target_worker,
            batch,
            verified.num_emitted,
            rows.masked_fill(path < 0, -1),
            width,
        )

    def _prime(self, tree_cache: Any, *, idle: bool) -> bool:
        """Nothing is primed: its forwards are trees."""
        return False
