"""Lets a drafter know what the target's forwards cost, before the first request."""

from __future__ import annotations

import logging
from collections.abc import Callable

from drafttree.drafter import Drafter

_CONTEXT = 128
"""Cached tokens of the request whose forwards are timed."""

Forwards = Callable[[int, int, int, bool, int], list[float]]
"""A host's `(requests, tokens of each, their context, tree, repeat) -> seconds of each forward`."""


def of_one_request(forwards: Forwards, room: int) -> Callable[[int], float]:
    """Seconds of forwards of so many tokens of one request.

    Args:
        room: the most tokens that the host's cache holds of a request.
    """
    return lambda tokens: forwards(1, tokens, min(_CONTEXT, room - tokens), tokens > 1, 1)[0]


def calibrate(
    drafter: Drafter, forward: Callable[[int], float], most: int, logger: logging.Logger
) -> None:
    """Let the drafter time forwards.

    Args:
        forward: seconds of one of so many tokens.
        most: the most tokens that a step may verify.
    """
    try:
        if most >= 1:
            drafter.calibrate(forward, most)
    except Exception as error:
        # Models differ, and the host must not fail for a want of figures.
        logger.warning("The model's forwards cannot be timed: %s", error)
