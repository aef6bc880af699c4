"""Acceptance statistics of dynamic trees by candidate source."""

from __future__ import annotations

from typing import Any

from tree_kernels.candidates import BIGRAM_STATES, ROW_STATES, TOP
from tree_kernels.ngrams import LONGEST
from tree_kernels.source_stats import SourceStats


def by_source(source_stats: SourceStats) -> list[dict[str, Any]]:
    """Acceptance of the drafted tokens whose parent was accepted, by source.

    A candidate that several tables propose counts once, for the first of these sources:
    `n-gram match of 3`, the token that followed the last three tokens earlier in the text;
    `bigram rank 1`, the most likely token after the last two; `matrix rank 1`, the most likely
    token after the last one.

    Returns:
        `{"source", "tried", "hit", "share"}` for each source that was tried; `share` is
        `hit / tried`.
    """
    counts = tuple(
        each.view(-1, BIGRAM_STATES, ROW_STATES).cpu()
        for each in (source_stats.tried, source_stats.hit)
    )
    # The first index is 0 if no suffix matched, up to LONGEST if the candidate is the n-gram match,
    # and above LONGEST if another candidate is.
    matches = [each[1 : LONGEST + 1].sum((1, 2)) for each in counts]
    others = [each[0] + each[LONGEST + 1 :].sum(0) for each in counts]
    bigrams = [each[1 : TOP + 1].sum(1) for each in others]
    rows = [(each[0] + each[TOP + 1])[1:] for each in others]
    named = (("n-gram match of", matches), ("bigram rank", bigrams), ("matrix rank", rows))
    return [
        {"source": f"{name} {number}", "tried": tried, "hit": hit, "share": hit / tried}
        for name, (all_tried, all_hit) in named
        for number, (tried, hit) in enumerate(
            zip(all_tried.tolist(), all_hit.tolist(), strict=True), start=1
        )
        if tried
    ]
