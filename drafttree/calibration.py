"""Lets a drafter know what the target's forwards cost, before the first request."""

from __future__ import annotations

import logging
from collections.abc import Callable

from drafttree.drafter import Drafter

_CONTEXT = 128
"""Cached tokens of the request whose forwards are timed."""

Forwards = Callable[[int, int, int, bool, int], list[float]]
"""A host's `(requests, tokens of each, their context, tree, repeat) -> seconds of each forward`."""


def calibrate(
    drafter: Drafter, forwards: Forwards, most: int, room: int, logger: logging.Logger
) -> None:
    """Let the drafter time forwards of one request.

    Args:
        most: the most tokens that a step may verify.
        room: the most that the host's cache holds of a request.
    """

    def forward(tokens: int) -> float:
        return forwards(1, tokens, min(_CONTEXT, room - tokens), tokens > 1, 1)[0]

    try:
        if most >= 1:
            drafter.calibrate(forward, most)
    except Exception as error:
        # Models differ, and the host must not fail for a want of figures.
        logger.warning("The model's forwards cannot be timed: %s", error)
