"""Drafters within the step of vLLM's V1 host, and requests, for the tests on the fake GPU."""

from __future__ import annotations

from typing import Any

import torch

from drafttree.testing.session import random_weights
from fake_gpu.vllm_v1_hosts import DraftModelHost, HiddenStateHost
from fake_gpu.vllm_v1_stock import VOCAB

HOSTS: dict[str, Any] = {
    "rsd, beams": (DraftModelHost, {"model": "none", "tree": "beam:2x3"}),
    "rsd, branches": (DraftModelHost, {"model": "none", "tree": "branch:2-2-1"}),
    "rsd, traversal": (
        DraftModelHost,
        {"model": "none", "tree": "branch:2-2-1", "verify": "traversal"},
    ),
    "lyanna": (
        HiddenStateHost,
        {"model": "none", "steps": 3, "width": 2, "nodes": 5, "resample_nodes": 3},
    ),
    "lyanna, one tree at a time": (
        HiddenStateHost,
        {"model": "none", "steps": 3, "width": 2, "nodes": 5, "fusion": False},
    ),
}
MAIN = ["rsd, beams", "lyanna"]

WEIGHTS = random_weights(VOCAB, torch.Generator().manual_seed(1)).log()
GREEDY = {"temperature": 0.0}


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()
