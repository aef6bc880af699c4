"""Where a runner keeps what belongs to a request: slots, which stay when the batch is reordered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class RequestSlots:
    """The slots of requests by name; there are `count`, one for each that can run at once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._slots: dict[str, int] = {}

    def of(self, names: Sequence[str]) -> tuple[list[int], list[str]]:
        """The slots of all requests that run, and which of them had none so far."""
        arrived = [name for name in names if name not in self._slots]
        if arrived:
            if len(self._slots) + len(arrived) > self._count:
                # Sessions that pause hold slots too; they come back as new requests.
                self._slots = {name: self._slots[name] for name in names if name in self._slots}
            free = sorted(set(range(self._count)) - set(self._slots.values()))
            self._slots.update(zip(arrived, free[: len(arrived)], strict=True))
        return [self._slots[name] for name in names], arrived

    def free(self, names: Iterable[str]) -> list[int]:
        """Requests ended, were preempted, or begin anew; the slots that they had."""
        return [self._slots.pop(name) for name in names if name in self._slots]
