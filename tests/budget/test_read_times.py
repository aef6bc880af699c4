"""How long a model takes to read what it has missed."""

from __future__ import annotations

import pytest

from drafttree.budget.draft_times import ReadTimes


def times_of(*reads: tuple[int, float]) -> ReadTimes:
    """Times of reads, each of so many tokens in so many seconds."""
    times = ReadTimes()
    for tokens, seconds in reads:
        times.add(tokens, seconds)
    return times


def test_in_proportion_to_tokens() -> None:
    assert times_of().usual(50) == 0
    assert times_of((0, 1.0), (100, 0.3)).usual(50) == pytest.approx(0.15)


def test_short_reads_do_not_make_long_ones_look_slow() -> None:
    """A forward over one token takes a third of one over 100 here."""
    assert times_of((100, 0.3), *[(1, 0.1)] * 8).usual(100) < 0.5


def test_finds_back_after_a_stall() -> None:
    stalled = (100, 0.3), (100, 60.0)
    assert times_of(*stalled).usual(100) < 1.2
    assert times_of(*stalled, *[(100, 0.3)] * 15).usual(100) < 0.4
