"""The most frequent tokens of a vocabulary, by the order in its tokenizer's file.

The tokenizers of most language models were made by joining the most frequent pair of tokens of a
text again and again (byte pair encoding), or have the tokens' log-probabilities (unigram models).
Either gives an order of frequency, of text in all languages that they were made for.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from drafttree.model_files import FAST_TOKENIZER

_BYTE = re.compile("<0x[0-9A-F]{2}>")


def frequent_tokens(folder: Path, count: int, vocab_size: int) -> list[int] | None:
    """The most frequent tokens of a model's vocabulary.

    Special tokens come first. With byte pair encoding the bytes and characters from which the
    others are joined follow, and tokens that were never joined come last.

    Args:
        folder: The model's folder, in Hugging Face's layout.
        count: The greatest number of tokens.
        vocab_size: Number of tokens of the model's logits.

    Returns:
        Their ids, ascending; None if the folder has no `tokenizer.json` of these two kinds.

    Raises:
        ValueError: The file is damaged.
    """
    file = folder / FAST_TOKENIZER
    if not file.is_file():
        return None
    try:
        tokenizer = json.loads(file.read_text(encoding="utf-8"))
        model = tokenizer["model"]
        # Older files with merges do not say of what type they are.
        kind = model.get("type") or ("BPE" if "merges" in model else None)
        order = _ORDERS[kind](model) if kind in _ORDERS else None
        special = [int(each["id"]) for each in tokenizer.get("added_tokens", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the tokenizer {file} is damaged: {error!r}") from error
    if order is None:
        return None
    # A dictionary keeps the order in which its keys were first inserted.
    tokens = [token for token in dict.fromkeys([*special, *order]) if 0 <= token < vocab_size]
    return sorted(tokens[:count])


def _by_merges(model: dict[str, Any]) -> list[int]:
    """The tokens of byte pair encoding: bytes and characters, and the others as they are joined."""
    ids: dict[str, int] = model["vocab"]
    pairs = (each.split(" ") if isinstance(each, str) else each for each in model["merges"])
    joined = dict.fromkeys("".join(pair) for pair in pairs)
    parts = [name for name in ids if len(name) == 1 or _BYTE.fullmatch(name)]
    # What was inserted before keeps its place.
    return [ids[name] for name in dict.fromkeys([*parts, *joined, *ids]) if name in ids]


def _by_scores(model: dict[str, Any]) -> list[int]:
    """The tokens of a unigram model, by their log-probability."""
    scores = [float(score) for _, score in model["vocab"]]
    return sorted(range(len(scores)), key=lambda token: -scores[token])


_ORDERS = {"BPE": _by_merges, "Unigram": _by_scores}
