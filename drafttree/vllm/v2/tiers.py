"""How many draft tokens each request has, by the number of requests.

The scheduler schedules a step before the outcome of the last one is known, so the number is the
same for all requests, and depends on how many there are. With `nodes=auto` and `tree=auto` it is an
upper bound, as drafttree's own scheduler chooses among a few smaller ones too. It never exceeds a
request's share of a step's tokens: the scheduler serves running requests in order, and the last
ones would wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from drafttree.vllm.step_share import share_of_step

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

    from drafttree.method import MethodOptions

Tiers = list[list[int]]
"""Ranges of batch sizes: first, last, and the draft tokens of each request there."""

SIZES = (0, 3, 7, 15, 31, 63)
"""With Token Recycling's `nodes=auto`, the numbers of draft tokens to choose from."""

ROWS = 512
"""Where the scheduler chooses, the most nodes of a step: beyond them each costs time on any GPU."""

MANY = 1 << 16
"""More requests than any engine runs."""


def sizes_up_to(num_draft_tokens: int) -> tuple[int, ...]:
    """The numbers of draft tokens to choose from, with the greatest one given."""
    most = min(num_draft_tokens, SIZES[-1])
    return (*(size for size in SIZES if size < most), most)


def sizes_of(options: MethodOptions, num_draft_tokens: int) -> tuple[int, ...]:
    """The numbers of draft tokens that the scheduler chooses from; none if it does not choose.

    Args:
        options: The method's options.
        num_draft_tokens: Greatest number of draft tokens of a tree.
    """
    if options.shapes:
        return (0, *(shape.nodes for shape in options.shapes))
    return sizes_up_to(num_draft_tokens) if options.is_adaptive else ()


def make_tiers(
    num_draft_tokens: int, budget: int, max_requests: int, sizes: Sequence[int] = ()
) -> Tiers:
    """Choose the draft tokens of a request for each number of requests.

    Args:
        num_draft_tokens: Greatest number.
        budget: Greatest number of tokens of a step.
        max_requests: Greatest number of requests.
        sizes: Numbers of draft tokens that the scheduler chooses from, of which the tiers are the
            greatest; none if it does not choose.
    """

    def wanted(requests: int) -> int:
        if not sizes:
            return num_draft_tokens
        most = _one_of_few(ROWS // requests - 1)
        return max((size for size in sizes if size <= most), default=0)

    chosen = []
    for requests in range(1, max_requests + 1):
        most = share_of_step(budget, requests, max_requests) - 1
        chosen.append(wanted(requests) if wanted(requests) <= most else _one_of_few(most))
        if not chosen[-1]:
            break  # the engine takes the last tier for more requests too
    tiers, first = [], 1
    for size, same in groupby(chosen):
        last = first + len([*same]) - 1
        tiers.append([first, last, size])
        first = last + 1
    return tiers


def _one_of_few(most: int) -> int:
    """A size of at most `most`, of which there are few: the engine captures graphs for each."""
    return (1 << (max(most, 0) + 1).bit_length() - 1) - 1


def max_nodes(tiers: Tiers, max_requests: int) -> int:
    """Greatest number of nodes of the trees of at most `max_requests`, the roots counted."""
    return max(requests * (1 + size) for requests, size in _largest(tiers, max_requests))


def max_rows(tiers: Tiers, max_requests: int) -> int:
    """Greatest number of rows of a step that have logits.

    Beside the requests by whose number the tier is chosen, others may read the ends of their
    prompts in the same step.
    """
    return max_requests + max(requests * size for requests, size in _largest(tiers, max_requests))


def _largest(tiers: Tiers, max_requests: int) -> list[tuple[int, int]]:
    """The most requests and the draft tokens of each tier."""
    return [(min(last, max_requests), size) for first, last, size in tiers if first <= max_requests]


def plan(
    engine: EngineArgs, max_model_len: int, num_draft_tokens: int, sizes: Sequence[int]
) -> Tiers:
    """The tiers of an engine whose limits may not be known yet.

    vLLM chooses limits that the user has left out after it has made the speculative configuration.
    Those assumed here are the smallest that it can choose.
    """
    from vllm.config import SchedulerConfig

    budget, requests = engine.max_num_batched_tokens, engine.max_num_seqs
    if budget is None:
        budget = SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS
        if requests is not None:
            budget = min(budget, requests * max_model_len)
    if engine.max_num_scheduled_tokens is not None:
        budget = min(budget, engine.max_num_scheduled_tokens)
    return make_tiers(num_draft_tokens, budget, requests or MANY, sizes)
