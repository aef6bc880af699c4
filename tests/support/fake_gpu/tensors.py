"""Tensors that say `cuda`, and PyTorch's operations on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fake_gpu.copies import Copies
from fake_gpu.record import Record, Wait, place

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)

WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
"""Operations that read a value on the host, or whose result's shape is a value."""

ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_LAYOUT = {"device", "non_blocking", "pin_memory", "layout"}


class DeviceMismatchError(RuntimeError):
    """A tensor in the host's memory was given to an operation on the GPU."""


class HostWaitError(RuntimeError):
    """The host would have waited where it must not."""


class DeviceTensor(torch.Tensor):
    """A tensor that says that it is on a GPU.

    Attributes:
        host: Its values, which nothing but the fake GPU may read.
    """

    host: torch.Tensor
    gpu: Gpu

    @staticmethod
    def __new__(cls, host: torch.Tensor, gpu: Gpu) -> DeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=CUDA,
        )
        tensor.host, tensor.gpu = host, gpu
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        gpus = [each.gpu for each in tree_leaves((args, kwargs)) if isinstance(each, DeviceTensor)]
        return gpus[0].run(func, args, kwargs)

    def data_ptr(self) -> int:
        """The address that kernels get."""
        return self.host.data_ptr()

    def tolist(self) -> Any:
        """The values; the host waits for them."""
        self.gpu.copied_out("tolist")
        return self.host.tolist()

    def record_stream(self, stream: Any) -> None:
        """Nothing: there is one stream, and no memory is used again."""

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, as for a tensor on a GPU."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host!r})"


