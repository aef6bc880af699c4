"""Fails an engine on a GPU whose host waits for the device in a place of ours.

One wait a step it does not see: the host waits for the event that says the drafts are there, as the
engine's scheduler counts them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

VARIABLE = "TESTS_NO_WAITING"

ENVIRONMENT = {VARIABLE: "1"}


def forbid_waiting() -> None:
    """Let what our runner adds to a step fail where it waits."""
    from drafttree.vllm.attention.triton import TritonTreeMetadataBuilder
    from drafttree.vllm.drafters.model_free import ModelFreeRunner

    for holder, names in (
        (ModelFreeRunner, ("_step_masks", "_verify", "_move_kv")),
        (ModelFreeRunner, ("propose_draft_token_ids",)),
        (TritonTreeMetadataBuilder, ("build",)),
    ):
        for name in names:
            setattr(holder, name, _without_waiting(getattr(holder, name)))


def _without_waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return run
