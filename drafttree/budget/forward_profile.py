"""Measures the target's forwards at start-up, before the first request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from statistics import median
from time import perf_counter

from drafttree.drafter import Drafter

CONTEXT = 128
"""Cached tokens of each request whose forwards are timed."""

MOST_ON_CPU = 256
"""Greatest number of tokens of a forward that is timed on a CPU, where larger ones are bound by
arithmetic: each further token takes as long as the last ones did."""

_TOKEN_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 81, 128, 256, 512, 1024, 2048, 4096, 8192)
_REPEATS = 3
_REPEAT_SECONDS = 0.1
"""Time after which a forward is not measured again; long ones vary little."""
_MAX_SECONDS = 5.0
"""Total time after which no larger forward is measured."""

Forwards = Callable[[int, int, int, bool, int], list[float]]
"""A host's function that times forwards: `(num_requests, tokens_per_request, context, tree,
repeats) -> seconds of each forward`."""


def of_trees(
    forwards: Forwards, tree_tokens: int, longest: int, pool: int
) -> Callable[[int], float]:
    """Make a drafter's `measure_forward(num_tokens)` from a host's function.

    Up to `tree_tokens` tokens are of one request. More are divided equally among as few requests
    as have room for them; if a few tokens remain, the measured time is scaled up to include them.

    Args:
        forwards: The host's function.
        tree_tokens: Nodes of the largest tree, root included.
        longest: Largest number of tokens of one request.
        pool: Number of tokens that fit in the host's KV cache.

    Returns:
        A function that runs one forward and returns its seconds.
    """

    def measure(num_tokens: int) -> float:
        requests = -(-num_tokens // tree_tokens)
        tokens = num_tokens // requests
        context = max(0, min(CONTEXT, longest - tokens, pool // requests - tokens))
        seconds = forwards(requests, tokens, context, tokens > 1, 1)[0]
        return seconds * num_tokens / (requests * tokens)

    return measure


def profile_drafter(
    drafter: Drafter,
    measure_forward: Callable[[int], float],
    max_tokens: int,
    logger: logging.Logger,
) -> None:
    """Call `drafter.profile`, and warn if it fails.

    Args:
        drafter: The drafter to profile.
        measure_forward: Runs one forward over a number of tokens and returns its seconds.
        max_tokens: Largest number of tokens that a step may verify; nothing happens below 1.
        logger: Logger of the warning.
    """
    try:
        if max_tokens >= 1:
            drafter.profile(measure_forward, max_tokens)
    except Exception as error:
        # Models differ, and an engine must not fail to start because a measurement failed.
        logger.warning("The model's forwards cannot be timed: %s", error)


def measure_forwards(measure_forward: Callable[[int], float], max_tokens: int) -> dict[int, float]:
    """Measure forwards of up to `max_tokens` tokens.

    Args:
        measure_forward: Runs one forward over a number of tokens and returns its seconds.
        max_tokens: Number of tokens of the largest forward.

    Returns:
        Median seconds by token count. The largest counts are missing if they would take too long.
    """
    started = perf_counter()
    seconds: dict[int, float] = {}
    for count in (*(count for count in _TOKEN_COUNTS if count < max_tokens), max_tokens):
        measure_forward(count)  # The first forward of a size may compile.
        times: list[float] = []
        while len(times) < _REPEATS and sum(times) < _REPEAT_SECONDS:
            times.append(measure_forward(count))
        seconds[count] = median(times)
        if perf_counter() - started > _MAX_SECONDS:
            break
    return seconds
