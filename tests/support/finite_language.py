"""A grammar that allows a few sequences of tokens, for tests of trees under grammars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from drafttree.grammar import NO_JUMP_FORWARD, JumpForward

VOCAB = 40
"""Tokens, which take two words of a mask."""

END = 39
"""The token that ends a sequence."""


class FiniteLanguage:
    """A `drafttree.grammar.Matcher` of the given sequences, each ended by `END`.

    Attributes:
        accepted: The tokens accepted so far.
        filled: Number of masks that were written.
        jumps: The jump-forward strings after some of the paths.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self.jumps: dict[tuple[int, ...], JumpForward] = {}
        self._sequences = {(*sequence, END) for sequence in sequences}
        self.accepted: list[int] = []
        self.filled = 0

    def following(self, path: Sequence[int]) -> set[int]:
        """The tokens that may follow a path, looked up in all sequences."""
        size = len(path)
        return {
            each[size]
            for each in self._sequences
            if len(each) > size and each[:size] == tuple(path)
        }

    def accept(self, token: int) -> bool:
        if token not in self.following(self.accepted):
            return False
        self.accepted.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.accepted)
        del self.accepted[-count:]

    def fill(self, masks: torch.Tensor, row: int) -> None:
        masks[row] = mask_of(self.following(self.accepted) or {*range(VOCAB)})
        self.filled += 1

    def jump_forward(self) -> JumpForward:
        return self.jumps.get(tuple(self.accepted), NO_JUMP_FORWARD)


def mask_of(tokens: Iterable[int]) -> torch.Tensor:
    """The mask that allows some tokens, `int32 [2]`."""
    bits = torch.zeros(64, dtype=torch.int64)
    bits[[*tokens]] = 1
    words = (bits.view(2, 32) << torch.arange(32)).sum(1)
    return words.where(words < 1 << 31, words - (1 << 32)).int()


def tokens_of(mask: torch.Tensor, vocab: int = 64) -> set[int]:
    """The tokens out of `vocab` that a mask allows."""
    words: list[int] = mask.tolist()
    return {token for token in range(vocab) if words[token // 32] >> (token % 32) & 1}
