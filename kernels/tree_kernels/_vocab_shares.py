"""How many programs read a row of logits, for the kernels that read rows in shares."""

from __future__ import annotations

# The programs that keep a large GPU's memory busy.
_PROGRAMS = 512
MOST_SHARES = 16
"""The shares into which a row is cut at most to have as many."""


def vocab_shares(rows: int, vocab: int, tile: int) -> tuple[int, int]:
    """The ids in a share of a row, a multiple of `tile`, and the shares of a row; `rows` and
    `vocab` are at least 1."""
    tiles = -(-vocab // tile)
    span = -(-tiles // min(-(-_PROGRAMS // rows), MOST_SHARES, tiles))
    return span * tile, -(-tiles // span)
