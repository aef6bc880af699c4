"""Counts the device operations that draft trees add to a step of the V2 model runner, on a CPU.

All kernels run as on a GPU, in Triton's interpreter, so the operations are those of a GPU:
launches of kernels, and PyTorch's operations that are more than views. What the engine does itself,
such as the target's forward and the sampler, is not counted.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton_on_cpu import use_for_all_operations

VARIABLE = "TESTS_DEVICE_OPERATIONS"
"""Environment variable: file to which a line is appended for each part of a step."""

ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
"""Operations that launch nothing, beside views of their first argument."""


class _Counted(TorchDispatchMode):
    """Appends the names of operations to a list."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in ALLOCATIONS and (name.endswith("_") or not _is_view(result, args)):
            self.names.append(name)
        return result


def _is_view(result: Any, args: Sequence[Any]) -> bool:
    """Whether a result shares the memory of the operation's first argument, or is no tensor."""
    if isinstance(result, (list, tuple)):
        return all(_is_view(each, args) for each in result)
    if not isinstance(result, torch.Tensor):
        return True
    given = args[0] if args and isinstance(args[0], torch.Tensor) else None
    return given is not None and (
        result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    )


_counting: list[_Counted] = []


@contextmanager
def _paused() -> Iterator[None]:
    """What happens here is not counted."""
    mode = _counting[-1] if _counting else None
    if mode is None:
        yield
        return
    names, mode.names = mode.names, []
    try:
        yield
    finally:
        mode.names = names


def _pausing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _paused():
            return function(*args, **kwargs)

    return run


def enable() -> None:
    """Count the operations of this process's steps."""
    from triton.runtime import interpreter
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from drafttree.vllm.v2 import runner
    from drafttree.vllm.v2.speculator import TreeSpeculator

    use_for_all_operations()
    launch = interpreter.GridExecutor.__call__

    def counted_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _counting:
            _counting[-1].names.append(self.fn.__name__)
        with _paused():
            return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = counted_launch
    stock = model_runner.GPUModelRunner
    stock.prepare_attn = _pausing(stock.prepare_attn)
    stock.load_model = _with_paused_logits(stock.load_model)
    Sampler.sample = _pausing(Sampler.sample)
    runner.get_num_sampled_and_rejected = _pausing(runner.get_num_sampled_and_rejected)
    for holder, name in (
        (runner.TreeRunnerV2, "prepare_attn"),
        (runner.TreeRunnerV2, "sample"),
        (TreeSpeculator, "propose"),
    ):
        setattr(holder, name, _counting_in(name, getattr(holder, name)))


def _with_paused_logits(load_model: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        load_model(self, *args, **kwargs)
        self.model.compute_logits = _pausing(self.model.compute_logits)

    return load


def _counting_in(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Counted([]) as mode:
            _counting.append(mode)
            try:
                return function(*args, **kwargs)
            finally:
                _counting.pop()
                with Path(os.environ[VARIABLE]).open("a") as file:
                    file.write(json.dumps([name, mode.names]) + "\n")

    return run
