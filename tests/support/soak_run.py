"""One engine's part of a soak: it serves mixtures until the time is over, and counts."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import soak_held
from soak_requests import Asked, Given, Mixture, Served, make_mixtures, why_wrong

WARM_UP = 0.3
"""Share of the time after which memory and state are counted for the first time."""

WARM_UP_SECONDS = 75.0
"""Least time until then: memory grows for a minute. A shorter soak does not compare them."""

MEMORY_GROWTH = 64 * 1024
"""Most KiB by which resident memory may grow after the warm-up, of all processes together."""

HELD_GROWTH = 64
"""Most of our objects of a type, and elements in their containers, that may come after it."""

OPERATIONS = {
    "vllm": ["reset the cache", "forget", "reload the weights", "sleep and wake"],
    "sglang": ["reset the cache", "reload the weights"],
}
"""What may be done between mixtures; on a CPU SGLang cannot sleep."""


class Engine(Protocol):
    """A running engine."""

    def serve(self, requests: list[Served], pool: list[Asked]) -> list[Given]:
        """Serve a mixture."""

    def operate(self, operation: str) -> None:
        """Do one of `OPERATIONS`, while no request is running."""

    def counts(self) -> dict[str, int]:
        """The worker's counters, empty without a method."""

    def held(self) -> dict[str, int]:
        """What the engine and we hold while no request is running."""

    def close(self) -> None:
        """End the engine."""


@dataclass
class Report:
    """What one engine did.

    Attributes:
        answered: Number of finished or aborted requests.
        counts: The worker's counters, over operations that reset them too.
        operations: How often each operation was done.
        leaks: What grew, in words.
        measured: Memory in KiB, open files and processes: after the warm-up, at the end, and after
            the engine was closed; empty if the soak was too short.
        shared_memory: Names of the files in shared memory that the engine's processes had open or
            mapped after one of the mixtures.
    """

    answered: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    measured: list[dict[str, int]] = field(default_factory=list)
    shared_memory: set[str] = field(default_factory=set)


def answer_plainly(
    start: Callable[..., Engine], pool: list[Asked], **given: Any
) -> tuple[list[Given], set[str]]:
    """Let an engine without speculation answer the whole pool.

    Returns:
        The answers, and the names of the files in shared memory that its processes had in use.
    """
    engine = start(None, **given)
    try:
        served = [Served(each.number, 0, None, True, False) for each in pool]
        return engine.serve(served, pool), soak_held.used_by(soak_held.processes())
    finally:
        engine.close()


def soak(
    start: Callable[..., Engine],
    pool: list[Asked],
    expected: list[Given],
    record: Path,
    *,
    engine: str,
    seed: int,
    seconds: float,
    **given: Any,
) -> Report:
    """Serve mixtures of the pool for a time.

    Args:
        start: Starts the engine.
        pool: The requests.
        expected: Plain decoding's answers to them.
        record: File to which a line is appended for each mixture before it is served, and one
            with the wrong answers after it.
        engine: The engine's name.
        seed: Seed of the mixtures.
        seconds: How long to serve.
        given: What `start` takes.
    """
    before = soak_held.resources()
    running, report = start(engine, **given), Report()
    done, counted = Counter[str](), Counter[str]()
    warm_up = max(WARM_UP * seconds, WARM_UP_SECONDS)
    started, first = time.monotonic(), None
    for number, mixture in enumerate(make_mixtures(seed, pool, OPERATIONS[engine])):
        passed = time.monotonic() - started
        if first is None and passed > warm_up:
            first = _measure(running, pool, report)
        if passed > seconds:
            break
        _append(record, {"mixture": number, **asdict(mixture)})
        if mixture.before:
            _operate(running, mixture.before, counted)
            done[mixture.before] += 1
        found = running.serve(mixture.requests, pool)
        report.answered += len(found)
        _append(record, _judged(number, mixture, pool, expected, found))
        report.shared_memory |= soak_held.used_by(soak_held.processes())
    if first is not None:
        report.leaks = _leaks(first, _measure(running, pool, report))
    counted.update(running.counts())
    report.operations, report.counts = dict(done), dict(counted)
    running.close()
    ended = soak_held.resources()
    if first is not None:
        report.measured.append(ended)
    if (left := ended["processes"]) > before["processes"]:
        report.leaks.append(f"{left - before['processes']} processes outlive the engine")
    return report


def _operate(running: Engine, operation: str, counted: Counter[str]) -> None:
    """Do an operation, and add to `counted` what it takes from the worker's counters."""
    counted.update(running.counts())
    running.operate(operation)
    counted.subtract(running.counts())


def _measure(running: Engine, pool: list[Asked], report: Report) -> dict[str, int]:
    # The state of finished requests is released by the next step of the engine.
    short = next(each for each in pool if each.grammar is None and "n" not in each.sampling)
    running.serve([Served(short.number, 0, None, True, False)], pool)
    found = soak_held.resources()
    report.measured.append(found)
    return found | running.held()


def _leaks(first: dict[str, int], last: dict[str, int]) -> list[str]:
    bounds = {"memory": MEMORY_GROWTH, "open files": 0, "processes": 0}
    leaks = []
    for name in sorted(first.keys() | last.keys()):
        before, after = first.get(name, 0), last.get(name, 0)
        if name in bounds or name.startswith("ours: "):
            most = before + bounds.get(name, HELD_GROWTH)
        else:
            most = 0  # of a request, after all have ended
        if after > most:
            leaks.append(f"{name}: {after} at the end, {before} after the warm-up")
    return leaks


def _judged(
    number: int,
    mixture: Mixture,
    pool: list[Asked],
    expected: list[Given],
    found: list[Given],
) -> dict[str, Any]:
    wrong = []
    for served, given in zip(mixture.requests, found, strict=True):
        asked = pool[served.number]
        if reason := why_wrong(asked, served, expected[served.number], given):
            wrong.append({"why": reason, "request": asdict(asked), "served": asdict(served)})
    return {"mixture": number, "answered": len(found), "wrong": wrong}


def _append(record: Path, line: dict[str, Any]) -> None:
    with record.open("a") as out:
        out.write(json.dumps(line) + "\n")
