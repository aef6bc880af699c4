"""Acceptance statistics of dynamic trees by candidate source."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tree_kernels.candidates import BIGRAM_STATES, ROW_STATES, TOP
from tree_kernels.copies import BUCKETS, LENGTHS
from tree_kernels.source_stats import SourceStats

_COPIED = ("n-gram match", "memory match", "shorter n-gram match", "shorter memory match")
"""What candidates are called by their states of `copies.COPY_STATES`, a bucket of lengths each."""


def _lengths() -> list[str]:
    """A name for each bucket of match lengths."""
    names = [
        str(least) if least == following - 1 else f"{least} to {following - 1}"
        for least, following in pairwise(LENGTHS)
    ]
    return [*names, f"{LENGTHS[-1]} or more"]


def matrix_rank(rank: int) -> str:
    """The name of the candidate of a rank, from 1, in a row of the adjacency matrix."""
    return f"matrix rank {rank}"


def source_name(source: int) -> str:
    """The name of a source, as numbered in `candidates.NUM_SOURCES`; see `by_source`.

    Empty for a root, which is no candidate.
    """
    others, row = divmod(source, ROW_STATES)
    copy, bigram = divmod(others, BIGRAM_STATES)
    kind, bucket = divmod(copy - 1, BUCKETS)
    if 0 <= kind < 2:
        return f"{_COPIED[kind]} of {_lengths()[bucket]}"
    if 2 <= kind < 4:
        return _COPIED[kind]
    if 1 <= bigram <= TOP:
        return f"bigram rank {bigram}"
    return matrix_rank(row) if row else ""


def _names() -> list[str]:
    """The names of all sources, in the order in which they are listed."""
    copied = [f"{kind} of {length}" for kind in _COPIED[:2] for length in _lengths()]
    bigrams = [f"bigram rank {rank}" for rank in range(1, TOP + 1)]
    return [*copied, *_COPIED[2:], *bigrams, *map(matrix_rank, range(1, TOP + 1))]


def by_source(source_stats: SourceStats) -> list[dict[str, Any]]:
    """Acceptance of the drafted tokens whose parent was accepted, by source.

    A candidate that several tables propose counts once, for the first of these sources:
    `n-gram match of 3`, the token that followed the last three tokens, the longest match, earlier
    in the text; `memory match of 7 to 9`, the same in the memory; `shorter n-gram match` and
    `shorter memory match`, what followed a shorter match; `bigram rank 1`, the most likely token
    after the last two; `matrix rank 1`, the most likely token after the last one.

    Returns:
        `{"source", "tried", "hit", "share"}` for each source that was tried; `share` is
        `hit / tried`. Both counts of a source are halved when it was tried more than 2^20 times.
    """
    sums = {name: [0, 0] for name in _names()}
    tried, hit = source_stats.tried.cpu(), source_stats.hit.cpu()
    for source in tried.nonzero().flatten().tolist():
        if name := source_name(source):
            sums[name][0] += int(tried[source])
            sums[name][1] += int(hit[source])
    return [
        {"source": name, "tried": tried_of, "hit": hit_of, "share": hit_of / tried_of}
        for name, (tried_of, hit_of) in sums.items()
        if tried_of
    ]
