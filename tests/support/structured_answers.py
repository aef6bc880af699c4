"""Grammars that short answers of a model with bytes for tokens can have."""

from __future__ import annotations

import json
import re

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome", "Riga", "Osaka"]},
        "days": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        "note": {"type": "string", "pattern": "^[a-f]{0,6}$"},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}
PATTERN = r"(ab|ba){2,8}-[0-9]{3} (red|green|blue)"
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


def _letters() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def text_of(tokens: list[int]) -> str:
    """The text of the byte tokenizer's tokens."""
    letters = _letters()
    return "".join(letters[token - 2] for token in tokens if token > 1).replace("Ġ", " ")


def tokens_of(text: str) -> list[int]:
    """The byte tokenizer's tokens of a text."""
    letters = _letters()
    return [2 + letters.index(letter) for letter in text.replace(" ", "Ġ")]


def check_form(kind: str, text: str) -> None:
    """Check that a whole answer has the form that was asked for."""
    if kind == "a tag":
        text = text.removeprefix("<call>").removesuffix("</call>")
    if kind in ("a schema", "a tag"):
        answer = json.loads(text)
        assert answer.keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
        assert re.fullmatch("[a-f]{0,6}", answer["note"])
    elif kind == "choices":
        assert text in CHOICES
    else:
        pattern = PATTERN if kind == "a regex" else r"([xy]=(10|20|300);){2,6}"
        assert re.fullmatch(pattern, text)
