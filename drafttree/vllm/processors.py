"""What of a batch's sampling settings depends on the requests' texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata

STATELESS = (LogitBiasLogitsProcessor, MinPLogitsProcessor)
"""Logits processors that do not depend on the tokens emitted so far."""

GREEDY_BELOW = 1e-5
"""The engine treats lower temperatures as greedy."""


def thinking_budgets(metadata: SamplingMetadata) -> dict[int, Any]:
    """The engine's state of each request with a thinking budget, by row of the batch."""
    holder = metadata.thinking_budget_state_holder
    return {} if holder is None else holder._state


def is_active(processor: Any) -> bool:
    """Whether a logits processor changes the logits of any request."""
    if type(processor) is MinTokensLogitsProcessor:
        return bool(processor.min_toks)
    if type(processor) is LogitBiasLogitsProcessor:
        return bool(processor.biases)
    if type(processor) is MinPLogitsProcessor:
        return bool(processor.min_p_count)
    return True


def follows_texts(processor: Any) -> bool:
    """Whether a logits processor changes logits by the tokens emitted so far."""
    return is_active(processor) and type(processor) not in STATELESS


def rows_with_state(
    metadata: SamplingMetadata, budgets: dict[int, Any], requests: int
) -> frozenset[int]:
    """The requests whose logits depend on state that only follows one path, by row.

    Penalties and bad words read a text, which may be that of any node. A thinking budget, a least
    number of tokens and a custom processor keep state.
    """
    rows = set(budgets)
    for processor in metadata.logitsprocs.all:
        if not follows_texts(processor):
            continue
        if type(processor) is not MinTokensLogitsProcessor:
            return frozenset(range(requests))
        rows.update(processor.min_toks)
    return frozenset(rows)
