"""Base class of SGLang's workers whose drafter has a model of its own."""

from __future__ import annotations

from typing import Any

import torch

from drafttree.drafter import ModelFreeDrafter
from drafttree.model_drafters import ModelDrafter
from drafttree.sglang.drafters.observing import ObservingWorker
from drafttree.tree import NO_TOKEN, DraftTree


class ModelDraftingWorker(ObservingWorker):
    """Drafts with a `ModelDrafter`, whose tables observe if it has any.

    Attributes:
        draft_seconds: Host time spent drafting.
    """

    drafter: ModelDrafter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.draft_seconds = 0.0

    @property
    def _observing(self) -> ModelFreeDrafter | None:
        return self.drafter.tables

    @property
    def _plans(self) -> bool:
        """Whether the drafter chooses the trees of each step."""
        return self.drafter.plans and self._may_plan

    def _propose_without_model(self, slots: torch.Tensor) -> DraftTree:
        """The trees of a step in which the model does not draft, for requests in `slots`."""
        roots, drafting = self._states.roots[slots], self._states.drafting[slots]
        if not drafting.any():
            return DraftTree.of_roots(roots)
        asked = roots.masked_fill(~drafting, NO_TOKEN)
        return self.drafter.propose_without_model(slots, asked).rooted(roots)
