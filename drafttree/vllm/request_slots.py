"""Slots of requests: indices of their state, which stay the same when the batch is reordered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class RequestSlots:
    """Assigns slots to requests by name.

    Args:
        max_requests: Number of slots, one for each request that can run at once.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._slots: dict[str, int] = {}

    def of(self, names: Sequence[str]) -> tuple[list[int], list[str], list[int]]:
        """Return the slots of the running requests, and assign slots to those without.

        Args:
            names: All running requests.

        Returns:
            The slot of each request, the requests that had none before, and the slots that were
            taken from other requests for them.
        """
        arrived = [name for name in names if name not in self._slots]
        taken: list[int] = []
        if arrived:
            if len(self._slots) + len(arrived) > self._max_requests:
                # Paused streaming sessions occupy slots too; they come back as new requests.
                taken = self.free(self._slots.keys() - set(names))
            free = sorted(set(range(self._max_requests)) - set(self._slots.values()))
            self._slots.update(zip(arrived, free[: len(arrived)], strict=True))
        return [self._slots[name] for name in names], arrived, taken

    def free(self, names: Iterable[str]) -> list[int]:
        """Free the slots of requests that finished, were preempted or restart; returns them."""
        return [self._slots.pop(name) for name in names if name in self._slots]
