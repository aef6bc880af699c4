"""Chats of many clients of OpenAI's API, read as their users read them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import APITimeoutError, AsyncOpenAI

TOKENS = 40
BEST = 3
"""Number of the most likely tokens to report at each position."""

QUESTIONS = [
    "Count from one to twelve in words.",
    "List the days of the week, twice.",
    "What is the capital of France, and what is it known for?",
    "Repeat the word apple ten times.",
    "Write a Python function that adds two numbers, and one that subtracts them.",
    "Name five animals that live in the sea.",
    "Translate into Spanish: good morning, my friend.",
    "Write the numbers from 20 to 40, with commas.",
]


@dataclass
class Reply:
    """One sample of an answer.

    Attributes:
        text: What was said.
        reason: Why it ended.
        logprobs: The logprob of each token.
        best: The logprobs of the most likely tokens at each position, in descending order.
    """

    text: str = ""
    reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    best: list[list[float]] = field(default_factory=list)

    def add(self, text: str | None, reason: str | None, logprobs: Any) -> None:
        """Add a piece of the answer, or all of it."""
        self.text += text or ""
        self.reason = self.reason or reason
        for each in (logprobs and logprobs.content) or ():
            self.logprobs.append(each.logprob)
            self.best.append(best_of(top.logprob for top in each.top_logprobs))


def best_of(logprobs: Iterable[float]) -> list[float]:
    """The largest logprobs in descending order, as many as are compared."""
    return sorted(logprobs, reverse=True)[:BEST]


def check_equal(found: list[list[Reply]], expected: list[list[Reply]]) -> None:
    """Check that answers, by request and sample, are the expected ones; logprobs to 1e-3."""
    for mine, theirs in zip(found, expected, strict=True):
        assert [each.text for each in mine] == [each.text for each in theirs]
        assert [each.reason for each in mine] == [each.reason for each in theirs]
        for reply, plain in zip(mine, theirs, strict=True):
            assert reply.logprobs == pytest.approx(plain.logprobs, abs=1e-3)
            for best, plainly in zip(reply.best, plain.best, strict=True):
                assert best == pytest.approx(plainly, abs=1e-3)


def ask_at_once(address: str, **more: Any) -> list[list[Reply]]:
    """Ask all questions at once, greedily and with logprobs; every second answer is streamed.

    Args:
        address: The server's address.
        more: Further settings of each request.

    Returns:
        The samples of each answer.
    """
    return asyncio.run(_ask_at_once(address, more))


async def _ask_at_once(address: str, more: dict[str, Any]) -> list[list[Reply]]:
    settings = {"temperature": 0, "max_tokens": TOKENS, "logprobs": True, "top_logprobs": BEST}
    requests = [request_of(question) | settings | more for question in QUESTIONS]
    async with _client(address) as client:
        answers = [
            (_streamed if row % 2 else _whole)(client, request)
            for row, request in enumerate(requests)
        ]
        return [*await asyncio.gather(*answers)]


def request_of(question: str) -> dict[str, Any]:
    """A request with one question."""
    return {"model": "smollm2", "messages": [{"role": "user", "content": question}]}


def chat_prompts(tokenizer: Any) -> list[list[int]]:
    """The prompts that a server makes of the questions, as token ids."""
    return [
        tokenizer.apply_chat_template(
            request_of(question)["messages"],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )["input_ids"]
        for question in QUESTIONS
    ]


def _client(address: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=300)


async def _whole(client: AsyncOpenAI, request: dict[str, Any]) -> list[Reply]:
    answer = await client.chat.completions.create(**request)
    replies = [Reply() for _ in answer.choices]
    for choice in answer.choices:
        replies[choice.index].add(choice.message.content, choice.finish_reason, choice.logprobs)
    _check_usage(answer.usage, replies)
    return replies


async def _streamed(client: AsyncOpenAI, request: dict[str, Any]) -> list[Reply]:
    replies = [Reply() for _ in range(request.get("n", 1))]
    usage = None
    pieces = 0
    async for piece in await client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    ):
        usage = piece.usage or usage
        pieces += len(piece.choices)
        for choice in piece.choices:
            replies[choice.index].add(choice.delta.content, choice.finish_reason, choice.logprobs)
    assert pieces > 2 * len(replies)
    _check_usage(usage, replies)
    return replies


def _check_usage(usage: Any, replies: list[Reply]) -> None:
    assert usage.completion_tokens == sum(len(reply.logprobs) for reply in replies)


HUNG_UP_AFTER = [0, 1, 2, 3, 5, 8]
"""Pieces of the streams that `hang_up` reads."""

LONG = 900
"""Tokens of answers whose clients hang up."""


def hang_up(address: str) -> int:
    """Leave long answers: close streams after some pieces or none, and give up one whole answer.

    Returns:
        The number of requests.
    """
    return asyncio.run(_hang_up(address))


async def _hang_up(address: str) -> int:
    settings = {"temperature": 0, "max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    requests = [request_of(question) | settings for question in QUESTIONS]
    async with _client(address) as client:
        left = [_leave(client, requests[row], pieces) for row, pieces in enumerate(HUNG_UP_AFTER)]
        await asyncio.gather(*left, _give_up(client, requests[-1]))
    return len(HUNG_UP_AFTER) + 1


async def _leave(client: AsyncOpenAI, request: dict[str, Any], pieces: int) -> None:
    """Close a stream after some pieces; one of no pieces may wait for the others to end."""
    patience = client.with_options(timeout=None if pieces else 2)
    try:
        stream = await patience.chat.completions.create(**request, stream=True)
    except APITimeoutError:
        assert not pieces
        return
    async with stream:
        for _ in range(pieces):
            await anext(stream)


async def _give_up(client: AsyncOpenAI, request: dict[str, Any]) -> None:
    with pytest.raises(APITimeoutError):
        await client.with_options(timeout=2).chat.completions.create(**request)
