"""Calls of a tool and JSON objects over OpenAI's API."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageToolCall

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Lisbon", "Oslo", "Rome", "Riga"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
    },
}


def called_arguments(client: OpenAI, max_tokens: int, extra: dict[str, Any]) -> str:
    """The arguments with which a model calls the tool, the same whole and streamed.

    Args:
        client: A client of the server.
        max_tokens: Most tokens of an answer.
        extra: Further keys of the request.
    """
    request: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "The weather in Oslo for three days, please."}],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0,
        "max_tokens": max_tokens,
        "extra_body": extra,
    }
    answer = client.chat.completions.create(**request)
    assert answer.choices[0].message.tool_calls, answer
    (called,) = answer.choices[0].message.tool_calls
    assert isinstance(called, ChatCompletionMessageToolCall)
    assert called.function.name == "get_weather"
    assert json.loads(called.function.arguments).keys() == {"city", "unit", "days"}
    pieces = [
        call.function.arguments or ""
        for piece in client.chat.completions.create(**request, stream=True)
        for choice in piece.choices
        for call in choice.delta.tool_calls or ()
        if call.function is not None
    ]
    assert json.loads("".join(pieces)) == json.loads(called.function.arguments)
    return called.function.arguments


def object_answer(client: OpenAI, max_tokens: int, extra: dict[str, Any]) -> str:
    """A model's answer to a request for any JSON object, the same whole and streamed.

    Args:
        client: A client of the server.
        max_tokens: Most tokens of the answer, which must end before.
        extra: Further keys of the request.
    """
    question = 'Answer in JSON, like {"name": "Rome", "country": "Italy"}: where is Oslo?'
    request: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": question}],
        "response_format": {"type": "json_object"},
        "temperature": 0,
        "max_tokens": max_tokens,
        "extra_body": extra,
    }
    (choice,) = client.chat.completions.create(**request).choices
    assert choice.finish_reason == "stop", choice
    answer = choice.message.content
    assert answer is not None
    assert isinstance(json.loads(answer), dict)
    pieces = [
        each.delta.content or ""
        for piece in client.chat.completions.create(**request, stream=True)
        for each in piece.choices
    ]
    assert "".join(pieces) == answer
    return answer
