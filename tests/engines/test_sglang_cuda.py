"""Greedy decoding in float32 on CUDA gives the same tokens with draft trees as without."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sglang_runs import Answer, Case, run_sglang

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_tokens_equal_plain_decoding(
    tiny_llama: Path,
    proves_drafting: Callable[[Answer], None],
    backend: str,
    graphs: bool,
    overlap: bool,
) -> None:
    draw = random.Random(3)
    prompts = [[draw.randrange(2, 512) for _ in range(draw.randrange(4, 60))] for _ in range(24)]
    cases = [Case(prompts, GREEDY), Case(prompts, GREEDY, together=False)]
    settings = {
        "device": "cuda",
        "attention_backend": backend,
        "sampling_backend": "pytorch",
        "disable_cuda_graph": not graphs,
        "disable_overlap_schedule": not overlap,
        "variables": {"SGLANG_USE_CPU_ENGINE": "0"},
    }
    plain, _ = run_sglang(tiny_llama, cases, drafted=False, **settings)
    drafted, _ = run_sglang(tiny_llama, cases, **settings)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
