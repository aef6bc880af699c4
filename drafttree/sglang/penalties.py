"""Penalties along a tree's path, computed by SGLang's own penalizers.

SGLang feeds its penalizers one token per decode step, whatever the step emitted. So each request
with penalties has its own penalizers here, which are fed every token that it emits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

_KINDS = {
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
}


@dataclass
class _BatchOfOne:
    """The attributes of a batch that the penalizers read."""

    reqs: list[Any]
    device: torch.device


class RequestPenalties:
    """Penalties of one request.

    Args:
        request: SGLang's `Req`.
        emitted: Tokens that the request has emitted so far.
        vocab_size: Number of tokens of the target's logits.
        device: Device of the logits.
    """

    def __init__(
        self, request: Any, emitted: Iterable[int], vocab_size: int, device: torch.device
    ) -> None:
        # The penalizers keep only a weak reference to the batch.
        self._batch = _BatchOfOne([request], device)
        self._penalizers = penaltylib.BatchedPenalizerOrchestrator(vocab_size, self._batch, _KINDS)
        for token in emitted:
            self.add(token)

    @property
    def is_required(self) -> bool:
        """Whether the request has any penalty."""
        return bool(self._penalizers.is_required)

    def add(self, token: int) -> None:
        """Count a token that the request has emitted."""
        self._penalizers.cumulate_output_tokens(torch.tensor([token], device=self._batch.device))

    @contextmanager
    def ahead(self, path: Iterable[int]) -> Iterator[None]:
        """Count the tokens of `path` as emitted inside the block."""
        kept = [
            (penalizer, name, value.clone())
            for penalizer in self._penalizers.penalizers.values()
            for name, value in vars(penalizer).items()
            if isinstance(value, torch.Tensor)
        ]
        try:
            for token in path:
                self.add(token)
            yield
        finally:
            for penalizer, name, value in kept:
                setattr(penalizer, name, value)

    def apply(self, logits: torch.Tensor) -> None:
        """Change `logits [1, V]` as SGLang does: additive penalties first, then scaling ones."""
        additive = torch.zeros_like(logits, dtype=torch.float32)
        self._penalizers.accumulate_additive_penalties(additive)
        logits.add_(additive)
        scaling = self._penalizers.accumulate_scaling_penalties()
        if scaling is not None:
            apply_scaling_penalties(logits, scaling)
