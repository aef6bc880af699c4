"""Conversations: the formats, the tokens of answers, and the turns that the target answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drafttree.bench.models import ensure
from lyanna_plugin.training import regenerate as regeneration
from lyanna_plugin.training.dataset import Messages, encode, read_conversations
from lyanna_plugin.training.regenerate import Answerer, _answered, regenerate

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


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "is not JSON"),
        ('{"conversations": []}', "expected a list"),
        ('[{"text": "Hi"}]', "entry 1: expected"),
        ('[{"conversations": [{"from": "cat", "value": "Meow"}]}]', "from='cat' is not known"),
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


def test_answers_are_kept_for_the_same_target_and_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shorter context may truncate an answer, so its answers are written again."""
    contexts = []

    def make(target: Path, context: int) -> Answerer:
        contexts.append(context)
        return lambda chats, max_tokens: [f"{max_tokens} of {context}"] * len(chats)

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
