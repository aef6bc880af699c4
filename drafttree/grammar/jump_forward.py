"""The tokens of jump-forward strings.

A jump-forward string is a text that must come next by a grammar, such as the name of a key. Often
the grammar allows several tokens for it: each beginning of the text that is a token. A model mostly
takes those that the tokenizer does. (The masks of llguidance allow no others.)

Source: SGLang's jump-forward decoding (https://arxiv.org/abs/2312.07104, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple


class JumpForward(NamedTuple):
    """The tokens of a jump-forward string.

    Attributes:
        tokens: The tokens.
        last_bytes: Number of bytes of the last one, which may be the beginning of a longer token.
    """

    tokens: Sequence[int]
    last_bytes: int


NO_JUMP_FORWARD = JumpForward((), 0)


class JumpForwardTokenizer:
    """Tokenizes jump-forward strings as the engine's tokenizer does, and remembers them.

    Args:
        tokenizer: The tokenizer of the engine.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encode = lru_cache(maxsize=4096)(self._encode)

    def _encode(self, text: str) -> JumpForward:
        tokens = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        if not tokens:
            return NO_JUMP_FORWARD
        return JumpForward(tuple(tokens), len(self._tokenizer.decode(tokens[-1:]).encode()))
