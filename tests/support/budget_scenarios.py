"""Scenarios of `simulated_decoding` that make measured times misleading."""

from __future__ import annotations

import math

from simulated_decoding import Scenario


def _neighbour(time: float, drafted: bool) -> float:
    """Another process takes a core for four of every eight seconds."""
    return (2.0 if drafted else 1.6) if time % 8 < 4 else 1.0


def _slow_minute(time: float, drafted: bool) -> float:
    return 2.0 if 40 <= time < 100 else 1.0


def _bursts(time: float, drafted: bool) -> float:
    """Every 20 seconds a burst of one second makes all steps five times slower."""
    return 5.0 if time % 20 < 1 else 1.0


def _dear_drafts(time: float, drafted: bool) -> float:
    """Steps with drafts take four times as long for half a minute."""
    return 4.0 if drafted and 30 <= time < 60 else 1.0


def _fills_and_drains(step: int) -> int:
    """From 1 to 32 requests and back in 400 steps."""
    return max(1, round(32 * math.sin(math.pi * (step % 400) / 400) ** 2))


def _taken_at_start(rows: int) -> float:
    """While the small forwards were timed, every core was taken."""
    return 5.0 if 4 <= rows <= 64 else 1.0


SCENARIOS = {
    "quiet": Scenario(),
    "start": Scenario(start_slow=_taken_at_start),
    "start with stalls": Scenario(start_slow=_taken_at_start, stalls=0.02, stall_seconds=0.15),
    "stalls": Scenario(stalls=0.02, stall_seconds=0.15),
    "stalls of drafts": Scenario(stalls=0.02, stall_seconds=0.15, stalls_of_drafts=2.0),
    "bursts": Scenario(slow=_bursts),
    "slow minute": Scenario(slow=_slow_minute),
    "dear drafts": Scenario(slow=_dear_drafts),
    "neighbour": Scenario(slow=_neighbour),
    "growing contexts": Scenario(by_context=0.0004, answer=3000),
    "most stalls in drafts": Scenario(stalls=0.002, stall_seconds=0.3, stalls_of_drafts=60.0),
    "batches": Scenario(batch=_fills_and_drains, stalls=0.01, stall_seconds=0.15),
}
