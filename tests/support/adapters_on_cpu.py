"""LoRA adapters in SGLang on a CPU.

It moves adapters through pinned memory, which PyTorch has with an accelerator only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VARIABLE = "TESTS_ADAPTERS_ON_CPU"


def enable(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let PyTorch allocate ordinary memory where pinned memory is asked for.

    Args:
        replace: Sets an attribute of an object.
    """
    for name in ("empty", "tensor", "zeros"):
        replace(torch, name, _without_pinning(getattr(torch, name)))
    replace(torch.Tensor, "pin_memory", lambda self: self)


def _without_pinning(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create_unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return create(*args, **kwargs)

    return create_unpinned
