"""Random requests of a soak, their mixtures, and what makes an answer wrong.

A pool of requests is drawn from a seed and answered by plain decoding once. Mixtures then serve
requests of the pool again and again, so earlier prompts come back by themselves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import structured_answers

MAX_MODEL_LEN = 512
MAX_TOKENS = 60
RUNNING = 6
"""Most requests that run at a time."""

END = 1
"""The token that ends a text."""

WHOLE_CHARACTER = 300
"""A token that ends with a whole character."""

STOPS = ["k", "qe", "<unused4", "z", "31"]
KINDS = [*structured_answers.GRAMMARS["vllm"]]


@dataclass(frozen=True)
class Asked:
    """A request of the pool.

    Attributes:
        number: Its place in the pool.
        prompt: Token ids.
        sampling: Keyword arguments of vLLM's `SamplingParams`, translated for SGLang.
        grammar: A kind of `structured_answers.GRAMMARS`; None for no grammar.
        is_exact: Whether the method promises the tokens of plain decoding, not their distribution.
    """

    number: int
    prompt: list[int]
    sampling: dict[str, Any]
    grammar: str | None
    is_exact: bool


@dataclass
class Given:
    """An answer, by sample.

    Attributes:
        tokens: The new token ids.
        texts: The new text.
        reasons: Why each sample ended; None after an abort.
        logprobs: The chosen tokens' logprobs, if the request asks for them.
    """

    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Served:
    """A request as it takes part in a mixture.

    Attributes:
        number: The request's place in the pool.
        arrives: Steps of the engine, or hundredths of a second, after the mixture's beginning.
        abort_after: Number of tokens after which it is aborted; None for no abort.
        drafted: Whether it may be drafted for.
        streamed: Whether its answer is streamed, where that is asked for by the request.
    """

    number: int
    arrives: int
    abort_after: int | None
    drafted: bool
    streamed: bool


@dataclass(frozen=True)
class Mixture:
    """Requests that are served together, and what is done before them, while none is running."""

    before: str | None
    requests: list[Served]


def make_requests(engine: str, seed: int, count: int, method: str) -> list[Asked]:
    """The pool of an engine; the same arguments give the same requests."""
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    made = []
    for number in range(count):
        prompts.append(_prompt(draw, prompts))
        exact, sampling = _sampling(draw, engine, method)
        grammar = draw.choice(KINDS) if draw.random() < 0.15 else None
        if grammar is not None:
            sampling = {name: sampling[name] for name in sampling.keys() & _WITH_GRAMMARS}
        prompt = prompts[-1]
        if "stop" in sampling:
            # After a prompt that ends within a character, vLLM's text begins with the prompt's, and
            # stop strings are found there.
            prompt = [*prompt[:-1], WHOLE_CHARACTER]
        made.append(Asked(number, prompt, sampling, grammar, exact))
    return made


_WITH_GRAMMARS = {"temperature", "seed", "max_tokens", "top_p", "repetition_penalty", "n"}


def _prompt(draw: random.Random, earlier: list[list[int]]) -> list[int]:
    length = draw.choice([draw.randint(1, 40), draw.randint(40, 160), draw.randint(160, 300)])
    text = [draw.randrange(2, 512) for _ in range(length)]
    shape = draw.random()
    if shape < 0.3:  # a phrase that comes again and again
        text = (text[: draw.randint(2, 12)] * length)[:length]
    elif shape < 0.6 and earlier:  # an earlier prompt, or the beginning of one
        known = draw.choice(earlier)
        text = known[: draw.randint(1, len(known))] + text[: draw.randint(0, 30)]
    return text[: MAX_MODEL_LEN - MAX_TOKENS - 1]


def _sampling(draw: random.Random, engine: str, method: str) -> tuple[bool, dict[str, Any]]:
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": draw.randint(1, MAX_TOKENS)}
    is_exact, kind = True, draw.random()
    if kind > 0.45:
        sampling["temperature"] = draw.choice([0.3, 0.7, 1.0])
        # SGLang has no seeds on a CPU, and RSD's drafts take draws of their own.
        is_exact = kind < 0.8 and engine == "vllm" and method != "rsd"
        if kind < 0.8 and engine == "vllm":
            sampling["seed"] = draw.randrange(1 << 31)
        sampling |= draw.choice([{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}])
    if draw.random() < 0.2:
        sampling |= draw.choice(
            [
                {"repetition_penalty": 1.1},
                {"presence_penalty": 0.4, "frequency_penalty": 0.3},
                {"logit_bias": {7: 4.0, 11: -8.0}},
            ]
        )
    if draw.random() < 0.3:
        end: list[dict[str, Any]] = [
            {"ignore_eos": True},
            {"stop": draw.sample(STOPS, 2)},
            {"stop_token_ids": [draw.randrange(2, 512) for _ in range(20)]},
            {"min_tokens": sampling["max_tokens"] // 2, "stop_token_ids": [*range(2, 400, 4)]},
        ]
        sampling |= draw.choice(end)
    if draw.random() < 0.15:
        sampling["logprobs"] = draw.randint(1, 4)
    # SGLang gives the samples of a greedy request from one prefill.
    if draw.random() < 0.08 and sampling["temperature"]:
        sampling["n"] = draw.randint(2, 3)
    return is_exact, sampling


def make_mixtures(seed: int, pool: list[Asked], operations: list[str]) -> Iterator[Mixture]:
    """Mixtures of the pool without end; the same arguments give the same ones."""
    draw = random.Random(seed + 1)
    while True:
        spread = draw.choice([0, 5, 60])
        requests = []
        for _ in range(draw.randint(1, 20)):
            asked = pool[draw.randrange(len(pool))]
            aborts = draw.random() < 0.08
            requests.append(
                Served(
                    asked.number,
                    draw.randint(0, spread),
                    draw.randint(1, 30) if aborts else None,
                    draw.random() < 0.9,
                    draw.random() < 0.5,
                )
            )
        yield Mixture(draw.choice(operations) if draw.random() < 0.1 else None, requests)


def why_wrong(asked: Asked, served: Served, expected: Given, found: Given) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    try:
        return _wrong_answer(asked, served, expected, found)
    except Exception as error:  # an answer that cannot be judged is wrong, and the soak goes on
        return f"it cannot be judged: {error!r}"


def _wrong_answer(asked: Asked, served: Served, expected: Given, found: Given) -> str | None:
    if not found.tokens:
        return "there is no answer"
    samples = asked.sampling.get("n", 1)
    if len(found.tokens) > samples or (len(found.tokens) < samples and served.abort_after is None):
        return f"there are {len(found.tokens)} samples"
    for sample in range(len(found.tokens)):
        if wrong := _wrong_sample(asked, served, expected, found, sample):
            return f"sample {sample}: {wrong}"
    return None


def _wrong_sample(
    asked: Asked, served: Served, expected: Given, found: Given, sample: int
) -> str | None:
    tokens, reason = found.tokens[sample], found.reasons[sample]
    aborted = served.abort_after is not None and reason not in ("stop", "length")
    wrong = _wrong_end(asked, tokens, reason, aborted) or _wrong_logprobs(asked, found, sample)
    if wrong or not asked.is_exact:
        return wrong
    plain = expected.tokens[sample]
    if aborted:
        # In the step after an abort SGLang looks for no stop among the tokens that are accepted.
        both = min(len(plain), len(tokens))
        return None if tokens[:both] == plain[:both] else _first_difference(plain, tokens)
    if tokens != plain:
        return _first_difference(plain, tokens)
    for name in ("reasons", "texts"):
        mine, theirs = getattr(found, name)[sample], getattr(expected, name)[sample]
        if mine != theirs:
            return f"{name}: {mine!r} instead of {theirs!r}"
    if expected.logprobs:
        pairs = zip(found.logprobs[sample], expected.logprobs[sample], strict=True)
        if not all(abs(a - b) <= LOGPROB_ERROR for a, b in pairs):
            return "its logprobs differ"
    return None


def _wrong_end(asked: Asked, tokens: list[int], reason: str | None, aborted: bool) -> str | None:
    limit = asked.sampling["max_tokens"]
    if len(tokens) > limit:
        return f"{len(tokens)} tokens are too many"
    if aborted:
        return None
    if reason not in ("stop", "length"):
        return f"it ended for the reason {reason}"
    # Prompts leave room for the most tokens, so the model's length ends no answer.
    if reason == "length" and len(tokens) != limit:
        return f"it ended for its length after {len(tokens)} tokens of {limit}"
    last = len(tokens) - 1
    stop = first_stop(asked.sampling, tokens)
    if stop is not None and (stop < last or reason == "length"):
        return f"it went on after the stop at token {stop}"
    if reason == "stop" and stop is None:
        return "it stopped without a cause"
    if stop is not None and stop < asked.sampling.get("min_tokens", 0):
        return f"it stopped after {len(tokens)} tokens, which are too few"
    if asked.grammar is not None and reason == "stop":
        try:
            structured_answers.check_form(asked.grammar, structured_answers.text_of(tokens))
        except (AssertionError, ValueError):
            return "it has not the form of its grammar"
    return None


def first_stop(sampling: dict[str, Any], tokens: list[int]) -> int | None:
    """Index of the token with which an answer must end; None if none of its tokens ends it."""
    ends = set(sampling.get("stop_token_ids", ()))
    if not sampling.get("ignore_eos"):
        ends.add(END)
    written = ""
    for index, token in enumerate(tokens):
        # Stop strings are in ASCII, which stands for itself in names.
        written += structured_answers.names().get(token, "")
        if token in ends or any(stop in written for stop in sampling.get("stop", ())):
            return index
    return None


def _wrong_logprobs(asked: Asked, found: Given, sample: int) -> str | None:
    if "logprobs" not in asked.sampling:
        return None
    if sample >= len(found.logprobs):
        return "it has no logprobs"
    given, tokens = len(found.logprobs[sample]), len(found.tokens[sample])
    return None if given == tokens else f"it has {given} logprobs of {tokens} tokens"


LOGPROB_ERROR = 1e-3
"""Forwards of other shapes round differently."""


def _first_difference(plain: list[int], tokens: list[int]) -> str:
    pairs = zip(plain, tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(tokens)))
    return f"from token {at} on it is {tokens[at:]} instead of {plain[at:]}"
