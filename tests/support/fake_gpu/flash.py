"""vLLM's flash attention on the fake GPU, in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flash_stand_in
import torch

from fake_gpu.tensors import DeviceTensor, Gpu, held


@contextmanager
def flash_on(gpu: Gpu, version: int | None) -> Iterator[None]:
    """Let vLLM find a version of flash attention on the fake GPU; None for none."""
    if version is None:
        yield
        return

    def launch(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        gpu.record.launched("flash_attn_varlen_func")
        tensors = [each for each in given.values() if isinstance(each, torch.Tensor)]
        assert all(isinstance(each, DeviceTensor) for each in tensors)
        values = {
            name: held(each) if isinstance(each, torch.Tensor) else each
            for name, each in given.items()
        }
        _, log_sums = flash_stand_in.flash_attn_varlen_func(**values)
        if gpu.graph is not None:
            gpu.graph.launched(
                lambda: log_sums.copy_(flash_stand_in.flash_attn_varlen_func(**values)[1])
            )
        return given["out"], DeviceTensor(log_sums, gpu)

    with flash_stand_in.in_use(version, launch):
        yield
