"""On the fake GPU, penalties in SGLang are those of the CPU, and the host never waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu.tensors import DeviceTensor, Gpu
from sglang_penalty_requests import penalty_request

pytest.importorskip("sglang", reason="SGLang is not installed here")

from drafttree.sglang.penalties import Penalties
from drafttree.transfer import on_device

VOCABULARY = 20


def penalised(device: torch.device) -> list[list[float]]:
    """Logits after requests have started, one of them again, and emitted some tokens."""

    def tensor(array: Any) -> torch.Tensor:
        return on_device(np.array(array, np.int64), device)

    penalties = Penalties(4, VOCABULARY, device)
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1)).numpy()
    penalties.start([(penalty_request([1, 2], presence_penalty=0.5, repetition_penalty=1.3), 2)])
    penalties.start(
        [
            (penalty_request([4, 4, 8], frequency_penalty=0.3, min_new_tokens=9), 0),
            (penalty_request([], min_new_tokens=2), 3),
        ]
    )
    slots = tensor([2, 0, 3])
    penalties.add(slots, tensor([[6, -1], [4, 9], [1, 1]]))
    given = on_device(logits, device)
    penalties.apply(given, slots, tensor([[8], [-1], [2]]))
    return (given.host if isinstance(given, DeviceTensor) else given).tolist()


def test_penalties_start_and_are_applied_without_a_wait(gpu: Gpu) -> None:
    with torch.compiler.set_stance("force_eager"):
        expected = penalised(torch.device("cpu"))
        with gpu.no_waiting():
            found = penalised(torch.device("cuda"))
    assert found == expected
    assert not torch.tensor(expected).isfinite().all(), "no token was forbidden"
