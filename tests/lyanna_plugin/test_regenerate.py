"""The target's answers, as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_chat_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from lyanna_plugin.training.dataset import Messages
from lyanna_plugin.training.regenerate import _transformers

CHATS: list[Messages] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": "What comes after one, two and three?"}],
]
TOKENS = 12


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_tiny_chat_llama(tmp_path / "target")


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def greedy(target: Path, chat: Messages) -> str:
    """The answer without a cache, a padding or any of the functions of generation."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    tokens = list(prompt["input_ids"])
    start = len(tokens)
    with torch.inference_mode():
        for _ in range(TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    text: str = tokenizer.decode(tokens[start:], skip_special_tokens=True)
    return text


def test_answers_are_greedy_whatever_the_target_is_configured_to_do(target: Path) -> None:
    expected = [greedy(target, chat) for chat in CHATS]
    change(target / "generation_config.json", repetition_penalty=5.0, no_repeat_ngram_size=1)
    with _transformers(target, 2048) as answer:
        assert [answer([chat], TOKENS)[0] for chat in CHATS] == expected


def test_answers_of_a_target_without_a_padding_token(target: Path) -> None:
    with _transformers(target, 2048) as answer:
        expected = answer(CHATS, TOKENS)
    change(target / "tokenizer_config.json", pad_token=None)
    assert AutoTokenizer.from_pretrained(target).pad_token is None
    with _transformers(target, 2048) as answer:
        assert answer(CHATS, TOKENS) == expected
