"""What the host knows of each request, by its row in the engine's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from drafttree.vllm.parameters import announce_undrafted, has_opted_out, is_grammar_bound

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

Rows = np.ndarray[Any, np.dtype[np.intp]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

NATIVE_PROCESSORS = 3
"""vLLM's own logits processors, of biases, penalties and bad words; custom ones come after them."""


class RequestRules:
    """Which requests are not drafted for.

    Args:
        requests: Number of rows.
        no_bound_drafts: Why requests with a grammar are not drafted for; None if they are.
    """

    def __init__(self, requests: int, no_bound_drafts: str | None = None) -> None:
        self._no_bound_drafts = no_bound_drafts
        self._undrafted = np.zeros(requests, np.bool_)

    def start(self, row: int, parameters: SamplingParams | None) -> None:
        """A request starts in a row."""
        is_off = has_opted_out(parameters)
        if self._no_bound_drafts and is_grammar_bound(parameters):
            announce_undrafted(self._no_bound_drafts)
            is_off = True
        self._undrafted[row] = is_off

    def undrafted(self, rows: Rows) -> Flags:
        """Whether each request must not be drafted for, `bool [B]`."""
        flags: Flags = self._undrafted[rows]
        return flags


def in_chains(sampler: Any, rows: Rows) -> Flags:
    """Whether the logits of each request depend on its text, `bool [B]`.

    Args:
        sampler: The engine's sampler, which keeps the requests' sampling parameters.
        rows: `[B]`.
    """
    processors = sampler.logits_processors
    if len(processors) > NATIVE_PROCESSORS:
        # A custom processor does not tell which requests it leaves alone.
        return np.ones(len(rows), np.bool_)
    _, penalties, bad_words = processors
    flags = penalties.use_penalty[rows] | (bad_words.num_bad_words.np[rows] > 0)
    thinking = sampler.thinking_budget_state
    if thinking.enabled:
        flags = flags | thinking.use_thinking_budget[rows]
    chained: Flags = flags
    return chained
