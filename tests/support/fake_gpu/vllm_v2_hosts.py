"""The runners of vLLM's V2 host with stand-ins for the models that draft.

The KV that these write tells what they have read.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tree_kernels.kv_move import movers_of

from drafttree.method import Method
from drafttree.target import Target
from drafttree.vllm import patches
from drafttree.vllm.drafters.draft_layer import LAYER
from drafttree.vllm.v2 import draft_model
from drafttree.vllm.v2.draft_model import DraftModelRunnerV2
from drafttree.vllm.v2.hidden_state import HiddenStateRunnerV2
from drafttree.vllm.v2.model_free import ModelFreeRunnerV2
from drafttree.vllm.v2.runner import TreeRunnerV2
from fake_gpu.stand_ins import (
    BLOCK,
    DRAFTED,
    LAYER_METHOD,
    TARGET,
    check_layer_graphs,
    loads_draft_model,
    loads_layer,
    target_on,
)
from fake_gpu.tensors import held
from fake_gpu.vllm_v2_stock import Stock, Weights
from recycle_plugin import METHOD as TOKEN_RECYCLING
from rsd_plugin import METHOD as RSD


class HostRunner(TreeRunnerV2, Stock):
    """Base class of the runners.

    Attributes:
        method: The method that drafts.
        weights_of_target: Makes the target's weights.
        flash_version: The version of flash attention on the fake GPU; None for none.
        captured: Numbers of rows for which graphs of a draft model are captured on the fake GPU.
    """

    method: Method[Any]
    weights_of_target: type[Weights] = Weights
    flash_version: int | None = None
    captured: tuple[int, ...] = ()

    def _target(self, embed: Any = None, **kwargs: Any) -> Target:
        return target_on(self.device, embed)

    def set_up_host(self, options: dict[str, Any]) -> None:
        """Do what the engine does before it serves requests."""
        if self.method.parse(options).shapes:
            self.scheduler_config.scheduler_cls = patches.scheduling._TIER_SCHEDULER
        self.set_up(self.method, options)
        self.load_model()
        self.load_drafter()
        self.warmed_up()
        self._movers = [movers_of([*self.caches.values()])]
        self._reports.forward_seconds = {1: 0.01}

    def cached(self, layer: str, first_block: int, count: int) -> list[float]:
        """What a layer's cache holds of the first tokens of a request."""
        first = first_block * BLOCK
        values: list[float] = held(self.caches[layer]).view(-1)[first : first + count].tolist()
        return values

    def check_cache(self, name: str, text: list[int], first_block: int) -> None:
        """Check that the KV of a request's text is in its slots, in order."""
        assert self.cached(TARGET, first_block, len(text)) == text


class ModelFreeHost(ModelFreeRunnerV2, HostRunner):  # type: ignore[misc]
    """Token Recycling."""

    method = TOKEN_RECYCLING


class DraftModelHost(DraftModelRunnerV2, HostRunner):  # type: ignore[misc]
    """RSD, with a draft model whose KV of a token is the token."""

    method = RSD
    drafting_layer = DRAFTED

    def _load_drafter(self) -> None:
        with loads_draft_model(self, draft_model):
            super()._load_drafter()
        self._movers_apart = [[movers_of([self.caches[layer]])] for layer in (TARGET, DRAFTED)]
        self._missed = self._no_missed_texts() if self._plans else None

    def forward_step(self, batch: Any, slots: torch.Tensor) -> torch.Tensor:
        """The draft model reads each row of a step once, or later what it has missed."""
        self.reads, missed = [], self._num_unread(batch)
        hidden = super().forward_step(batch, slots)
        rests = self._plans and not batch.num_draft_tokens
        assert sum(rows for rows, _ in self.reads) == (0 if rests else batch.num_tokens + missed)
        return hidden

    def check_cache(self, name: str, text: list[int], first_block: int) -> None:
        """The draft model has read what the target has, apart from what it has missed."""
        super().check_cache(name, text, first_block)
        if self._missed is not None:
            row = self.req_states.req_id_to_index[name]
            text = text[: len(text) - int(self._missed.of(np.array([row]))[0])]
        assert self.cached(DRAFTED, first_block, len(text)) == text


class CapturedHost(DraftModelHost):
    """RSD, whose draft model runs in graphs on the fake GPU."""

    captured = (8, 4, 2, 1)

    def forward_step(self, batch: Any, slots: torch.Tensor) -> torch.Tensor:
        """Graphs are replayed wherever one is large enough."""
        hidden = super().forward_step(batch, slots)
        most = self.captured[0] if self.device.type == "cuda" else 0
        assert all(replayed == (rows <= most) for rows, replayed in self.reads)
        return hidden


class HiddenStateHost(HiddenStateRunnerV2, HostRunner):  # type: ignore[misc]
    """Lyanna, with a layer without weights."""

    method = LAYER_METHOD
    drafting_layer = LAYER

    def _load_drafter(self) -> None:
        with loads_layer(self):
            super()._load_drafter()

    def check_cache(self, name: str, text: list[int], first_block: int) -> None:
        """The layer has read each token of a text, but those deferred, beside the one after it."""
        super().check_cache(name, text, first_block)
        if self._deferred is not None:
            row = self.req_states.req_id_to_index[name]
            text = text[: len(text) + 1 - max(len(self._deferred._rows.get(row, ())), 1)]
        after, shifts = (held(each)[:, 0].tolist() for each in (self.weights, self.shifts))
        expected = [
            after[following] + 0.05 * (after[token] + shifts[place]) + 0.05 * (place % 7)
            for place, (token, following) in enumerate(pairwise(text))
        ]
        found = self.cached(LAYER, first_block, len(expected))
        assert found == pytest.approx(expected, abs=1e-4)


class CapturedLayerHost(HiddenStateHost):
    """Lyanna, whose layer runs in graphs on the fake GPU."""

    captured = (24, 8, 4, 1)

    def check_cache(self, name: str, text: list[int], first_block: int) -> None:
        """Graphs are replayed wherever one is large enough."""
        super().check_cache(name, text, first_block)
        check_layer_graphs(self)


HOSTS: dict[str, type[HostRunner]] = {
    "token-recycling": ModelFreeHost,
    "rsd": DraftModelHost,
    "rsd in graphs": CapturedHost,
    "lyanna": HiddenStateHost,
    "lyanna in graphs": CapturedLayerHost,
}
"""The runner of each method."""
