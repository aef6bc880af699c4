"""Requests to a server that speaks OpenAI's protocol: of a number of users, or at a rate."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from time import perf_counter

import httpx
import numpy as np

_TIMEOUT = 600.0
"""Seconds after which a request has failed."""


@dataclass(frozen=True)
class Load:
    """When requests are sent.

    Attributes:
        users: Closed loop: so many requests are under way, and each that ends makes room for the
            next one. None for no bound.
        rate: Open loop: mean number of requests that arrive in a second, independently of one
            another. None if all are there from the beginning.
    """

    users: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests a second"
        return f"{self.users} requests at a time"

    def as_json(self) -> dict[str, float]:
        """What is given, for a file."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Seconds from the beginning to the arrival of each of `count` requests, ascending."""
        if self.rate is None:
            return [0.0] * count
        chance = random.Random(seed)
        return list(accumulate(chance.expovariate(self.rate) for _ in range(count)))


@dataclass(frozen=True)
class Reply:
    """How a request was answered.

    Attributes:
        tokens: Tokens of the answer.
        first: Seconds to its first token.
        seconds: Seconds to its last token.
    """

    tokens: int
    first: float
    seconds: float

    @property
    def per_token(self) -> float:
        """Mean seconds of a token after the first one (TPOT)."""
        return (self.seconds - self.first) / max(1, self.tokens - 1)


@dataclass(frozen=True)
class Round:
    """Replies to some prompts, and the seconds from the first request to the last reply."""

    replies: Sequence[Reply]
    seconds: float


@dataclass(frozen=True)
class Spread:
    """Mean, median and 99th percentile of a figure, in seconds."""

    mean: float
    median: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Those of some values."""
        median, p99 = np.percentile(values, [50, 99])
        return cls(float(np.mean(values)), float(median), float(p99))


@dataclass(frozen=True)
class LoadFigures:
    """The figures of a server in some rounds.

    Attributes:
        requests: Number of requests.
        tokens: Tokens of all answers.
        tokens_per_second: Tokens of all answers by the duration of all rounds.
        by_round: The same for each round.
        first_token: Time to the first token (TTFT).
        per_token: Mean time of a request's tokens after the first one (TPOT).
        latency: Time to the last token.
    """

    requests: int
    tokens: int
    tokens_per_second: float
    by_round: tuple[float, ...]
    first_token: Spread
    per_token: Spread
    latency: Spread

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> LoadFigures:
        """The figures of these rounds."""
        replies = [reply for each in rounds for reply in each.replies]
        counts = [sum(reply.tokens for reply in each.replies) for each in rounds]
        seconds = [each.seconds for each in rounds]
        return cls(
            len(replies),
            sum(counts),
            sum(counts) / sum(seconds),
            tuple(count / taken for count, taken in zip(counts, seconds, strict=True)),
            Spread.of([reply.first for reply in replies]),
            Spread.of([reply.per_token for reply in replies]),
            Spread.of([reply.seconds for reply in replies]),
        )

    def as_json(self) -> dict[str, object]:
        """For a file."""
        return asdict(self)


def run_round(
    address: str, model: str, prompts: Sequence[str], load: Load, tokens: int, seed: int = 0
) -> Round:
    """Ask all prompts under a load.

    Args:
        address: Address of the server.
        model: Name of the model that it serves.
        prompts: One for each request, sent as the first turn of a conversation.
        load: When they are sent.
        tokens: Most tokens of an answer; greedy.
        seed: Seed of the times of arrival.

    Raises:
        httpx.HTTPError: A request fails.
        RuntimeError: An answer breaks off, with the server's message if there is one.
    """
    return asyncio.run(_round(address, model, prompts, load, tokens, seed))


async def _round(
    address: str, model: str, prompts: Sequence[str], load: Load, tokens: int, seed: int
) -> Round:
    free = asyncio.Semaphore(load.users or len(prompts))
    limits = httpx.Limits(max_connections=load.users)
    async with httpx.AsyncClient(base_url=address, timeout=_TIMEOUT, limits=limits) as client:

        async def ask(prompt: str, arrival: float) -> Reply:
            await asyncio.sleep(arrival)
            async with free:
                return await _ask(client, model, prompt, tokens)

        began = perf_counter()
        replies = await asyncio.gather(*map(ask, prompts, load.arrivals(len(prompts), seed)))
        return Round(replies, perf_counter() - began)


async def _ask(client: httpx.AsyncClient, model: str, prompt: str, tokens: int) -> Reply:
    request = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = perf_counter()
    first: float | None = None
    count: int | None = None
    async with client.stream("POST", "/v1/chat/completions", json=request) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(f"the server broke off an answer: {event['error']}")
            # The first piece of a stream has the role alone.
            if first is None and any(each["delta"].get("content") for each in event["choices"]):
                first = perf_counter() - began
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
    seconds = perf_counter() - began
    if count is None:
        raise RuntimeError("the server ended an answer without the number of its tokens")
    return Reply(count, seconds if first is None else first, seconds)
