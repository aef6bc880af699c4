"""The tokens of jump-forward strings.

A jump-forward string is a text that must come next by a grammar, such as the name of a key. Often
the grammar allows several tokens for it: each beginning of the text that is a token. A model mostly
takes those that the tokenizer does. (The masks of llguidance allow no others.)

Source: SGLang's jump-forward decoding (https://arxiv.org/abs/2312.07104, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

_ANCHOR = "\n"
"""A text that is not joined with the one after it."""


def found_text(find: Callable[[], str]) -> str:
    """A jump-forward string of XGrammar, as far as it consists of whole characters.

    XGrammar finds bytes, which may begin or end inside a character: two texts may begin with the
    same byte of different letters. They cannot be decoded as a whole then.

    Args:
        find: What returns the string.
    """
    try:
        return find()
    except UnicodeDecodeError as error:
        return error.object[: error.start].decode()


class JumpForwardTokenizer:
    """Tokenizes jump-forward strings as the engine's tokenizer does, and remembers them.

    Args:
        tokenizer: The tokenizer of the engine.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # SentencePiece's tokenizers put a space before a text, and a jump-forward string is in the
        # middle of one: it is tokenized after another text, whose tokens are left out.
        anchor, alone = self._tokens(_ANCHOR), self._tokens("a")
        after = self._tokens(f"{_ANCHOR}a")
        is_other = after[: len(anchor)] == anchor and after[len(anchor) :] != alone
        self._anchor = anchor if is_other else []
        self.encode = lru_cache(maxsize=4096)(self._encode)

    def _tokens(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False)]

    def _encode(self, text: str) -> JumpForward:
        if not text:
            return NO_JUMP_FORWARD
        anchor = self._anchor
        tokens = self._tokens(f"{_ANCHOR}{text}" if anchor else text)
        if tokens[: len(anchor)] != anchor or len(tokens) == len(anchor):
            return NO_JUMP_FORWARD
        before, whole = (self._tokenizer.decode(each).encode() for each in (tokens[:-1], tokens))
        # An incomplete character is decoded as U+FFFD, which may have more bytes than the whole.
        return JumpForward(tuple(tokens[len(anchor) :]), max(len(whole) - len(before), 1))
