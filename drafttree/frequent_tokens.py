"""The most frequent tokens of a vocabulary, as far as its tokenizer tells.

The tokenizers of most language models were made by joining the most frequent pair of tokens of a
text again and again (byte pair encoding), or carry the tokens' log-probabilities (unigram models).
So their files hold an order of frequency, of text in all languages that they were made for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FILE = "tokenizer.json"


def frequent_tokens(folder: Path, count: int, vocab_size: int) -> list[int] | None:
    """The most frequent tokens of a model's vocabulary.

    Special tokens and the tokens from which all others are joined, bytes or characters, come first.

    Args:
        folder: The model's folder, in Hugging Face's layout.
        count: The greatest number of tokens.
        vocab_size: Number of tokens of the model's logits.

    Returns:
        Their ids, ascending; None if the folder has no `tokenizer.json` of these kinds.

    Raises:
        ValueError: The file is damaged.
    """
    file = folder / _FILE
    if not file.is_file():
        return None
    try:
        tokenizer = json.loads(file.read_text(encoding="utf-8"))
        model = tokenizer["model"]
        order = _ORDERS[model["type"]](model) if model.get("type") in _ORDERS else None
        special = [int(each["id"]) for each in tokenizer.get("added_tokens", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the tokenizer {file} is damaged: {error!r}") from error
    if order is None:
        return None
    # A dictionary keeps the order in which its keys were first inserted.
    tokens = [token for token in dict.fromkeys([*special, *order]) if 0 <= token < vocab_size]
    return sorted(tokens[:count])


def _by_merges(model: dict[str, Any]) -> list[int]:
    """The tokens of byte pair encoding: those that are not joined first, then in order."""
    ids: dict[str, int] = model["vocab"]
    pairs = (each.split(" ") if isinstance(each, str) else each for each in model["merges"])
    joined = dict.fromkeys("".join(pair) for pair in pairs)
    parts = [token for name, token in ids.items() if name not in joined]
    return [*parts, *(ids[name] for name in joined if name in ids)]


def _by_scores(model: dict[str, Any]) -> list[int]:
    """The tokens of a unigram model, by their log-probability."""
    scores = [float(score) for _, score in model["vocab"]]
    return sorted(range(len(scores)), key=lambda token: -scores[token])


_ORDERS = {"BPE": _by_merges, "Unigram": _by_scores}
