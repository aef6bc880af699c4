"""Acceptance statistics of dynamic trees by candidate source."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from tree_kernels.candidates import BIGRAM_STATES, ROW_STATES, TOP
from tree_kernels.copies import BUCKETS, LENGTHS
from tree_kernels.source_stats import SourceStats


def _lengths() -> list[str]:
    """A name for each bucket of match lengths."""
    names = [
        str(least) if least == following - 1 else f"{least} to {following - 1}"
        for least, following in pairwise(LENGTHS)
    ]
    return [*names, f"{LENGTHS[-1]} or more"]


def by_source(source_stats: SourceStats) -> list[dict[str, Any]]:
    """Acceptance of the drafted tokens whose parent was accepted, by source.

    A candidate that several tables propose counts once, for the first of these sources:
    `n-gram match of 3`, the token that followed the last three tokens, the longest match, earlier
    in the text; `memory match of 7 to 9`, the same in the memory; `shorter n-gram match` and
    `shorter memory match`, what followed a shorter match; `bigram rank 1`, the most likely token
    after the last two; `matrix rank 1`, the most likely token after the last one.

    Returns:
        `{"source", "tried", "hit", "share"}` for each source that was tried; `share` is
        `hit / tried`.
    """
    counts = [
        each.view(-1, BIGRAM_STATES, ROW_STATES).cpu()
        for each in (source_stats.tried, source_stats.hit)
    ]
    names: list[str] = []
    sums: list[list[torch.Tensor]] = []
    for each in counts:
        # The states of a candidate by copies, as in `copies.COPY_STATES`.
        copied = each[1:].sum((1, 2)).view(6, BUCKETS)
        others = each[0] + each[1 + 4 * BUCKETS :].sum(0)
        bigrams = others[1 : TOP + 1].sum(1)
        rows = (others[0] + others[TOP + 1])[1:]
        sums.append([*copied[0], *copied[1], copied[2].sum(), copied[3].sum(), *bigrams, *rows])
    for kind in ("n-gram", "memory"):
        names += [f"{kind} match of {length}" for length in _lengths()]
    names += ["shorter n-gram match", "shorter memory match"]
    for table in ("bigram", "matrix"):
        names += [f"{table} rank {rank}" for rank in range(1, TOP + 1)]
    return [
        {"source": name, "tried": int(tried), "hit": int(hit), "share": int(hit) / int(tried)}
        for name, tried, hit in zip(names, *sums, strict=True)
        if tried
    ]
