"""Shows which tokens RSD drafts with `head`, and for how many rows logits are computed."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

VARIABLE = "TESTS_HOT_DRAFTS"

ENVIRONMENT = {VARIABLE: "1"}

_LINE = "drafted tokens, those that are not hot, rows before drafts, and rows of the drafts: "


class Draft(NamedTuple):
    """One call of RSD's drafter.

    Attributes:
        drafted: Number of draft tokens.
        cold: How many of them are none of the hot tokens.
        before: Rows whose logits were computed since the call before this one.
        rows: Rows whose logits were computed in each forward of the call.
    """

    drafted: int
    cold: int
    before: int
    rows: list[int]


def enable() -> None:
    """Print a line for each call of RSD's drafter."""
    import torch

    from rsd_plugin import RsdDrafter

    logits_itself, propose_itself = RsdDrafter.logits, RsdDrafter.propose
    rows: list[int] = []

    def logits(self: RsdDrafter, states: Any, head: Any) -> Any:
        rows.append(len(states))
        return logits_itself(self, states, head)

    def propose(self: RsdDrafter, *args: Any) -> Any:
        before = sum(rows)
        rows.clear()
        trees, drawn = propose_itself(self, *args)
        tokens = trees.tokens[:, 1:][trees.parents[:, 1:] >= 0]
        assert self._hot is not None
        cold = int((~torch.isin(tokens, self._hot.to(tokens.dtype))).sum())
        print(_LINE + json.dumps([len(tokens), cold, before, rows]), flush=True)
        rows.clear()
        return trees, drawn

    RsdDrafter.logits, RsdDrafter.propose = logits, propose  # type: ignore[method-assign]


def shown(log: str) -> list[Draft]:
    """The calls in an engine's log."""
    lines = [line.partition(_LINE)[2] for line in log.splitlines() if _LINE in line]
    return [Draft(*json.loads(line)) for line in lines]


def check_drafts(log: str, levels: list[int] | None = None) -> None:
    """Check that hot tokens alone were drafted, and logits computed for drafts alone.

    Args:
        log: The engine's log.
        levels: Nodes of a request in each forward that drafts; None if the engine may leave some
            out.
    """
    drafts = shown(log)
    assert sum(draft.drafted for draft in drafts) > 100
    for draft in drafts:
        assert draft.cold == draft.before == 0
        assert draft.rows
        if levels is not None:
            assert draft.rows == [draft.rows[0] // levels[0] * level for level in levels]
