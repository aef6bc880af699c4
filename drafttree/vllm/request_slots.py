"""Where a runner keeps what belongs to a request: slots, which stay when the batch is reordered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class RequestSlots:
    """The slots of requests by name; there are `count`, one for each that can run at once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._slots: dict[str, int] = {}

    def of(self, names: Sequence[str]) -> tuple[list[int], list[str], list[int]]:
        """The slots of all requests that run, which of them had none so far, and the slots of
        others that lost theirs to them."""
        arrived = [name for name in names if name not in self._slots]
        lost: list[int] = []
        if arrived:
            if len(self._slots) + len(arrived) > self._count:
                # Sessions that pause hold slots too; they come back as new requests.
                lost = self.free(self._slots.keys() - set(names))
            free = sorted(set(range(self._count)) - set(self._slots.values()))
            self._slots.update(zip(arrived, free[: len(arrived)], strict=True))
        return [self._slots[name] for name in names], arrived, lost

    def free(self, names: Iterable[str]) -> list[int]:
        """Requests ended, were preempted, or begin anew; the slots that they had."""
        return [self._slots.pop(name) for name in names if name in self._slots]
