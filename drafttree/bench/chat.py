"""Converts chats to token ids and back with the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafttree.bench.errors import InputError


class Chat:
    """The chat format of a model."""

    def __init__(self, model: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise InputError("no engine is installed: see `drafttree doctor`") from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        except Exception as error:
            raise InputError(f"cannot load the tokenizer in {model}: {error}") from error

    def render(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        """Token ids of a prompt: `turns`, and the answers to all turns but the last."""
        messages: list[dict[str, str]] = []
        for index, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            if index < len(answers):
                messages.append({"role": "assistant", "content": answers[index]})
        if self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
            ids = self._tokenizer.encode(f"{text}\nassistant:")
        return [int(token) for token in ids]

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text of tokens, decoded together.

        Args:
            token_ids: The tokens.
            special: Whether special tokens are in the text, by their names.
        """
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not special))
