"""The runners of vLLM's V1 host with stand-ins for the models that draft.

The KV that these write tells what they have read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tree_kernels.kv_move import movers_of

from drafttree.method import Method
from drafttree.target import Target
from drafttree.vllm.drafters import draft_model
from drafttree.vllm.drafters.draft_layer import LAYER
from drafttree.vllm.drafters.draft_model import DraftModelRunner
from drafttree.vllm.drafters.hidden_state import HiddenStateRunner
from drafttree.vllm.drafters.model_free import ModelFreeRunner
from drafttree.vllm.runner import TreeModelRunner
from fake_gpu.stand_ins import (
    DRAFTED,
    LAYER_METHOD,
    check_layer_graphs,
    loads_draft_model,
    loads_layer,
    target_on,
)
from fake_gpu.vllm_v1_stock import Stock
from recycle_plugin import METHOD as TOKEN_RECYCLING
from rsd_plugin import METHOD as RSD


class HostRunner(TreeModelRunner[Any], Stock):
    """Base class of the runners under test.

    Attributes:
        method: The method that drafts.
        captured: Numbers of rows for which graphs are captured on the fake GPU.
    """

    method: Method[Any]
    captured: tuple[int, ...] = ()

    def _target(self, embed: Any = None, **kwargs: Any) -> Target:
        return target_on(self.device, embed)

    def _why_no_bound_drafts(self) -> str | None:
        return None

    def set_up_host(self, options: dict[str, Any]) -> None:
        """Do what the engine does before it serves requests."""
        self.num_spec_tokens = self.method.parse(options).num_draft_tokens
        self.set_up(self.method, options, None)
        self.load_model()
        self.load_drafter()
        self._movers = [movers_of([*self.caches.values()])]

    def trees_of(self, drafts: dict[str, list[int]]) -> dict[str, tuple[list[int], list[int]]]:
        """The tokens and parents of the trees of a step, for which these drafts were scheduled."""
        return {name: (ids, self._stored[name].parents.tolist()) for name, ids in drafts.items()}


class ModelFreeHost(HostRunner, ModelFreeRunner):  # type: ignore[misc]
    """Token Recycling."""

    method = TOKEN_RECYCLING


class InStepHost(HostRunner):
    """Base class of runners whose trees are known within the step."""

    def trees_of(self, drafts: dict[str, list[int]]) -> dict[str, tuple[list[int], list[int]]]:
        """The trees that were drafted for placeholders."""
        with self.uncounted():
            tokens, parents = self._step.drafts.tokens.tolist(), self._step.drafts.parents.tolist()
        rows = enumerate(self.input_batch.req_ids)
        return {name: (tokens[row], parents[row]) for row, name in rows if name in drafts}


class DraftModelHost(InStepHost, DraftModelRunner):  # type: ignore[misc]
    """RSD, with a draft model whose KV of a token is the token."""

    method = RSD
    drafting_layer = DRAFTED

    def _load_drafter(self) -> None:
        with loads_draft_model(self, draft_model):
            super()._load_drafter()

    def forward_step(self, num_scheduled: np.ndarray[Any, Any]) -> torch.Tensor:
        """The draft model reads each row of a step once, and with tables some drafts twice."""
        self.reads = []
        hidden = super().forward_step(num_scheduled)
        rows, read = num_scheduled.sum(), sum(rows for rows, _ in self.reads)
        if self._drafter.tables is None:
            assert read == rows
        else:
            assert rows <= read < 2 * rows
        return hidden

    def check_cache(self, name: str) -> None:
        """The draft model has read what the target has."""
        super().check_cache(name)
        text, computed = self.text_of(name)
        assert self.cached(DRAFTED, name, computed) == text[:computed]


class CapturedHost(DraftModelHost):
    """RSD, whose draft model runs in graphs on the fake GPU."""

    captured = (8, 4, 2, 1)

    def forward_step(self, num_scheduled: np.ndarray[Any, Any]) -> torch.Tensor:
        """Graphs are replayed wherever one is large enough."""
        hidden = super().forward_step(num_scheduled)
        most = self.captured[0] if self.device.type == "cuda" else 0
        assert all(replayed == (rows <= most) for rows, replayed in self.reads)
        return hidden


class HiddenStateHost(InStepHost, HiddenStateRunner):  # type: ignore[misc]
    """Lyanna, with a layer without weights."""

    method = LAYER_METHOD
    drafting_layer = LAYER

    def _load_drafter(self) -> None:
        with loads_layer(self):
            super()._load_drafter()

    def check_cache(self, name: str) -> None:
        """The layer has read each token of a text beside the one after it."""
        super().check_cache(name)
        text, computed = self.text_of(name)
        computed = min(computed, len(text) - 1)
        with self.uncounted():
            weights = self.weights[:, 0].tolist()
        hidden = [weights[token] for token in text]
        expected = [
            hidden[place + 1] + 0.05 * hidden[place] + 0.05 * (place % 7)
            for place in range(computed)
        ]
        assert self.cached(LAYER, name, computed) == pytest.approx(expected, abs=1e-4)


class CapturedLayerHost(HiddenStateHost):
    """Lyanna, whose layer runs in graphs on the fake GPU."""

    captured = (16, 8, 4, 1)

    def check_cache(self, name: str) -> None:
        """Graphs are replayed wherever one is large enough."""
        super().check_cache(name)
        check_layer_graphs(self)
