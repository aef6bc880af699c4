"""The cost of verification, c(N) / c(1): c(N) is the time of a target forward over N tokens per
request, the root included.

It bounds the speedup of a method. A step emits MAT (mean accepted tokens) tokens and takes at least
c(N), so decoding becomes at most MAT / (c(N) / c(1)) times as fast.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from time import perf_counter

from drafttree.bench.engine_process import EngineProcess
from drafttree.bench.protocol import ForwardShape, Generation

_ROUNDS = 12
_MIN_ROUNDS = 3
_FORWARDS = 5
_SECONDS = 60.0
"""No further round starts after this time: a forward of a large batch takes seconds."""


def mean_context(answers: list[list[Generation]]) -> int:
    """Mean number of tokens before a decode step, over all answers of a run."""
    every = [answer for prompt in answers for answer in prompt]
    tokens = sum(len(answer.token_ids) for answer in every)
    seen = sum(
        len(answer.token_ids) * (answer.prompt_tokens + len(answer.token_ids) / 2)
        for answer in every
    )
    return round(seen / tokens) if tokens else 0


def verification_cost(
    plain: EngineProcess, method: EngineProcess, requests: int, tokens: int, context: int
) -> dict[str, float | int]:
    """Measure both engines alternately and compare medians.

    Args:
        plain: Engine without a method.
        method: Engine with the method.
        requests: Batch size.
        tokens: Tokens of each request in a verification step, the root included.
        context: Cached tokens of each request.

    Returns:
        `verify_cost`, the time of a tree of N tokens in the method's engine over that of one token
        in the plain engine; `chain_cost`, the same for a causal chain of N tokens in the plain
        engine; and `cost_tokens`, `cost_context` and `forward_seconds`, the conditions of the
        measurement. Empty if the engines cannot time forwards of the model.
    """
    one = ForwardShape(requests, 1, context, tree=False, repeat=_FORWARDS)
    chain = replace(one, tokens=tokens)
    sides = {
        "one": (plain, one),
        "chain": (plain, chain),
        "tree": (method, replace(chain, tree=True)),
    }
    for process, shape in sides.values():  # the first forward of a shape may compile
        if not process.forward_seconds(shape):
            return {}
    times: dict[str, list[float]] = {name: [] for name in sides}
    started = perf_counter()
    for number in range(_ROUNDS):
        if number >= _MIN_ROUNDS and perf_counter() - started > _SECONDS:
            break
        for name, (process, shape) in sides.items():
            times[name] += process.forward_seconds(shape)
    seconds = {name: median(found) for name, found in times.items()}
    return {
        "verify_cost": seconds["tree"] / seconds["one"],
        "chain_cost": seconds["chain"] / seconds["one"],
        "cost_tokens": tokens,
        "cost_context": context,
        "forward_seconds": seconds["one"],
    }
