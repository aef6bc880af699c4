"""Sampling settings of the rows of a step, several of which may belong to one request."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinPLogitsProcessor

from drafttree.vllm.processors import is_active

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata


def settings_of_rows(metadata: SamplingMetadata, requests: torch.Tensor) -> SamplingMetadata:
    """The settings of some rows.

    Args:
        metadata: The engine's settings of a batch in which not all requests are greedy, and no
            request has state that follows one path. Penalties and bad words are not looked at.
        requests: The request of each row, `int64 [n]`.
    """

    def of_rows(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[requests]

    active = [*filter(is_active, metadata.logitsprocs.all)]
    biases = [each for each in active if type(each) is LogitBiasLogitsProcessor]
    min_ps = [each for each in active if type(each) is MinPLogitsProcessor]
    assert len(active) == len(biases) + len(min_ps), "other processors have state"
    assert metadata.temperature is not None
    count = len(metadata.temperature)
    processors: Any = SimpleNamespace(
        non_argmax_invariant=[_Function(_adding(each, requests, count)) for each in biases],
        argmax_invariant=[_of_rows(each, requests) for each in min_ps],
    )
    return replace(
        metadata,
        temperature=of_rows(metadata.temperature),
        top_p=of_rows(metadata.top_p),
        top_k=of_rows(metadata.top_k),
        allowed_token_ids_mask=of_rows(metadata.allowed_token_ids_mask),
        logitsprocs=processors,
        thinking_budget_state_holder=None,
    )


@dataclass(frozen=True)
class _Function:
    """A logits processor that is a function."""

    apply: Callable[[torch.Tensor], torch.Tensor]


def _adding(
    processor: LogitBiasLogitsProcessor, requests: torch.Tensor, count: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What adds the biases of `count` requests to rows that belong to these, `int64 [n]`."""

    def add(logits: torch.Tensor) -> torch.Tensor:
        biases = logits.new_zeros(count, logits.shape[1])
        biases[processor.logits_slice] = processor.bias_tensor
        return logits.add_(biases[requests])

    return add


def _of_rows(processor: MinPLogitsProcessor, requests: torch.Tensor) -> MinPLogitsProcessor:
    copied = copy.copy(processor)
    copied.min_p = processor.min_p[requests]
    return copied
