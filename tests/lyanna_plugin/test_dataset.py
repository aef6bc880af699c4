"""Conversations: the formats, the tokens of answers, and the turns that the target answers."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import STRICT, WITHOUT_THOUGHTS
from jinja2 import TemplateError

from drafttree.bench.models import ensure
from lyanna_plugin.training import regenerate as regeneration
from lyanna_plugin.training.dataset import (
    Messages,
    encode,
    read_conversations,
    render_all,
    rewrites_answers,
)
from lyanna_plugin.training.regenerate import (
    Answerer,
    _answered,
    regenerate,
    renderable,
    whole_lines,
)

CHAT = [
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": "Hello there!"},
    {"role": "user", "content": "And in French?"},
    {"role": "assistant", "content": "Bonjour."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ensure("smollm2-135m"))


@pytest.fixture
def with_template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The tokenizer with another chat template."""

    def changed(template: str) -> Any:
        monkeypatch.setattr(tokenizer, "chat_template", template)
        return tokenizer

    return changed


def test_answers_are_marked_with_their_end(tokenizer: Any) -> None:
    sample = encode(CHAT, tokenizer, 1024)
    assert sample is not None
    end = tokenizer.eos_token
    answers = tokenizer.decode(sample.tokens[sample.answer])
    assert answers == f"Hello there!{end}Bonjour.{end}"
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(sample.tokens) == whole


def test_a_chat_truncated_before_its_answer_is_left_out(tokenizer: Any) -> None:
    long = [{"role": "user", "content": "word " * 200}, CHAT[1]]
    assert encode(long, tokenizer, 100) is None
    assert encode(CHAT[:1], tokenizer, 100) is None


def test_an_answer_that_the_template_rewrites_follows_the_prompt_it_was_written_for(
    with_template: Callable[[str], Any],
) -> None:
    tokenizer = with_template(WITHOUT_THOUGHTS)
    thoughts = "Greet them.</think>Hello there!"
    chat = [*CHAT[:3], {"role": "assistant", "content": thoughts}]
    assert rewrites_answers(tokenizer)
    assert encode(chat, tokenizer, 1024) is None
    sample = encode(chat, tokenizer, 1024, generated=True)
    assert sample is not None
    before = "[user]Say hello.[assistant]Hello there![user]And in French?[assistant]<think>"
    assert tokenizer.decode(sample.tokens) == before + thoughts
    assert tokenizer.decode(sample.tokens[sample.answer]) == thoughts


@pytest.mark.parametrize("start", ["", "<think>"])
def test_thoughts_are_part_of_an_answer(with_template: Callable[[str], Any], start: str) -> None:
    """Also where the prompt does not begin them, so that the answer without them is found."""
    tokenizer = with_template(WITHOUT_THOUGHTS.replace("<think>", start))
    thoughts = "Greet them.</think>Hello there!"
    sample = encode(
        [CHAT[0], {"role": "assistant", "content": thoughts}], tokenizer, 1024, generated=True
    )
    assert sample is not None
    assert tokenizer.decode(sample.tokens[sample.answer]) == thoughts


def test_generated_answers_are_marked_like_others(tokenizer: Any) -> None:
    assert not rewrites_answers(tokenizer)
    given, generated = (encode(CHAT, tokenizer, 1024, generated=of) for of in (False, True))
    assert given is not None
    assert generated is not None
    assert torch.equal(given.tokens, generated.tokens)
    assert torch.equal(given.answer, generated.answer)


def test_conversations_that_the_template_refuses_are_left_out(
    with_template: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    render = partial(renderable, with_template(STRICT))
    twice = [CHAT[0], CHAT[0]]
    late = [*CHAT[:2], {"role": "system", "content": "Be brief."}, CHAT[2]]
    # Two questions in turn are answered in turn.
    assert render_all([CHAT, late, twice], render, "--data x") == [CHAT, twice]
    assert "refuses 1 conversations, which are left out (roles must alternate)" in caplog.text
    with pytest.raises(ValueError, match=r"--data x: .* refuses all .*roles must alternate"):
        render_all([late, late], render, "--data x")
    with pytest.raises(TemplateError, match="roles must alternate"):
        encode(twice, with_template(STRICT), 1024)


def test_sharegpt_and_spec_bench_are_read(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    (tmp_path / "a.json").write_text(json.dumps([{"id": 1, "conversations": said}]))
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"question_id": 1, "turns": ["One", "Two"]}) + "\n"
    )
    assert list(read_conversations(tmp_path)) == [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        [{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}],
    ]


@pytest.mark.parametrize("role", ["gpt", "assistant", "chatgpt", "bing", "bard", "model"])
def test_roles_of_answers(tmp_path: Path, role: str) -> None:
    file = tmp_path / "data.json"
    said = [{"from": "user", "value": "Hi"}, {"from": role, "value": "Hello"}]
    file.write_text(json.dumps([{"conversations": said}]))
    ((_, answer),) = read_conversations(file)
    assert answer == {"role": "assistant", "content": "Hello"}


