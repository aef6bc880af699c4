"""The number of programs that read a row of logits, for kernels that split the vocabulary."""

from __future__ import annotations

# Enough programs to keep the memory of a large GPU busy.
_PROGRAMS = 512
MOST_SHARES = 16
"""The maximum number of shares of a row."""


def vocab_shares(rows: int, vocab: int, tile: int) -> tuple[int, int]:
    """Split the rows `[rows, vocab]` of logits into shares with one program each.

    Args:
        rows: Number of rows, at least 1.
        vocab: Size of the vocabulary, at least 1.
        tile: Number of logits that a program reads at once.

    Returns:
        The number of ids in a share, a multiple of `tile`, and the number of shares of a row.
    """
    tiles = -(-vocab // tile)
    span = -(-tiles // min(-(-_PROGRAMS // rows), MOST_SHARES, tiles))
    return span * tile, -(-tiles // span)
