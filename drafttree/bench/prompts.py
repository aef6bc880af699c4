"""Prompts in Spec-Bench's and SPEED-Bench's formats: objects that each hold a chat's user turns.

Spec-Bench's files (arXiv 2401.07851) are JSON lines with `question_id`, `category` and `turns`.
SPEED-Bench (arXiv 2604.09557, `nvidia/SPEED-Bench` on the Hugging Face hub) has the same fields in
Parquet files, besides `sub_category`, `source`, `src_id`, `difficulty` and `multiturn`, which are
not needed here. Most of its turns are placeholders there. Its script `prepare.py` (in
NVIDIA-NeMo/Skills, `nemo_skills/dataset/speed-bench`) fills them in and writes JSON lines that have
`messages`, each with `role` and `content`, in place of `turns`; vLLM's `--dataset-name speed_bench`
reads those.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from drafttree.bench.errors import InputError

_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""How a turn begins that SPEED-Bench does not distribute itself."""


@dataclass(frozen=True)
class Prompt:
    """A chat.

    Attributes:
        question_id: Identifier of the prompt.
        category: Kind of task.
        turns: The user's turns, answered one after another.
        schema: JSON schema that every answer follows, as JSON; None for free answers.

    Raises:
        InputError: A text has a lone surrogate, which no tokenizer takes.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    schema: str | None = None

    def __post_init__(self) -> None:
        for text in (str(self.question_id), self.category, *self.turns, self.schema or ""):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InputError(
                    f"the prompt has a lone surrogate, {text[error.start]!r}, half of a character: "
                    "give the whole character in UTF-8, or leave it out"
                ) from error


def default_prompts_path() -> Path:
    """The prompts that ship with the package."""
    return Path(str(files("drafttree.bench") / "prompts.jsonl"))


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file: Parquet if it is named so, or else JSON lines.

    Raises:
        InputError: The file cannot be read, or an entry is not a prompt.
    """
    entries = _parquet(path) if path.suffix == ".parquet" else _json_lines(path)
    prompts = [_prompt(entry, where) for entry, where in islice(entries, limit)]
    if not prompts:
        raise InputError(f"no prompts in {path}")
    return prompts


def _json_lines(path: Path) -> Iterator[tuple[Any, str]]:
    """The objects of a file of JSON lines, each with its place."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the prompts in {path}: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield json.loads(line), where
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: not JSON ({error})") from error


def _parquet(path: Path) -> Iterator[tuple[Any, str]]:
    """The rows of a Parquet file, each with its place."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise InputError(
            f"reading {path} needs pyarrow: pip install pyarrow, or give the prompts as JSON lines"
        ) from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise InputError(f"cannot read the prompts in {path}: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield row, f"{path}, row {number}"


def _prompt(entry: Any, where: str) -> Prompt:
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected a JSON object")
    given = "messages" if "turns" not in entry and "messages" in entry else "turns"
    missing = [key for key in ("question_id", "category", given) if key not in entry]
    if missing:
        raise InputError(f"{where}: missing {', '.join(missing)}")
    question_id, category = entry["question_id"], entry["category"]
    if not isinstance(question_id, int | str):
        raise InputError(f"{where}: question_id must be a number or a string")
    if not isinstance(category, str):
        raise InputError(f"{where}: category must be a string")
    turns = entry["turns"] if given == "turns" else _contents(entry["messages"], where)
    kind = "strings" if given == "turns" else "messages whose content is a string"
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise InputError(f"{where}: {given} must be a non-empty list of {kind}")
    if any(turn.startswith(_PLACEHOLDER) for turn in turns):
        raise InputError(
            f"{where}: SPEED-Bench has a placeholder here: make files with all turns by its "
            "prepare.py (docs/command.md), and give one of those"
        )
    schema = entry.get("schema")
    if schema is not None and not isinstance(schema, dict):
        raise InputError(f"{where}: schema must be a JSON schema, which is a JSON object")
    bound = None if schema is None else json.dumps(schema, ensure_ascii=False)
    try:
        return Prompt(question_id, category, tuple(turns), bound)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _contents(messages: Any, where: str) -> list[Any]:
    """The contents of a chat's messages, all of the user: the answers are the model's own."""
    if not isinstance(messages, list):
        raise InputError(f"{where}: messages must be a list of objects with role and content")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") != "user":
            raise InputError(
                f"{where}: every message must have the role user; the model writes the answers"
            )
    return [message.get("content") for message in messages]
