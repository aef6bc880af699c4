"""SGLang's worker for chains that a model-free drafter drafts.

A chain is a tree without branches, so a step is that of trees, down to the verification with
SGLang's own sampler. But no KV has to be moved, and recurrent layers go on from the state after the
last token that was accepted, which SGLang chooses among those it kept for the tokens of the chain.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.spec_utils import (
    commit_mamba_states_after_verify,
    prepare_mamba_track_for_verify,
)

from drafttree.chains import as_chains
from drafttree.sglang.drafters.model_free import ModelFreeWorker
from drafttree.sglang.worker import Penalties
from drafttree.tree import DraftTree, Verified


class ChainWorker(ModelFreeWorker):
    """Drafts chains, which SGLang verifies with its own attention and state handling."""

    in_chains = True

    def _propose(self, batch: Any, penalties: Penalties) -> tuple[DraftTree, Any]:
        trees, drawn = super()._propose(batch, penalties)
        return as_chains(trees).truncated(self._num_draft_tokens), drawn

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

    def _prime(self, tree_cache: Any, *, idle: bool) -> None:
        """Nothing is primed: its forwards are trees."""
