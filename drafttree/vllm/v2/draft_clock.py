"""How long a device drafts within a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch


class DraftClock:
    """Measures the drafts of one step, without waiting for the device.

    On a CPU the host's time is the device's.

    Args:
        device: The device that drafts.

    Attributes:
        read_tokens: Tokens that the drafter's model had missed, and has read while drafting.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._drafting: list[tuple[Any, Any]] = []
        self._reading: list[tuple[Any, Any]] = []
        self.read_tokens = 0

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Drafting is under way, in a few parts of the step one after another."""
        started = self._mark()
        yield
        self._drafting.append((started, self._mark()))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While drafting, the model reads what it had missed."""
        started = self._mark()
        yield
        self._reading.append((started, self._mark()))

    def seconds(self) -> tuple[float, float]:
        """Time of drafting, and of reading what was missed, which is no part of the former.

        To be asked for when what the step has sampled is on the host.
        """
        reading = sum(map(self._between, self._reading))
        return max(sum(map(self._between, self._drafting)) - reading, 0.0), reading

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _between(self, marks: tuple[Any, Any]) -> float:
        started, ended = marks
        if self._device.type == "cpu":
            return float(ended - started)
        return float(started.elapsed_time(ended)) / 1e3