def test_empty_conversations_and_unknown_roles_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "data.json"
    asked = {"from": "human", "value": "Hi"}
    tool = {"from": "tool", "value": {"result": 3}}
    chats: list[list[dict[str, Any]]] = [[asked], [], [asked, tool], [tool], [asked]]
    file.write_text(json.dumps([{"conversations": chat} for chat in chats]))
    assert list(read_conversations(file)) == [[{"role": "user", "content": "Hi"}]] * 2
    assert "from='tool' (2)" in caplog.text


def test_conversations_with_lone_surrogates_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "data.json"
    asked = {"from": "human", "value": "Hi"}
    chats = [[asked], [asked, {"from": "gpt", "value": "\ud83d"}], [{**asked, "value": "a\udc80"}]]
    file.write_text(json.dumps([{"conversations": chat} for chat in chats]))
    assert list(read_conversations(file)) == [[{"role": "user", "content": "Hi"}]]
    assert f"2 conversations in {file} have lone surrogates" in caplog.text
    file.write_text(json.dumps([{"conversations": chat} for chat in chats[1:]]))
    with pytest.raises(ValueError, match=f"--data {file}: 2 conversations with lone surrogates: "):
        list(read_conversations(file))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "is not JSON"),
        ('{"conversations": []}', "expected a list"),
        ('[{"text": "Hi"}]', "entry 1: expected"),
        ("[]", "no conversation: give turns"),
        ('[{"conversations": []}]', "no conversation: give turns"),
        (
            '[{"conversations": [{"from": "cat", "value": "Meow"}]}]',
            "unknown roles, from='cat'",
        ),
        ('[{"conversations": [{"from": ["human"], "value": "Hi"}]}]', "entry 1: expected"),
        ('[{"conversations": [{"from": "human", "value": 3}]}]', "entry 1: expected"),
    ],
)
def test_wrong_data(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "data.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        list(read_conversations(file))


def test_every_user_turn_gets_a_new_answer_in_its_place() -> None:
    asked: list[Messages] = []

    def answerer(chats: Sequence[Messages], max_tokens: int) -> list[str]:
        asked.extend([*chat] for chat in chats)
        return [f"answer to {chat[-1]['content']}" for chat in chats]

    alone = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    first, second = _answered([CHAT, alone], answerer, 10)
    assert [message["content"] for message in first] == [
        *("Say hello.", "answer to Say hello.", "And in French?", "answer to And in French?")
    ]
    assert [message["content"] for message in second] == ["Be brief.", "Why?", "answer to Why?"]
    assert [len(chat) for chat in asked] == [1, 2, 3]


def test_system_turns_after_the_last_question_are_left_out(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation without a question has no turn left, and is left out when it is read."""

    @contextmanager
    def make(target: Path, context: int) -> Iterator[Answerer]:
        def answer(chats: Sequence[Messages], max_tokens: int) -> list[str]:
            assert chats
            return ["Because."] * len(chats)

        yield answer

    monkeypatch.setattr(regeneration, "_vllm", make)
    monkeypatch.setattr(regeneration, "_transformers", make)
    system, question = {"role": "system", "content": "Be brief."}, CHAT[0]
    chats = [[system], [system, question, CHAT[1], system], [question]]
    # None of them is refused, alone or beside others.
    assert [renderable(tokenizer, chat) for chat in chats] == chats
    answer = {"role": "assistant", "content": "Because."}
    expected = [[system, question, answer], [question, answer]]
    for given, found in ((chats, expected), (chats[:2], expected[:1])):
        file = regenerate(given, Path("a"), 5, 40, tmp_path, lambda done: None)
        assert list(read_conversations(file)) == found
        done: list[int] = []
        regenerate(given, Path("a"), 5, 40, tmp_path, done.append)
        assert done == [len(given)]


def test_answers_outlive_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that the disk had no room for is removed without writing the others again."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "answers.jsonl"
    file.write_bytes(b'{"one": 1}\n{"two": 2}\n{"thr')
    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert whole_lines(file) == 2
    assert file.read_bytes() == b'{"one": 1}\n{"two": 2}\n'
    assert whole_lines(file) == 2


def test_answers_are_kept_for_the_same_target_and_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shorter context may truncate an answer, so its answers are written again."""
    contexts = []

    @contextmanager
    def make(target: Path, context: int) -> Iterator[Answerer]:
        contexts.append(context)
        yield lambda chats, max_tokens: [f"{max_tokens} of {context}"] * len(chats)

    monkeypatch.setattr(regeneration, "_vllm", make)
    monkeypatch.setattr(regeneration, "_transformers", make)

    def answers(target: str, max_tokens: int, context: int) -> set[str]:
        file = regenerate([CHAT], Path(target), max_tokens, context, tmp_path, lambda done: None)
        (chat,) = read_conversations(file)
        return {message["content"] for message in chat if message["role"] == "assistant"}

    assert answers("a", 5, 40) == {"5 of 40"}
    assert answers("a", 5, 30) == {"5 of 30"}
    assert answers("a", 6, 40) == {"6 of 40"}
    assert contexts == [40, 30, 40]
    assert answers("a", 5, 40) == {"5 of 40"}
    assert contexts == [40, 30, 40]
    answers("b", 5, 40)
    assert contexts == [40, 30, 40, 40]
