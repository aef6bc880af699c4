"""Makes the requests of a chat."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from drafttree.bench.chat import Chat
from drafttree.bench.prompts import Prompt
from drafttree.bench.protocol import Request


def make_request(
    chat: Chat,
    prompt: Prompt,
    turn: int,
    answers: Sequence[str],
    *,
    context: int,
    max_new_tokens: int,
    temperature: float,
) -> tuple[Request, bool]:
    """The request of one turn; a chat that is too long is cut at its start.

    Args:
        chat: The chat format of the model.
        prompt: The chat.
        turn: Which of its turns, counted from 0.
        answers: The answers to the turns before.
        context: The context in tokens.
        max_new_tokens: Greatest number of tokens of the answer.
        temperature: Sampling temperature; a request that is sampled has a seed of its own.

    Returns:
        The request, and whether the chat was cut.
    """
    token_ids = chat.render(prompt.turns[: turn + 1], answers)
    room = context - max_new_tokens
    seed = None
    if temperature > 0:
        seed = zlib.crc32(f"{prompt.question_id}/{turn}".encode())
    request = Request(token_ids[-room:], max_new_tokens, temperature, seed, prompt.schema)
    return request, len(token_ids) > room
