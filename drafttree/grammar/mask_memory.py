"""Which token was taken where a grammar has left the same few before.

The punctuation and the white space of JSON, for example, are mostly those of earlier answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from drafttree.grammar.masks import MaskRow, count_allowed

MOST_MASKS = 1 << 16


class Taken(NamedTuple):
    """What is known of a mask.

    Attributes:
        token: The last token that was taken.
        tried: How often the mask occurred again after the first time.
        hit: How often the token was then the same as the time before.
    """

    token: int
    tried: int = 0
    hit: int = 0

    @property
    def share(self) -> float:
        """An estimate of how probable the token is."""
        return (1 + self.hit) / (2 + self.tried)


class MaskMemory:
    """The last token taken under each of the last `MOST_MASKS` masks that allow few.

    Masks that allow more than one token in 32 are those of free text, of which they say nothing.
    """

    def __init__(self) -> None:
        self._taken: dict[int, Taken] = {}

    def guess(self, mask: MaskRow) -> Taken | None:
        """What was taken under a mask; None if that is unknown."""
        return self._taken.get(_key(mask)) if _is_narrow(mask) else None

    def learn(self, mask: MaskRow, token: int) -> None:
        """Remember that a token was taken under a mask."""
        if not _is_narrow(mask):
            return
        before = self._taken.pop(key := _key(mask), None)
        taken = Taken(token)
        if before is not None:
            taken = Taken(token, before.tried + 1, before.hit + (before.token == token))
        elif len(self._taken) >= MOST_MASKS:
            del self._taken[next(iter(self._taken))]
        self._taken[key] = taken

    def learn_path(
        self,
        masks: np.ndarray[Any, np.dtype[np.int32]],
        tokens: Sequence[int],
        parents: Sequence[int],
        text: Sequence[int],
    ) -> None:
        """Remember what was taken after the nodes of a tree along a path.

        Args:
            masks: The mask of each node, `[n, W]`.
            tokens: The token of each node; that of the root is not used.
            parents: The parent of each node; -1 for the root at 0.
            text: The tokens that were taken after the root.
        """
        below = {(parents[node], tokens[node]): node for node in range(1, len(tokens))}
        node: int | None = 0
        for token in text:
            if node is None:
                return
            self.learn(masks[node], token)
            node = below.get((node, token))


def _is_narrow(mask: MaskRow) -> bool:
    return count_allowed(mask) <= len(mask)


def _key(mask: MaskRow) -> int:
    return hash(mask.tobytes())
