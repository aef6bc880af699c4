"""What the counters of a run with chains must say."""

from __future__ import annotations

from collections.abc import Mapping


def proves_chains(counters: Mapping[str, int], longest: int) -> None:
    """Check that chains were verified, of several drafts, and that some drafts were accepted.

    Args:
        counters: The counters of the run.
        longest: Greatest number of draft tokens of a chain.
    """
    assert counters["accepted_tokens"] > counters["drafted_steps"] / 10 > 0
    assert counters["emitted"] == counters["steps"] + counters["accepted_tokens"]
    assert counters["draft_tokens"] <= longest * counters["drafted_steps"]
    assert counters["draft_tokens"] > 2 * counters["drafted_steps"]
    assert counters["non_first_child_accepted"] == counters["kv_rows_moved"] == 0
