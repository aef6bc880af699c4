"""Where candidates of grown trees came from, in words, and how often they were accepted."""

from __future__ import annotations

from typing import Any

from tree_kernels.context import LONGEST
from tree_kernels.offers import PAIR_STATES, ROW_STATES, TOP
from tree_kernels.tally import Tally


def by_source(tally: Tally) -> list[dict[str, Any]]:
    """The drafts whose parent was accepted, by source; each is counted once.

    A candidate that several tables offer counts for the first of these that does: `copy of 3`, what
    came after the last three tokens earlier in the text; `pair rank 1`, the likeliest after the
    last two tokens; `row rank 1`, the likeliest after the last.

    Returns:
        `{"source", "tried", "hit", "share"}` for each that was tried, `share` being the part of
        `tried` that was accepted.
    """
    counts = tuple(
        each.view(-1, PAIR_STATES, ROW_STATES).cpu() for each in (tally.tried, tally.hit)
    )
    # Copies, and then all that are none: no suffix was found, or another candidate is the copy.
    copies = [each[1 : LONGEST + 1].sum((1, 2)) for each in counts]
    others = [each[0] + each[LONGEST + 1 :].sum(0) for each in counts]
    pairs = [each[1 : TOP + 1].sum(1) for each in others]
    rows = [(each[0] + each[TOP + 1])[1:] for each in others]
    named = (("copy of", copies), ("pair rank", pairs), ("row rank", rows))
    return [
        {"source": f"{name} {number}", "tried": tried, "hit": hit, "share": hit / tried}
        for name, (all_tried, all_hit) in named
        for number, (tried, hit) in enumerate(
            zip(all_tried.tolist(), all_hit.tolist(), strict=True), start=1
        )
        if tried
    ]
