"""The runners of vLLM's V1 host with stand-ins for the models that draft.

A draft model and a drafter's layer are functions of a row's token, its position and the nodes that
its mask lets it see, so that a mistake in any of them changes what is drafted. The KV that they
write tells what they have read.
"""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tree_kernels.kv_move import movers_of
from vllm.forward_context import get_forward_context

from drafttree.drafter import Target
from drafttree.method import HIDDEN_STATE, Method
from drafttree.vllm.drafters import draft_layer, draft_model
from drafttree.vllm.drafters.draft_layer import LAYER
from drafttree.vllm.drafters.draft_model import DraftModelRunner
from drafttree.vllm.drafters.draft_model_loader import PREFIX
from drafttree.vllm.drafters.hidden_state import HiddenStateRunner
from drafttree.vllm.drafters.model_free import ModelFreeRunner
from drafttree.vllm.runner import TreeModelRunner
from fake_gpu.layer_drafter import LayerDrafter, pattern
from fake_gpu.vllm_v1_stock import VOCAB, Stock, new_cache, nodes_seen, tokens_seen
from lyanna_plugin.config import LyannaOptions
from recycle_plugin import METHOD as TOKEN_RECYCLING
from rsd_plugin import METHOD as RSD

DRAFTED = f"{PREFIX}.0"
"""Name of the draft model's layer."""


class HostRunner(TreeModelRunner[Any], Stock):
    """Base class of the runners under test."""

    method: Method[Any]

    def _target(self, embed: Any = None, **kwargs: Any) -> Target:
        logger = logging.getLogger(__name__)
        return Target("none", VOCAB, self.device, torch.float32, logger, embed=embed)

    def _why_no_bound_drafts(self) -> str | None:
        return None

    def set_up_host(self, options: dict[str, Any]) -> None:
        """Do what the engine does before it serves requests."""
        self.num_spec_tokens = self.method.parse(options).num_draft_tokens
        self.set_up(self.method, options, None)
        self.load_model()
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
    rows_read = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Make the stand-in for a draft model."""
        self.caches[DRAFTED] = new_cache(self.device)
        with mock.patch.object(draft_model, "load_draft_model", return_value=_DraftModel(self)):
            super().load_model()

    def forward_step(self, num_scheduled: np.ndarray[Any, Any]) -> torch.Tensor:
        """The draft model reads each row of a step once, and with tables some drafts twice."""
        self.rows_read = 0
        hidden = super().forward_step(num_scheduled)
        rows = num_scheduled.sum()
        if self._drafter.tables is None:
            assert self.rows_read == rows
        else:
            assert rows <= self.rows_read < 2 * rows
        return hidden

    def check_cache(self, name: str) -> None:
        """The draft model has read what the target has."""
        super().check_cache(name)
        text, computed = self.text_of(name)
        assert self.cached(DRAFTED, name, computed) == text[:computed]


class _DraftModel:
    """Logits that resemble the target's."""

    def __init__(self, runner: DraftModelHost) -> None:
        self._runner = runner
        generator = torch.Generator().manual_seed(4)
        shape = VOCAB, VOCAB
        self._weights = runner.weights + 0.5 * torch.randn(shape, generator=generator).to(
            runner.device
        )
        self._noise = torch.randn(shape, generator=generator).to(runner.device)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._runner.rows_read += len(input_ids)
        with self._runner.uncounted():
            context = get_forward_context()
            metadata: Any = context.attn_metadata
            slots: Any = context.slot_mapping
            self._runner.caches[DRAFTED].view(-1)[slots[DRAFTED]] = input_ids.float()
            seen = 31 * positions + 7 * nodes_seen(metadata[DRAFTED])
            return torch.stack((input_ids.long(), seen % VOCAB), 1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._runner.uncounted():
            return self._weights[hidden[:, 0]] + 0.5 * self._noise[hidden[:, 1]]


class _Attention:
    """Attention of the layer: the query, and a little of the number of tokens that it sees."""

    runner: Stock

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with self.runner.uncounted():
            context = get_forward_context()
            metadata: Any = context.attn_metadata
            slots: Any = context.slot_mapping
            self.runner.caches[LAYER].view(-1)[slots[LAYER]] = k[:, 0]
            seen = (tokens_seen(metadata[LAYER]) % 13)[:, None]
            return q + 0.5 * seen * pattern(q)


class HiddenStateHost(InStepHost, HiddenStateRunner):  # type: ignore[misc]
    """Lyanna, with a layer without weights."""

    method = Method(
        name="layer",
        title="A layer",
        kind=HIDDEN_STATE,
        options=LyannaOptions,
        make_drafter=LayerDrafter,
    )
    drafting_layer = LAYER

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Make the layer."""
        self.caches[LAYER] = new_cache(self.device)
        kind = type("Attention", (_Attention,), {"runner": self})
        with mock.patch.object(draft_layer, "Attention", kind):
            super().load_model()

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
