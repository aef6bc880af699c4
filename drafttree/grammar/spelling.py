"""The tokens of a text that a grammar forces.

A grammar that leaves a single text, such as the name of a key, often allows several tokens: each
beginning of the text that is a token. A model mostly takes those that the tokenizer does. (The
masks of llguidance allow no others.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple


class Spelling(NamedTuple):
    """The tokens of a text.

    Attributes:
        tokens: The tokens.
        last_bytes: Number of bytes of the last one, which may be the beginning of a longer token.
    """

    tokens: Sequence[int]
    last_bytes: int


NOTHING = Spelling((), 0)


class Speller:
    """Spells texts as a tokenizer does, and remembers how.

    Args:
        tokenizer: The tokenizer of the engine.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.spell = lru_cache(maxsize=4096)(self._spell)

    def _spell(self, text: str) -> Spelling:
        tokens = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        if not tokens:
            return NOTHING
        return Spelling(tuple(tokens), len(self._tokenizer.decode(tokens[-1:]).encode()))
