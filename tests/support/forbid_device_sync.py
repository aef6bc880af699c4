"""Lets an engine on a GPU fail if drafttree's part of a step synchronises with the device.

One wait per step is not detected: the host waits for the event after which the drafts have been
copied, because the engine's scheduler counts them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

VARIABLE = "TESTS_FORBID_DEVICE_SYNC"

ENVIRONMENT = {VARIABLE: "1"}


def enable() -> None:
    """Let the tree runner's own part of a step raise an error where it synchronises."""
    from drafttree.vllm.attention.triton import TritonTreeMetadataBuilder
    from drafttree.vllm.drafters.model_free import ModelFreeRunner
    from drafttree.vllm.step import StepTrees

    for holder, names in (
        (StepTrees, ("masks",)),
        (ModelFreeRunner, ("_sample", "propose_draft_token_ids")),
        (TritonTreeMetadataBuilder, ("build",)),
    ):
        for name in names:
            setattr(holder, name, _without_sync(getattr(holder, name)))


def _without_sync(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return run
