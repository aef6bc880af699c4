"""The requests that a worker serves, and the slots of SGLang's that they hold."""

from __future__ import annotations

from typing import Any, NamedTuple

from drafttree.sglang.state import are_parts


class Started(NamedTuple):
    """What a batch of prompts changes.

    Attributes:
        released: Slots of requests that are gone, or that start again.
        starting: Requests that start with this batch, and their slots.
        arrived: Requests of the batch that had not been seen before.
    """

    released: list[int]
    starting: list[tuple[Any, int]]
    arrived: list[Any]


class RunningRequests:
    """The requests whose prompts have been read, in whole or in part.

    Users name their requests, and may give the name of one that they aborted to another.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Any] = {}
        self._slots: dict[str, int] = {}
        # Requests of whose prompts only a part has been read.
        self._unread: set[str] = set()

    def start(self, batch: Any) -> Started:
        """Note the requests of a batch of prompts, and forget those that are gone."""
        released = self.forget_gone()
        arrived = [each for each in batch.reqs if self._requests.get(each.rid) is not each]
        starting = [
            (request, slot)
            for request, slot in zip(batch.reqs, batch.req_pool_indices_cpu.tolist(), strict=True)
            if not self._goes_on(request, slot)
        ]
        for request, slot in starting:
            released += self._take_slots([request.rid])
            self._slots[request.rid] = slot
            self._requests[request.rid] = request
        parts = zip(batch.reqs, are_parts(batch), strict=True)
        self._unread = {request.rid for request, is_part in parts if is_part}
        return Started(released, starting, arrived)

    def forget_gone(self) -> list[int]:
        """Forget the requests that finished or were retracted, and return their slots.

        Those that were retracted start again, or never come back: SGLang does not mark as finished
        what is aborted while it waits.
        """
        gone = [
            name
            for name, request in self._requests.items()
            if request.finished() or not _holds_kv(request)
        ]
        for name in gone:
            del self._requests[name]
        return self._take_slots(gone)

    def _take_slots(self, names: list[str]) -> list[int]:
        return [self._slots.pop(name) for name in names if name in self._slots]

    def _goes_on(self, request: Any, slot: int) -> bool:
        """Whether the last batch read a part of this request's prompt, in this slot."""
        name = request.rid
        if name not in self._unread or self._slots.get(name) != slot:
            return False
        return self._requests.get(name) is request


def _holds_kv(request: Any) -> bool:
    """Whether a request has a row of SGLang's slot table."""
    # Newer versions keep its number with what else is known of the request's KV.
    holder = request if hasattr(request, "req_pool_idx") else request.kv
    return holder.req_pool_idx is not None
