"""Copies between the host and the GPU that the host does not wait for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


class ChangedInFlightError(RuntimeError):
    """The host changed pinned memory while a copy was reading it."""


@dataclass(frozen=True)
class _Copy:
    """A copy on its way.

    Attributes:
        host: The host's side.
        values: What the copy carries: the values when the stream reached it.
        where: The line that started it.
    """

    host: torch.Tensor
    values: torch.Tensor
    where: str


class Copies:
    """The copies of one stream; the host sees what it waited for and nothing else."""

    def __init__(self) -> None:
        self._out: list[_Copy] = []
        self._in: list[_Copy] = []
        self._delivered = 0
        # By storage. They are kept, or another tensor could get the same address.
        self._pinned: dict[int, torch.Tensor] = {}

    @property
    def started(self) -> int:
        """Number of copies to the host that were started so far."""
        return self._delivered + len(self._out)

    @property
    def arrived(self) -> int:
        """Number of copies to the host that have arrived, as the host waited for them."""
        return self._delivered

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let a tensor's memory count as pinned."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host's is in pinned memory."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    def start_out(self, target: torch.Tensor, source: torch.Tensor, where: str) -> None:
        """Start a copy to pinned memory, which holds garbage until it is waited for."""
        self._out.append(_Copy(target, source.to(target.dtype, copy=True), where))
        _fill_with_garbage(target)

    def start_in(self, source: torch.Tensor, where: str) -> None:
        """Start a copy from pinned memory, which must not change until something is waited for."""
        self._in.append(_Copy(source, source.clone(), where))

    def wait(self, until: int | None = None) -> None:
        """Let copies arrive.

        Args:
            until: Number of copies to the host that have arrived then; None for all.

        Raises:
            ChangedInFlightError: The source of a copy to the GPU changed in the meantime.
        """
        count = self.started if until is None else until
        while self._delivered < count:
            copy = self._out.pop(0)
            with torch.inference_mode():
                copy.host.copy_(copy.values)
            self._delivered += 1
        sent, self._in = self._in, []
        for copy in sent:
            if not _same_bytes(copy.host, copy.values):
                raise ChangedInFlightError(
                    f"pinned memory changed before it was read: {copy.where}"
                )


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    # A tensor of one element counts as contiguous with any strides.
    form = torch.contiguous_format
    both = (each.clone(memory_format=form).view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*both)


def _fill_with_garbage(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3)
