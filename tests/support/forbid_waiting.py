"""Lets the V2 model runner's part of a step fail where its host would wait for a GPU, on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VARIABLE = "TESTS_FORBID_WAITING"

ENVIRONMENT = {VARIABLE: "1"}

CHECKED = "no part of a step waited"
"""Line in the log of an engine after each checked call."""

WAITING = {
    # Under inference mode composite operations arrive whole.
    *("item", "_local_scalar_dense", "is_nonzero", "nonzero", "nonzero_numpy", "argwhere"),
    *("masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"),
}
"""Operations that read a value on the host, or whose result's shape is a value."""


class NoWaiting(TorchDispatchMode):
    """Raises an error at an operation for which the host would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in WAITING or (name == "where" and len(args) == 1):
            raise AssertionError(f"{func} waits for the device")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise AssertionError("repeat_interleave waits for the device")
        if name in ("index", "index_put_", "index_put") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        ):
            raise AssertionError("indexing by a mask waits for the device")
        return func(*args, **kwargs)


def enable() -> None:
    """Check what trees add to a step: its layout, its verification and the next draft."""
    from drafttree.vllm.v2.draft_model import DraftModelRunnerV2
    from drafttree.vllm.v2.hidden_state import HiddenStateRunnerV2
    from drafttree.vllm.v2.runner import TreeRunnerV2
    from drafttree.vllm.v2.speculator import TreeSpeculator

    for holder, name in (
        (DraftModelRunnerV2, "draft"),
        (HiddenStateRunnerV2, "draft"),
        (TreeRunnerV2, "prepare_attn"),
        (TreeRunnerV2, "sample"),
        (TreeSpeculator, "propose"),
    ):
        setattr(holder, name, _checked(getattr(holder, name)))


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    def tolist(self: torch.Tensor) -> Any:
        raise AssertionError("tolist waits for the device")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with NoWaiting(), mock.patch.object(torch.Tensor, "tolist", tolist):
            result = function(*args, **kwargs)
        print(CHECKED, function.__name__)
        return result

    return run
