"""Penalties along a tree's path, by the arithmetic of SGLang's own penalizers.

SGLang feeds its penalizers one token per decode step, whatever the step emitted. So what each
request has emitted is counted here, in tensors indexed by slot, and the tokens along a path are
added to the counts of its request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.sampling.penaltylib import (
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
)
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from torch.nn.utils.rnn import pad_sequence

from drafttree.transfer import all_on_device, on_device

_ABSENT = -1
"""In place of a token: none."""


def has_penalties(batch: Any) -> bool:
    """Whether any request of a batch that is being computed has penalties."""
    info = batch.sampling_info
    return info.acc_additive_penalties is not None or info.acc_scaling_penalties is not None


@dataclass
class _BatchOfOne:
    """The attributes of a batch that SGLang's penalizers read."""

    reqs: list[Any]
    device: torch.device


class Penalties:
    """Penalties of all requests, by slot; S is the number of slots and V that of tokens.

    Nothing is allocated before a request has a penalty: then 5 bytes for each slot and token.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape = slots, vocab_size
        self._device = device
        self._allocated = False
        self._scales = False

    def start(self, starting: Sequence[tuple[Any, int]]) -> None:
        """Requests start in their slots, or restart after they were retracted."""
        requests = [request for request, _ in starting]
        parameters = [request.sampling_params for request in requests]
        if not requests:
            return
        if not self._allocated:
            if not any(map(_has_any, parameters)):
                return
            self._allocate()
        self._scales |= any(each.repetition_penalty != 1.0 for each in parameters)
        tables = {
            "presence_penalty": self._presence,
            "frequency_penalty": self._frequency,
            "repetition_penalty": self._repetition,
            "min_new_tokens": self._least,
        }
        emitted = [torch.tensor(list(each.output_ids), dtype=torch.int64) for each in requests]
        stops = [_stop_tokens(request, self._shape[1]) for request in requests]
        slots, known, stopping, *values = all_on_device(
            [
                np.array([slot for _, slot in starting], np.int64),
                pad_sequence(emitted, True, _ABSENT).numpy(),
                pad_sequence(stops, True, self._shape[1]).numpy(),
                *(
                    np.array([getattr(each, name) for each in parameters], np.float32)
                    for name in tables
                ),
            ],
            self._device,
        )
        for table, given in zip(tables.values(), values, strict=True):
            table[slots] = given.to(table.dtype)
        self._seen[slots] = False
        self._summed[slots] = 0
        self._emitted[slots] = 0
        self._start_stops(slots, stopping)
        self.add(slots, known)

    def add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count tokens that requests have emitted.

        Args:
            slots: `int64 [B]`.
            tokens: `int [B, D]`, -1 for none.
        """
        if not self._allocated:
            return
        columns = self._columns(tokens)
        self._seen[slots[:, None], columns] = True
        flat = (slots[:, None] * self._summed.shape[1] + columns).flatten()
        # Added up one by one, as SGLang does: the product with a count is rounded differently.
        penalties = self._frequency[slots][:, None].expand_as(columns).flatten()
        self._summed.view(-1).scatter_add_(0, flat, penalties)
        self._emitted[slots] += (tokens >= 0).sum(1, dtype=torch.int32)

    def apply(self, logits: torch.Tensor, slots: torch.Tensor, path: torch.Tensor) -> None:
        """Change logits as SGLang does: additive penalties first, then scaling ones.

        Args:
            logits: `[R, V]`.
            slots: `int64 [R]`, the slot of each row's request.
            path: `int [R, D]`, tokens that count as emitted too; -1 for none.
        """
        additive, scaling = self._of(slots, path)
        logits.add_(additive)
        if scaling is not None:
            apply_scaling_penalties(logits, scaling)

    def resume(self, batch: Any) -> None:
        """Penalise the next tokens of requests that were retracted as if they had not been.

        When their prompts are read again, SGLang's penalizers know of none of the tokens that they
        have emitted.

        Args:
            batch: SGLang's batch of prompts, whose requests have started.
        """
        rows = [row for row, request in enumerate(batch.reqs) if request.output_ids]
        if not rows or not has_penalties(batch):
            return
        info, again = batch.sampling_info, on_device(np.array(rows, np.int64), self._device)
        none = torch.empty(len(rows), 0, dtype=torch.int64, device=self._device)
        additive, scaling = self._of(batch.req_pool_indices[again], none)
        if info.acc_additive_penalties is not None:
            info.acc_additive_penalties[again] = additive
        if info.acc_scaling_penalties is not None and scaling is not None:
            # SGLang may keep the tensor itself.
            info.acc_scaling_penalties = info.acc_scaling_penalties.index_copy(0, again, scaling)

    def _of(
        self, slots: torch.Tensor, path: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Additive penalties of R rows, `[R, V]`, and scaling ones, if any request has such."""
        columns = self._columns(path)
        # Indexing copies.
        seen, summed = self._seen[slots], self._summed[slots]
        seen.scatter_(1, columns, True)
        summed.scatter_add_(1, columns, self._frequency[slots][:, None].expand_as(columns))
        seen = seen[:, :-1]
        additive = -summed[:, :-1] - self._presence[slots][:, None] * seen
        if self._stops is not None:
            emitted = self._emitted[slots] + (path >= 0).sum(1, dtype=torch.int32)
            stops = torch.zeros_like(summed).scatter_(1, self._stops[slots], -torch.inf)
            additive += torch.where((emitted < self._least[slots])[:, None], stops[:, :-1], 0.0)
        if not self._scales:
            return additive, None
        return additive, torch.where(seen, self._repetition[slots][:, None], 1.0)

    def _allocate(self) -> None:
        slots, vocab_size = self._shape
        zeros = partial(torch.zeros, device=self._device)
        # The last column is that of no token.
        self._seen = zeros(slots, vocab_size + 1, dtype=torch.bool)
        self._summed = zeros(slots, vocab_size + 1)
        self._emitted = zeros(slots, dtype=torch.int32)
        self._least = zeros(slots, dtype=torch.int32)
        self._presence, self._frequency = zeros(2, slots)
        # The running requests that started before have no penalties.
        self._repetition = torch.ones(slots, device=self._device)
        self._stops: torch.Tensor | None = None
        self._allocated = True

    def _start_stops(self, slots: torch.Tensor, stops: torch.Tensor) -> None:
        """Keep the tokens that end requests, which are forbidden before their least lengths.

        Args:
            slots: `int64 [B]`.
            stops: `int64 [B, n]`, padded with V.
        """
        slot_count, vocab_size = self._shape
        if self._stops is None:
            if not stops.shape[1]:
                return
            self._stops = torch.full((slot_count, 1), vocab_size, device=self._device)
        more = stops.shape[1] - self._stops.shape[1]
        if more > 0:
            self._stops = torch.nn.functional.pad(self._stops, (0, more), value=vocab_size)
        self._stops[slots] = vocab_size
        self._stops[slots, : stops.shape[1]] = stops

    def _columns(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.where(tokens >= 0, tokens, self._shape[1]).long()


def _has_any(parameters: Any) -> bool:
    return (
        parameters.presence_penalty != 0.0
        or parameters.frequency_penalty != 0.0
        or parameters.repetition_penalty != 1.0
        or parameters.min_new_tokens > 0
    )


def _stop_tokens(request: Any, vocab_size: int) -> torch.Tensor:
    """The tokens that SGLang forbids before a request's least length, `int64 [n]`."""
    if not request.sampling_params.min_new_tokens:
        return torch.empty(0, dtype=torch.int64)
    # On the CPU, where reading the result does not wait for a device.
    batch = _BatchOfOne([request], torch.device("cpu"))
    kind = BatchedMinNewTokensPenalizer
    penalizers = BatchedPenalizerOrchestrator(vocab_size, batch, {kind}).penalizers
    return penalizers[kind].stop_token_penalties[0].nonzero()[:, 0]
