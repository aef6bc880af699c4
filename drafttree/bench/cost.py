"""What verification costs: c(N) / c(1), where c(N) is the time of a target forward over N tokens a
request, one of them the root.

It sets what a method can gain: a step emits MAT tokens and takes at least c(N), so decoding is
MAT / (c(N) / c(1)) times as fast, if nothing else takes time.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from time import perf_counter

from drafttree.bench.engine_process import EngineProcess
from drafttree.bench.protocol import ForwardShape, Generation

_ROUNDS = 12
_FEWEST_ROUNDS = 3
_FORWARDS = 5
_SECONDS = 60.0
"""After so long no further round begins: large batches take seconds a forward."""


def mean_context(answers: list[list[Generation]]) -> int:
    """The mean number of tokens before a decode step's own, over a run's answers."""
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
    """Measure both engines in turn and compare medians.

    Args:
        tokens: of a request in a verifying step, the root included.
        context: cached tokens of each request.

    Returns:
        `verify_cost`: c(N) / c(1) for a tree, in the method's engine, against one token in the
        plain one. `chain_cost`: the same for a causal chain of N tokens in the plain engine.
        Beside them what they were measured at.
    """
    one = ForwardShape(requests, 1, context, tree=False, repeat=_FORWARDS)
    chain = replace(one, tokens=tokens)
    sides = {
        "one": (plain, one),
        "chain": (plain, chain),
        "tree": (method, replace(chain, tree=True)),
    }
    for process, shape in sides.values():  # the first of a shape may compile
        process.forward_seconds(shape)
    times: dict[str, list[float]] = {name: [] for name in sides}
    started = perf_counter()
    for number in range(_ROUNDS):
        if number >= _FEWEST_ROUNDS and perf_counter() - started > _SECONDS:
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
