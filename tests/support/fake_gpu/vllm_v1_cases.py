"""Drafters within the step of vLLM's V1 host, requests, and the comparison of its two devices, for
the tests on the fake GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drafttree.testing.session import random_weights
from fake_gpu.comparison import assert_same
from fake_gpu.stand_ins import VOCAB
from fake_gpu.tensors import Gpu
from fake_gpu.vllm_v1 import Asked, Decoded, decode
from fake_gpu.vllm_v1_hosts import (
    CapturedHost,
    CapturedLayerHost,
    DraftModelHost,
    HiddenStateHost,
)

LYANNA = {"model": "none", "steps": 3, "width": 2, "nodes": 5, "resample_nodes": 3}
HOSTS: dict[str, Any] = {
    "rsd, beams": (DraftModelHost, {"model": "none", "tree": "beam:2x3"}),
    "rsd, in graphs": (CapturedHost, {"model": "none", "tree": "beam:2x3"}),
    "rsd, branches": (DraftModelHost, {"model": "none", "tree": "branch:2-2-1"}),
    "rsd, traversal": (
        DraftModelHost,
        {"model": "none", "tree": "branch:2-2-1", "verify": "traversal"},
    ),
    "rsd with tables": (
        DraftModelHost,
        {"model": "none", "tree": "beam:2x3", "tables": {"prime": False, "nodes": 5}},
    ),
    "lyanna": (HiddenStateHost, LYANNA),
    "lyanna, in graphs": (CapturedLayerHost, LYANNA),
    "lyanna of auto, in graphs": (CapturedLayerHost, {"model": "none", "steps": 2, "width": 2}),
    "lyanna, one tree at a time": (
        HiddenStateHost,
        {"model": "none", "steps": 3, "width": 2, "nodes": 5, "fusion": False},
    ),
    "lyanna with tables": (HiddenStateHost, LYANNA | {"tables": {"prime": False}}),
    "lyanna with tables, in graphs": (CapturedLayerHost, LYANNA | {"tables": {"prime": False}}),
}
MAIN = ["rsd, beams", "lyanna"]

WEIGHTS = random_weights(VOCAB, torch.Generator().manual_seed(1)).log()
GREEDY = {"temperature": 0.0}


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def asked(
    sizes: Sequence[tuple[int, int, int]], parameters: Sequence[dict[str, Any]]
) -> dict[str, Asked]:
    """Requests.

    Args:
        sizes: The length of each prompt, the number of tokens to emit, and the step of arrival.
        parameters: The sampling parameters of each.
    """
    return {
        f"request {number}": Asked(prompt(number, length), tokens, given, starts)
        for number, ((length, tokens, starts), given) in enumerate(
            zip(sizes, parameters, strict=True)
        )
    }


def both(
    host: Any,
    options: dict[str, Any],
    requests: dict[str, Asked],
    gpu: Gpu,
    *,
    waits: bool = False,
) -> Decoded:
    """Decode on the CPU and on the fake GPU, and compare."""
    torch.manual_seed(0)
    expected = decode(host, options, requests, WEIGHTS, None)
    torch.manual_seed(0)
    found = decode(host, options, requests, WEIGHTS, gpu, waits=waits)
    assert_same(expected, found, requests)
    assert found.mixed > 0
    return found
