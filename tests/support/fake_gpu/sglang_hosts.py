"""The workers of SGLang's host, with stand-ins for the models that draft.

What a draft model and a drafter's layer say follows from the KV that they have written and from the
slots, positions and masks that they are given, so a mistake in any of them changes what is drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from drafttree.drafter import Drafter
from drafttree.method import HIDDEN_STATE, MODEL_FREE, Method
from drafttree.model_drafters import Attend
from drafttree.sglang.chains.worker import ChainWorker
from drafttree.sglang.drafters import draft_model
from drafttree.sglang.drafters.draft_model import DraftModelWorker
from drafttree.sglang.drafters.hidden_state import HiddenStateWorker
from drafttree.sglang.drafters.model_free import ModelFreeWorker
from drafttree.sglang.worker import TreeWorker
from drafttree.target import Target
from drafttree.tree import DraftTree
from fake_gpu.layer_drafter import LayerDrafter, pattern
from lyanna_plugin.config import LyannaOptions
from recycle_plugin import METHOD as RECYCLING
from recycle_plugin.config import RecycleOptions
from recycle_plugin.static import StaticTreeDrafter
from rsd_plugin import METHOD as RSD


class _KeepsStep(TreeWorker):
    """A worker that keeps its last step."""

    drafted: Any = None

    def _draft(self, batch: Any) -> Any:
        self.drafted = super()._draft(batch)
        return self.drafted


class _ModelFree(_KeepsStep, ModelFreeWorker):
    """Token Recycling."""


class _Chains(_KeepsStep, ChainWorker):
    """Token Recycling in chains."""


class _DraftModel(_KeepsStep, DraftModelWorker):
    """RSD, with a draft model whose KV of a token is the token."""

    def __init__(self, *given: Any) -> None:
        draft = given[-1].make_draft_worker()
        bundle = SimpleNamespace(draft_worker=draft, draft_model_runner=draft.model_runner)
        with mock.patch.object(draft_model, "build_draft_tp_worker", return_value=bundle):
            super().__init__(*given)


class _HiddenState(_KeepsStep, HiddenStateWorker):
    """Lyanna, with a layer without weights that attends to its KV cache."""


class _AttendingDrafter(LayerDrafter):
    """Its layer attends to all positions with similar weights."""

    def layer(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add a little of the position, and the mean of what attention finds."""
        # Some tokens are impossible after others, and 0 * inf is NaN.
        finite = x.clamp(min=-20)
        given = (finite + 0.05 * (positions % 7)[:, None] * pattern(x))[:, None]
        own = given if last is None else given[last]
        return (own + attend(0.05 * own, given, given))[:, 0]


class _AdaptiveOptions(RecycleOptions):
    """A static tree, of which each step takes a part."""

    @property
    def is_adaptive(self) -> bool:
        """Whether the number of draft tokens may change from step to step."""
        return True


class ScriptedDrafter(StaticTreeDrafter):
    """Drafts the static tree's first nodes, as many as a script says.

    Attributes:
        script: Numbers of draft tokens, counted round.
    """

    script: Iterator[int] = cycle((15, 2, 0, 6, 15, 1))
    _limit = 255

    def limit_draft_tokens(self, num_draft_tokens: int) -> None:
        """Draft at most that many tokens."""
        self._limit = num_draft_tokens

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """A part of the static tree."""
        whole = super().propose(slots, roots)
        return whole.truncated(min(next(self.script), self._limit))


def _scripted(options: _AdaptiveOptions, target: Target) -> Drafter:
    made = RECYCLING.drafter(RecycleOptions(tree=options.tree), target)
    made.__class__ = ScriptedDrafter
    return made


SCRIPTED_SIZES = Method(
    name="scripted_sizes",
    title="Scripted sizes",
    kind=MODEL_FREE,
    options=_AdaptiveOptions,
    make_drafter=_scripted,
)

LAYER = Method(
    name="layer",
    title="A layer",
    kind=HIDDEN_STATE,
    options=LyannaOptions,
    make_drafter=_AttendingDrafter,
)


@dataclass(frozen=True)
class Host:
    """A worker under test.

    Attributes:
        algorithm: SGLang's name of the algorithm.
        method: The method.
        worker: The worker's class.
        draft_model: `--speculative-draft-model-path`.
        longest_chain: Most tokens of a chain, of a worker that drafts chains.
    """

    algorithm: str
    method: Method[Any]
    worker: type[_KeepsStep]
    draft_model: str | None = None
    longest_chain: int | None = None

    def num_draft_tokens(self, options: Mapping[str, Any]) -> int:
        """Most draft tokens of a tree, by the method's options."""
        if self.longest_chain is not None:
            return self.longest_chain
        own = {} if self.draft_model is None else {"model": self.draft_model}
        return self.method.parse({**options, **own}).num_draft_tokens


SCRIPTED = Host("TOKEN-RECYCLING", SCRIPTED_SIZES, _ModelFree)
TOKEN_RECYCLING = Host("TOKEN-RECYCLING", RECYCLING, _ModelFree)
CHAINS = Host("TOKEN-RECYCLING", RECYCLING, _Chains, longest_chain=3)
DRAFT_MODEL = Host("RSD", RSD, _DraftModel, "none")
HIDDEN_STATES = Host("LYANNA", LAYER, _HiddenState, "none")
