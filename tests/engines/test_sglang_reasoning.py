"""A reasoning model in SGLang's server: its thoughts are free, its answer is bound to a grammar,
and both are drafted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sglang_server import counters_of, serving
from structured_answers import PATTERN, SCHEMA, check_form
from tiny_models import add_byte_tokenizer, make_tiny_llama

pytestmark = pytest.mark.full

THINK, END_OF_THINKING = 258, 259
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}<think>"
QUESTIONS = ["Where is it?", "How many days?", "Which one is it, and why?", "Say it.", "green", "?"]
BIASES = (2.0, 4.0, 6.0)
"""What is added to the logit of the token that ends the thoughts: they end later or sooner."""
FORMS: dict[str, dict[str, Any]] = {
    "a regex": {"regex": PATTERN},
    "a schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA},
        }
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("reasoning")
    model = add_byte_tokenizer(
        make_tiny_llama(folder, sharpness=3.0),
        special={THINK: "<think>", END_OF_THINKING: "</think>"},
    )
    (model / "chat_template.jinja").write_text(TEMPLATE)
    arguments = (
        *("--served-model-name", "tiny", "--reasoning-parser", "deepseek-r1"),
        *("--grammar-backend", "xgrammar", "--constrained-json-disable-any-whitespace"),
    )
    options = {"nodes": 15, "prime": False}
    with serving(model, options, tmp_path_factory.mktemp("log"), *arguments) as address:
        yield address


def ask(server: str, question: str, bias: float, max_tokens: int, **more: Any) -> tuple[str, str]:
    """The greedy answer to a question: the thoughts, and what follows them.

    Args:
        server: The server's address.
        question: The question.
        bias: What is added to the logit of the token that ends the thoughts.
        max_tokens: Most tokens of both together.
        more: Further keys of the request.
    """
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "logit_bias": {str(END_OF_THINKING): bias},
        # The tokenizer's mark for the end of the thoughts is special, and the parser reads it.
        "skip_special_tokens": False,
        **more,
    }
    answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=120).json()
    message = answer["choices"][0]["message"]
    return message["reasoning_content"] or "", (message["content"] or "").removesuffix("</s>")


def accepted(server: str) -> int:
    return counters_of(server)["accepted_tokens"]


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_without_drafts(form: str, server: str) -> None:
    """The thoughts end wherever the model ends them, also within a tree."""

    def answers(*, drafted: bool) -> list[tuple[str, str]]:
        switch = {"custom_params": {"drafttree": drafted}}
        return [
            ask(server, question, bias, 160, **FORMS[form], **switch)
            for bias in BIASES
            for question in QUESTIONS
        ]

    before = accepted(server)
    plain = answers(drafted=False)
    assert accepted(server) == before
    for _ in range(2):
        assert answers(drafted=True) == plain
    assert accepted(server) > before
    ended = [(thoughts, answer) for thoughts, answer in plain if answer]
    assert len({thoughts for thoughts, _ in ended}) > 1
    for _, answer in ended:
        check_form(form, answer)


def test_thoughts_and_answers_are_both_drafted(server: str) -> None:
    form = FORMS["a schema"]
    before = accepted(server)
    for _ in range(2):
        thoughts, answer = ask(server, QUESTIONS[0], -100.0, 60, **form)
        assert thoughts
        assert not answer
    thinking = accepted(server)
    assert thinking > before
    thoughts, answer = ask(server, QUESTIONS[0], 100.0, 90, **form)
    assert not thoughts
    check_form("a schema", answer)
    assert accepted(server) > thinking
