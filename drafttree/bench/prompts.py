"""Prompts in Spec-Bench's format: one JSON object per line, each a chat of one or more turns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from drafttree.bench.errors import InputError


@dataclass(frozen=True)
class Prompt:
    """A chat.

    Attributes:
        question_id: Identifier of the prompt.
        category: Kind of task.
        turns: The user's turns, answered one after another.
        schema: JSON schema that every answer follows, as JSON; None for free answers.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    schema: str | None = None


def default_prompts_path() -> Path:
    """The prompts that ship with the package."""
    return Path(str(files("drafttree.bench") / "prompts.jsonl"))


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file.

    Raises:
        InputError: The file cannot be read, or a line is not a prompt.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the prompts in {path}: {error}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if line.strip():
            prompts.append(_parse(line, f"{path}, line {number}"))
    if not prompts:
        raise InputError(f"no prompts in {path}")
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected a JSON object")
    missing = [key for key in ("question_id", "category", "turns") if key not in entry]
    if missing:
        raise InputError(f"{where}: missing {', '.join(missing)}")
    question_id, category, turns = entry["question_id"], entry["category"], entry["turns"]
    if not isinstance(question_id, int | str):
        raise InputError(f"{where}: question_id must be a number or a string")
    if not isinstance(category, str):
        raise InputError(f"{where}: category must be a string")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise InputError(f"{where}: turns must be a non-empty list of strings")
    schema = entry.get("schema")
    if schema is not None and not isinstance(schema, dict):
        raise InputError(f"{where}: schema must be a JSON schema, which is a JSON object")
    bound = None if schema is None else json.dumps(schema)
    return Prompt(question_id, category, tuple(turns), bound)
