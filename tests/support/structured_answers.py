"""Grammars that short answers of a model with bytes for tokens can have."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lyanna_parts import drafter_for, predict_embeddings
from tiny_models import add_byte_tokenizer, make_first_layers, make_tiny_llama

from lyanna_plugin.checkpoint import save

CITIES = ["Oslo", "Rome", "Riga", "Osaka"]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": CITIES},
        "days": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        "note": {"type": "string", "pattern": "^[a-f]{0,6}$"},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}
PATTERN = r"(ab|ba){2,8}-[0-9]{3} (red|green|blue)"
OTHER_LETTERS = "(да|нет){2,6}!"
EBNF = 'root ::= pair{2,6}\npair ::= [xy] "=" ("10" | "20" | "300") ";"'
CHOICES = ["green", "yellow ochre", "yellow", "blue-green"]
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "<call>"},
            {"type": "json_schema", "json_schema": SCHEMA},
            {"type": "const_string", "value": "</call>"},
        ],
    },
}

GRAMMARS: dict[str, dict[str, dict[str, Any]]] = {
    "vllm": {
        "a schema": {"json": SCHEMA},
        "a regex": {"regex": PATTERN},
        "other letters": {"regex": OTHER_LETTERS},
        "EBNF": {"grammar": EBNF},
        "choices": {"choice": CHOICES},
        "a tag": {"structural_tag": json.dumps(TAG)},
    },
    "sglang": {
        "a schema": {"json_schema": json.dumps(SCHEMA)},
        "a regex": {"regex": PATTERN},
        "other letters": {"regex": OTHER_LETTERS},
        "EBNF": {"ebnf": EBNF},
        "choices": {"regex": "|".join(CHOICES)},
        "a tag": {"structural_tag": json.dumps(TAG)},
    },
}
"""The same grammars as each engine takes them, by kind."""

LETTERS = [("Ð", "\u00b4"), ("Ð", "½")]
"""With these, some of `OTHER_LETTERS` are one token, and their first byte may be another one."""

MERGES = [("g", "r"), ("e", "e"), ("ee", "n"), ("gr", "een"), ("o", "w"), ("l", "l"), ("e", "ll")]
"""With these, words of `CHOICES` have several spellings."""


def make_model(folder: Path, merges: Sequence[tuple[str, str]] = LETTERS) -> Path:
    """Save a model whose tokens are bytes, and those that are merged from them."""
    return add_byte_tokenizer(make_tiny_llama(folder, sharpness=3.0), merges=merges)


def make_drafter(method: str, model: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Save a draft model for RSD, or a drafter for Lyanna, and return the method's options too."""
    if method == "rsd":
        return make_first_layers(model, folder / "draft", 1), {"tree": "beam:3x4"}
    module = drafter_for(model, hot_tokens=256)
    predict_embeddings(module)
    save(module, folder / "drafter")
    return folder / "drafter", {"nodes": 12}


def _letters() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


@cache
def names() -> dict[int, str]:
    """The names of the tokens of a model that `make_model` has saved with `LETTERS`.

    The beginning and the end of a text, tokens 0 and 1, have none. An ASCII character other than a
    space stands for itself in a name.
    """
    found = {token: f"<unused{token}>" for token in range(2, 512 - len(LETTERS))}
    found |= dict(enumerate(_letters(), 2))
    return found | dict(enumerate(map("".join, LETTERS), 512 - len(LETTERS)))


def text_of(tokens: list[int]) -> str:
    """The text of the tokens of a model that `make_model` has saved with `LETTERS`."""
    from tokenizers import decoders

    text: str = decoders.ByteLevel().decode([names()[token] for token in tokens if token > 1])
    return text


def tokens_of(text: str) -> list[int]:
    """The byte tokenizer's tokens of a text."""
    letters = _letters()
    return [2 + letters.index(letter) for letter in text.replace(" ", "Ġ")]


def check_form(kind: str, text: str) -> None:
    """Check that a whole answer has the form that was asked for."""
    if kind == "a tag":
        assert text.startswith("<call>")
        assert text.endswith("</call>")
        text = text.removeprefix("<call>").removesuffix("</call>")
    if kind in ("a schema", "a tag"):
        _check_schema(json.loads(text))
    elif kind == "choices":
        assert text in CHOICES
    else:
        patterns = {"a regex": PATTERN, "other letters": OTHER_LETTERS}
        assert re.fullmatch(patterns.get(kind, r"([xy]=(10|20|300);){2,6}"), text)


def _check_schema(answer: Any) -> None:
    assert isinstance(answer, dict)
    assert answer.keys() == {"city", "days", "note"}
    assert answer["city"] in CITIES
    assert isinstance(answer["days"], list)
    assert 2 <= len(answer["days"]) <= 3
    assert all(isinstance(day, bool) for day in answer["days"])
    assert isinstance(answer["note"], str)
    assert re.fullmatch("[a-f]{0,6}", answer["note"])
