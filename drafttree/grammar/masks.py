"""Reads token bitmasks: 32 tokens in each int32, the lowest bit first."""

from __future__ import annotations

from typing import Any

import numpy as np

MaskRow = np.ndarray[Any, np.dtype[np.int32]]
"""The tokens that may follow a node, `[W]`, one bit for each."""

ALL = -1
"""A word of a mask that allows all of its tokens."""


def allows(mask: MaskRow, token: int) -> bool:
    """Whether a mask allows a token."""
    # A prompt may have tokens beyond the target's vocabulary, which drafters copy.
    word = token >> 5
    return word < len(mask) and bool(int(mask[word]) >> (token & 31) & 1)


def count_allowed(mask: MaskRow) -> int:
    """How many tokens a mask allows."""
    return int(np.bitwise_count(mask.view(np.uint32)).sum())


def sole_token(mask: MaskRow) -> int | None:
    """The only token that a mask allows; None if it allows several, or none."""
    if np.count_nonzero(mask) != 1:
        return None
    place = int(np.flatnonzero(mask)[0])
    word = int(mask[place]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * place + word.bit_length() - 1
