"""The workloads of the replay: chats, each a list of requests with their answers, in waves.

`prompts` are the chats of a file in Spec-Bench's format, answered by the target itself. `reworded`
are the same chats and then, as a second wave, their near-duplicates. `edit` and `agent` come from a
file of tasks with true answers, which need not be the target's: `{"edit": [[request, answer]],
"agent": [[[role, content]]]}`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from drafttree.bench.chat import Chat
from drafttree.bench.context import model_context
from drafttree.bench.prompts import Prompt, load_prompts
from scripts.experiments.token_recycling.known_target import KnownTarget
from scripts.experiments.token_recycling.replay import Text

Kind = Literal["prompts", "reworded", "edit", "agent"]
KINDS: tuple[Kind, ...] = ("prompts", "reworded", "edit", "agent")

_NEW_WORDS = {
    "Create a Python script for this problem:": "Please write a short program in Python for this:",
    "Write a python function to": "Your task is a function that is able to",
    "Write a function to": "Your task is a function that is able to",
    " find ": " determine ",
    " given ": " provided ",
    " check ": " test ",
    " whether ": " if ",
}
_CLOSING = "Give the whole program and explain it briefly."


@dataclass(frozen=True)
class Conversation:
    """A chat, whose requests follow one another.

    Attributes:
        category: Kind of task.
        texts: The requests with their answers.
    """

    category: str
    texts: list[Text]


Wave = list[Conversation]


def reworded(turn: str) -> str:
    """The same request in other words: the opening, some verbs, and a sentence at the end."""
    for old, new in _NEW_WORDS.items():
        turn = turn.replace(old, new)
    return f"{turn.rstrip()}\n{_CLOSING}"


def load_waves(
    kind: Kind,
    file: Path,
    limit: int,
    waves: int,
    model: Path,
    target: KnownTarget,
    most: int,
) -> list[Wave]:
    """The waves of a workload; each has the same number of chats.

    Args:
        kind: The workload.
        file: The prompts, or the tasks of `edit` and `agent`.
        limit: Greatest number of chats of a wave.
        waves: How often the chats are replayed; `reworded` chats have one wave more than that.
        model: Folder of the target.
        target: The target, which answers prompts.
        most: Greatest number of tokens of the target's own answers.
    """
    if kind in ("prompts", "reworded"):
        prompts = load_prompts(file, limit)
        chats = _answered(prompts, model, target, most)
        found = [chats] * waves
        if kind == "reworded":
            near = [replace(prompt, turns=tuple(map(reworded, prompt.turns))) for prompt in prompts]
            found.append(_answered(near, model, target, most))
        return found
    tasks = json.loads(file.read_text(encoding="utf-8"))[kind][:limit]
    make = _edits if kind == "edit" else _agents
    return [make(tasks, model, target)] * waves


def _answered(prompts: Sequence[Prompt], model: Path, target: KnownTarget, most: int) -> Wave:
    """Chats of prompts whose turns the target answers greedily."""
    chat, context = Chat(model), model_context(model)
    found: Wave = []
    for number, prompt in enumerate(prompts):
        texts: list[Text] = []
        for turn in range(len(prompt.turns)):
            # As in `drafttree bench`, a chat that is too long for the context loses its beginning.
            answers = [chat.decode(text.answer) for text in texts]
            tokens = chat.render(prompt.turns[: turn + 1], answers)[-(context - most) :]
            known = target.begin(tokens)
            target.finish(known)
            texts.append(Text(number, tokens, known.answer, given=False))
        found.append(Conversation(prompt.category, texts))
    return found


def _edits(tasks: list[list[str]], model: Path, target: KnownTarget) -> Wave:
    """Chats of one request to change a text, with the changed text as its answer."""
    chat, tokenizer = Chat(model), _tokenizer(model)
    found: Wave = []
    for number, (request, answer) in enumerate(tasks):
        tokens = [*tokenizer.encode(answer, add_special_tokens=False), min(target.ends)]
        texts = [Text(number, chat.render([request], []), tokens, given=True)]
        found.append(Conversation("edit", texts))
    return found


def _agents(tasks: list[list[list[str]]], model: Path, target: KnownTarget) -> Wave:
    """Conversations with tools in ChatML. Each of the assistant's messages is a request whose
    prompt is everything before."""
    tokenizer = _tokenizer(model)

    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]

    found: Wave = []
    for number, messages in enumerate(tasks):
        before, texts = "", []
        for role, content in messages:
            if role == "assistant":
                prompt = encode(f"{before}<|im_start|>assistant\n")
                answer = encode(f"{content}<|im_end|>")
                texts.append(Text(number, prompt, answer, given=True))
            before += f"<|im_start|>{role}\n{content}<|im_end|>\n"
        found.append(Conversation("agent", texts))
    return found


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model), local_files_only=True)
