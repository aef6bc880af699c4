"""Conversations to train on, as token ids with the answers marked.

Files are JSON or JSON lines in ShareGPT's format, `{"conversations": [{"from": "human", "value":
...}, {"from": "gpt", "value": ...}, ...]}`, or in Spec-Bench's format, `{"turns": [...]}`, which
has prompts only: the target must answer them first.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from jinja2 import TemplateError
from torch import Tensor

logger = logging.getLogger(__name__)

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
}

Messages = list[dict[str, str]]
Rendered = TypeVar("Rendered")


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

    Those with an unknown role, such as a tool's, and those with a lone surrogate, which no
    tokenizer takes, are left out with a warning.

    Raises:
        ValueError: The message names the file, the entry and what is wrong with it.
    """
    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"--data {path}: no .json or .jsonl file there")
    unknown: Counter[str] = Counter()
    broken = 0
    is_empty = True
    for file in files:
        for number, entry in enumerate(_entries(file), start=1):
            turns = _turns(entry, f"{file}, entry {number}")
            strange = next((turn["from"] for turn in turns if turn["from"] not in _ROLES), None)
            if strange is not None:
                unknown[strange] += 1
            elif messages := _messages(turns, f"{file}, entry {number}"):
                if not all(_is_text(message["content"]) for message in messages):
                    broken += 1
                    continue
                is_empty = False
                yield messages
    roles = ", ".join(f"from={role!r} ({count})" for role, count in unknown.items())
    if is_empty and broken:
        found = f", and others with unknown roles, {roles}" if unknown else ""
        raise ValueError(
            f"--data {path}: {broken} conversations with lone surrogates{found}: give whole "
            "characters, and turns from human, gpt or system"
        )
    if is_empty:
        found = f"only conversations with unknown roles, {roles}" if unknown else "no conversation"
        raise ValueError(f"--data {path}: {found}: give turns from human, gpt or system")
    if broken:
        logger.warning(
            "%d conversations in %s have lone surrogates and are left out",
            *(broken, path),
        )
    if unknown:
        logger.warning("Conversations in %s with unknown roles are left out: %s", path, roles)


def _entries(file: Path) -> Iterable[Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    try:
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{file}: expected a list of conversations")
    return entries


def _turns(entry: Any, where: str) -> list[dict[str, Any]]:
    """The turns of an entry. Each has a string as `from`."""
    if isinstance(entry, dict) and isinstance(entry.get("turns"), list):
        entry = {"conversations": [{"from": "user", "value": turn} for turn in entry["turns"]]}
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise ValueError(f'{where}: expected {{"conversations": [...]}}')
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
            raise _not_a_turn(turn, where)
    return turns


def _messages(turns: list[dict[str, Any]], where: str) -> Messages:
    messages: Messages = []
    for turn in turns:
        if not isinstance(turn.get("value"), str):
            raise _not_a_turn(turn, where)
        role = _ROLES[turn["from"]]
        # A truncated conversation may begin with an answer, whose question is missing.
        if messages or role != "assistant":
            messages.append({"role": role, "content": turn["value"]})
    return messages


def _is_text(content: str) -> bool:
    try:
        content.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _not_a_turn(turn: Any, where: str) -> ValueError:
    return ValueError(f'{where}: expected {{"from": ..., "value": ...}}, not {turn!r}')


def encode(
    messages: Messages, tokenizer: Any, max_length: int, *, generated: bool = False
) -> Sample | None:
    """Tokenise a conversation with the target's chat template.

    Answers are located by rendering the chat up to each of them.

    Args:
        messages: The conversation.
        tokenizer: The target's tokenizer.
        max_length: Number of tokens at which the conversation is truncated.
        generated: Whether the target wrote the answers. If the template then renders the last one
            otherwise than it was written, such as without its thoughts, the answer itself follows
            the prompt that it was written for, and is the only one.

    Returns:
        The sample; None if it has no token of an answer.

    Raises:
        TemplateError: The template refuses the conversation.
    """

    def render(count: int, *, prompt: bool = False) -> str:
        rendered: str = tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=prompt
        )
        return rendered

    text = render(len(messages))
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(index, prompt=True), render(index + 1)
        # The answer cannot be located if the template rewrites earlier turns.
        if text.startswith(before) and text.startswith(after):
            spans.append((len(before), len(after.rstrip())))
    if generated and messages[-1]["role"] == "assistant":
        written = messages[-1]["content"]
        before = render(len(messages) - 1, prompt=True)
        if not text.startswith(before) or written.strip() not in text[len(before) :]:
            text = before + written
            spans = [(len(before), len(text))]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = encoded["input_ids"][:max_length]
    starts = [start for start, _ in encoded["offset_mapping"][:max_length]]
    answer = [any(first <= start < last for first, last in spans) for start in starts]
    if not any(answer):
        return None
    return Sample(torch.tensor(tokens, dtype=torch.int32), torch.tensor(answer))


def rewrites_answers(tokenizer: Any) -> bool:
    """Whether the chat template renders answers so that `encode` does not find them."""
    chat = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
    return encode(chat, tokenizer, sys.maxsize) is None


def render_all(
    chats: Iterable[Messages], render: Callable[[Messages], Rendered], source: str
) -> list[Rendered]:
    """What `render` makes of the chats that the target's chat template does not refuse.

    Args:
        chats: The conversations.
        render: Renders one; may raise `TemplateError`.
        source: Where the conversations come from, for the message.

    Raises:
        ValueError: The template refuses all of them.
    """
    rendered, refusals = [], []
    for chat in chats:
        try:
            rendered.append(render(chat))
        except TemplateError as error:
            refusals.append(str(error))
    if refusals and not rendered:
        raise ValueError(
            f"{source}: the target's chat template refuses all conversations ({refusals[0]}): give "
            "conversations that it accepts"
        )
    if refusals:
        logger.warning(
            "%s: the target's chat template refuses %d conversations, which are left out (%s)",
            *(source, len(refusals), refusals[0]),
        )
    return rendered


def token_counts(samples: Iterable[Sample], vocab_size: int) -> Tensor:
    """Count of each token, `float64 [V]`, less a fraction that breaks ties by lowest id."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for sample in samples:
        counts += torch.bincount(sample.tokens.long(), minlength=vocab_size)
    return counts - torch.arange(vocab_size, dtype=torch.float64) / (2 * vocab_size)
