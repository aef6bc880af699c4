"""Conversations to train on, as token ids with the answers marked.

Files are JSON or JSON lines in ShareGPT's format, `{"conversations": [{"from": "human", "value":
...}, {"from": "gpt", "value": ...}, ...]}`, or in Spec-Bench's format, `{"turns": [...]}`, which
has prompts only: the target must answer them first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ROLES = {
    **{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    "system": "system",
}

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sample:
    """One conversation.

    Attributes:
        tokens: `int32 [T]`, the whole conversation.
        answer: `bool [T]`, whether each token belongs to an answer.
    """

    tokens: Tensor
    answer: Tensor


def read_conversations(path: Path) -> Iterator[Messages]:
    """The conversations of a file, or of all `.json` and `.jsonl` files of a folder.

    Raises:
        ValueError: The message names the file, the entry and what is wrong with it.
    """
    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"--data {path}: no .json or .jsonl file there")
    for file in files:
        for number, entry in enumerate(_entries(file), start=1):
            if messages := _messages(entry, f"{file}, entry {number}"):
                yield messages


def _entries(file: Path) -> Iterable[Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    try:
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{file}: expected a list of conversations")
    return entries


def _messages(entry: Any, where: str) -> Messages:
    if isinstance(entry, dict) and isinstance(entry.get("turns"), list):
        entry = {"conversations": [{"from": "user", "value": turn} for turn in entry["turns"]]}
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not turns:
        raise ValueError(f'{where}: expected {{"conversations": [...]}}')
    messages: Messages = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ValueError(f'{where}: expected {{"from": ..., "value": ...}}, not {turn!r}')
        if turn.get("from") not in _ROLES:
            raise ValueError(
                f"{where}: from={turn.get('from')!r} is not known: use human, gpt or system"
            )
        # A truncated conversation may begin with an answer, whose question is missing.
        if messages or _ROLES[turn["from"]] != "assistant":
            messages.append({"role": _ROLES[turn["from"]], "content": turn["value"]})
    return messages


def encode(messages: Messages, tokenizer: Any, max_length: int) -> Sample | None:
    """Tokenise a conversation with the target's chat template.

    Answers are located by rendering the chat up to each of them.

    Args:
        messages: The conversation.
        tokenizer: The target's tokenizer.
        max_length: Number of tokens at which the conversation is truncated.

    Returns:
        The sample; None if it has no token of an answer.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(
            messages[:index], tokenize=False, add_generation_prompt=True
        )
        after = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
        # The answer cannot be located if the template rewrites earlier turns.
        if text.startswith(before) and text.startswith(after):
            spans.append((len(before), len(after.rstrip())))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = encoded["input_ids"][:max_length]
    starts = [start for start, _ in encoded["offset_mapping"][:max_length]]
    answer = [any(first <= start < last for first, last in spans) for start in starts]
    if not any(answer):
        return None
    return Sample(torch.tensor(tokens, dtype=torch.int32), torch.tensor(answer))


def token_counts(samples: Iterable[Sample], vocab_size: int) -> Tensor:
    """Count of each token, `float64 [V]`, less a fraction that breaks ties by lowest id."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for sample in samples:
        counts += torch.bincount(sample.tokens.long(), minlength=vocab_size)
    return counts - torch.arange(vocab_size, dtype=torch.float64) / (2 * vocab_size)
