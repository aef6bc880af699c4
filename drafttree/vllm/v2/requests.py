"""What the host knows of each request, by its row in the engine's state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from drafttree.arrays import BoolArray
from drafttree.vllm.parameters import announce_undrafted, has_opted_out, is_grammar_bound

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

Rows = np.ndarray[Any, np.dtype[np.intp]]

NATIVE_PROCESSORS = 3
"""vLLM's own logits processors, of biases, penalties and bad words; custom ones come after them."""


class RequestRules:
    """Which requests are not drafted for, and which get chains and no trees.

    Both are fixed when a request starts, and most engines never serve such requests. So nothing is
    looked up until the first one starts.

    Args:
        requests: Number of rows.
        no_bound_drafts: Why requests with a grammar are not drafted for; None if they are.
    """

    def __init__(self, requests: int, no_bound_drafts: str | None = None) -> None:
        self._no_bound_drafts = no_bound_drafts
        self._bound: dict[str, bool] = {}
        self._undrafted = _RowFlags(requests)
        self._chained = _RowFlags(requests)

    def start(self, name: str, row: int, parameters: SamplingParams | None, sampler: Any) -> None:
        """A request starts in a row, or starts again, or goes on as a session with its next turn.

        Args:
            name: The request.
            row: The row.
            parameters: The request's parameters.
            sampler: The engine's sampler, to which the request has been added.
        """
        # The scheduler binds all turns of a session to the grammar of the first one, or to none.
        is_bound = self._bound.setdefault(name, is_grammar_bound(parameters))
        if is_bound and self._no_bound_drafts:
            announce_undrafted(self._no_bound_drafts)
        is_off = has_opted_out(parameters) or (is_bound and self._no_bound_drafts is not None)
        self._undrafted.set(row, is_off)
        self._chained.set(row, depends_on_text(sampler, row))

    def finish(self, names: Iterable[str]) -> None:
        """Requests have finished."""
        for name in names:
            self._bound.pop(name, None)

    def undrafted(self, rows: Rows) -> BoolArray | None:
        """Whether each request must not be drafted for, `bool [B]`; None if all are drafted for."""
        return self._undrafted.of(rows)

    def chained(self, rows: Rows) -> BoolArray | None:
        """Whether each request gets a chain and no tree, `bool [B]`; None if none does."""
        return self._chained.of(rows)


class _RowFlags:
    """A flag for each row."""

    def __init__(self, rows: int) -> None:
        self._flags = np.zeros(rows, np.bool_)
        self._any = False

    def set(self, row: int, flag: bool) -> None:
        self._flags[row] = flag
        self._any = bool(self._flags.any())

    def of(self, rows: Rows) -> BoolArray | None:
        """The flags of some rows; None if none of them is set."""
        if not self._any:
            return None
        flags: BoolArray = self._flags[rows]
        return flags if flags.any() else None


def depends_on_text(sampler: Any, row: int) -> bool:
    """Whether the logits of the request in a row depend on its text.

    Args:
        sampler: The engine's sampler, which keeps the requests' sampling parameters.
        row: The row.
    """
    processors = sampler.logits_processors
    if len(processors) > NATIVE_PROCESSORS:
        # A custom processor does not tell which requests it leaves alone.
        return True
    _, penalties, bad_words = processors
    thinking = sampler.thinking_budget_state
    return bool(
        penalties.use_penalty[row]
        or bad_words.num_bad_words.np[row] > 0
        or (thinking.enabled and thinking.use_thinking_budget[row])
    )