def held(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as the stream has them; nothing is waited for.

    For what stands in for the engine's own work on a GPU, and for comparisons.
    """
    return tensor.host if isinstance(tensor, DeviceTensor) else tensor


class Gpu:
    """One GPU with one stream.

    Attributes:
        record: What it was asked for.
        copies: Copies on their way.
        graph: The graph that is being captured; see `fake_gpu.graphs`.
    """

    def __init__(self) -> None:
        self.record = Record()
        self.copies = Copies()
        self.graph: Any = None
        self._forbids_waiting = False

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Refuse whatever the host would wait for.

        Raises:
            HostWaitError: In the line that would wait.
        """
        before, self._forbids_waiting = self._forbids_waiting, True
        try:
            yield
        finally:
            self._forbids_waiting = before

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Let what an engine itself does wait, and leave it out of the record."""
        before, self._forbids_waiting = self._forbids_waiting, False
        try:
            with self.recording():
                yield
        finally:
            self._forbids_waiting = before

    @contextmanager
    def recording(self) -> Iterator[Record]:
        """Count what is asked for in here alone."""
        before, self.record = self.record, Record()
        try:
            yield self.record
        finally:
            self.record = before

    def wait(self, what: str, until: int | None = None) -> None:
        """The host waits for the stream, or for its first `until` copies."""
        wait = Wait(what, place())
        self.record.waits.append(wait)
        if self.graph is not None:
            raise HostWaitError(f"{wait.what} at {wait.where}, while a graph is captured")
        if self._forbids_waiting:
            raise HostWaitError(f"{wait.what} at {wait.where}")
        self.copies.wait(until)

    def copied_out(self, what: str) -> None:
        """The host waits for a copy of values."""
        self.record.copies_out[place()] += 1
        self.wait(what)

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one of PyTorch's operations, on host tensors, on device tensors or between both."""
        name = func.overloadpacket.__name__
        if kwargs.get("pin_memory"):
            return self.copies.pin(func(*args, **{**kwargs, "pin_memory": False}))
        if name in ("_pin_memory", "pin_memory"):
            return self.copies.pin(args[0].clone())
        if name == "is_pinned":
            return not isinstance(args[0], DeviceTensor) and self.copies.is_pinned(args[0])
        if func._can_decompose():
            # Under inference mode composite operations arrive whole.
            with OnFakeGpu(self):
                return func.decompose(*args, **kwargs)
        if name == "_to_copy":
            return self._to_copy(args[0], **kwargs)
        if name == "copy_" and isinstance(args[0], DeviceTensor) != isinstance(
            args[1], DeviceTensor
        ):
            return self._copy_between(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        on_device = [each for each in tensors if isinstance(each, DeviceTensor)]
        if not on_device and not _is_cuda(kwargs.get("device")):
            return func(*args, **kwargs)
        if name == "detach_":
            return args[0]
        if torch.Tag.inplace_view in func.tags:
            func(*tree_map(_host, args), **kwargs)
            with no_dispatch():  # the shape of the tensor that wraps the values
                return func(*args, **kwargs)
        if on_device:
            self._check_operands(name, args, kwargs, tensors)
        host_kwargs = {
            key: torch.device("cpu") if key == "device" else _host(value)
            for key, value in kwargs.items()
        }
        host_args = tree_map(_host, args)
        result = func(*host_args, **host_kwargs)
        if self.graph is not None:
            self.graph.operated(func, host_args, host_kwargs, result)
        if name not in ALLOCATIONS and _launches(name, result, args):
            self.record.operated(name)
        given = {id(each.host): each for each in on_device}

        def wrap(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            same = given.get(id(value))
            return DeviceTensor(value, self) if same is None else same

        return tree_map(wrap, result)

    def _check_operands(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Refuse host tensors, and note operations for which the host waits."""
        if name in WAITING:
            if name == "_local_scalar_dense":
                self.copied_out("a value read on the host")
            else:
                self.wait(name)
        # Without its total the result's size is a value.
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.wait("repeat_interleave without output_size")
        if name in _INDEXING:
            self._check_index(name, args)
            return
        for each in tensors:
            if isinstance(each, DeviceTensor):
                continue
            if each.dim():
                raise DeviceMismatchError(f"{name} of a host tensor {[*each.shape]} at {place()}")
            if name == "where":
                self.record.copies_in[place()] += 1
                self.wait("where with a scalar of the host's")

    def _check_index(self, name: str, args: Sequence[Any]) -> None:
        values = args[2] if len(args) > 2 else None
        indexed = [args[0]] if values is None or not values.dim() else [args[0], values]
        if not all(isinstance(each, DeviceTensor) for each in indexed):
            raise DeviceMismatchError(f"{name} of a host tensor at {place()}")
        indices = [each for each in args[1] if each is not None]
        masks = [each for each in indices if each.dtype in (torch.bool, torch.uint8)]
        # One number written through one mask is a masked fill.
        fills = values is not None and len(indices) == 1 and not values.dim()
        if masks and not (fills and not isinstance(values, DeviceTensor)):
            self.wait(f"{name} by a mask")
        if not all(isinstance(each, DeviceTensor) for each in indices):
            self.record.copies_in[place()] += 1
            self.wait(f"{name} by a tensor of the host's")

    def _to_copy(self, source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """A copy on the same or the other device, perhaps of another data type."""
        others = {key: value for key, value in kwargs.items() if key not in _LAYOUT}
        is_there, device = isinstance(source, DeviceTensor), kwargs.get("device")
        goes_there = is_there if device is None else _is_cuda(device)
        asynchronous = kwargs.get("non_blocking", False)
        values: torch.Tensor = aten._to_copy(_host(source), **others)
        if goes_there and not is_there:
            self._sent(source, asynchronous)
        elif is_there and not goes_there:
            self._received(self.copies.pin(values), values.clone(), asynchronous)
        elif is_there:
            self.record.operated("_to_copy")
            if self.graph is not None:
                self.graph.operated(aten._to_copy, (_host(source),), others, values)
        return DeviceTensor(values, self) if goes_there else values

    def _copy_between(
        self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        if isinstance(target, DeviceTensor):
            target.host.copy_(source)
            self._sent(source, non_blocking)
        else:
            self._received(target, _host(source), non_blocking)
        return target

    def _sent(self, source: torch.Tensor, asynchronous: bool) -> None:
        assert self.graph is None, "a copy from the host is not part of a graph"
        self.record.copies_in[place()] += 1
        if not asynchronous:
            self.wait("a copy from the host")
        elif not self.copies.is_pinned(source):
            self.wait("a copy from memory that is not pinned")
        else:
            self.copies.start_in(source, place())

    def _received(self, target: torch.Tensor, values: torch.Tensor, asynchronous: bool) -> None:
        self.record.copies_out[place()] += 1
        if asynchronous and self.copies.is_pinned(target):
            self.copies.start_out(target, values, place())
            return
        self.wait("a copy to the host")
        target.copy_(values)


class OnFakeGpu(TorchDispatchMode):
    """Sends all of PyTorch's operations to a fake GPU, which leaves those of the host alone."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._gpu.run(func, args, kwargs or {})


def _host(value: Any) -> Any:
    """The host's tensor of a device tensor; anything else as it is."""
    if isinstance(value, (list, tuple, dict)):
        return tree_map(_host, value)
    return value.host if isinstance(value, DeviceTensor) else value


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _launches(name: str, result: Any, args: Sequence[Any]) -> bool:
    """Whether an operation is more than a view of its first argument."""
    if name == "copy_":
        # As in `x[:2] += y`, which copies a part of a tensor to itself in the end.
        target, source = map(_host, args[:2])
        return not (
            target.data_ptr() == source.data_ptr()
            and (target.dtype, target.shape, target.stride())
            == (source.dtype, source.shape, source.stride())
        )
    return name.endswith("_") or not _is_view(result, args)


def _is_view(result: Any, args: Sequence[Any]) -> bool:
    """Whether a result shares the memory of the operation's first argument, or is no tensor."""
    if isinstance(result, (list, tuple)):
        return all(_is_view(each, args) for each in result)
    if not isinstance(result, torch.Tensor):
        return True
    first = _host(args[0]) if args else None
    return isinstance(first, torch.Tensor) and (
        result.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    )
