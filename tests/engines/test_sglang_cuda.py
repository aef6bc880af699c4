"""Greedy decoding in float32 on CUDA gives the same tokens with draft trees as without."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lyanna_parts import drafter_for
from sglang_runs import Answer, Case, run_sglang

from drafttree.sglang.versions import is_tested
from lyanna_plugin.checkpoint import save

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# SGLang's own Triton kernels would multiply float32 in TF32.
ON_GPU = {"SGLANG_USE_CPU_ENGINE": "0", "TRITON_F32_DEFAULT": "ieee"}
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
        "variables": ON_GPU,
    }
    plain, _ = run_sglang(tiny_llama, cases, drafted=False, **settings)
    drafted, _ = run_sglang(tiny_llama, cases, **settings)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("method", ["rsd", "lyanna"])
def test_greedy_tokens_of_methods_with_a_model_equal_plain_decoding(
    tiny_llama: Path, tmp_path: Path, method: str, backend: str
) -> None:
    if not is_tested(pytest.importorskip("sglang").__version__):
        pytest.skip("this version serves methods without a model alone")
    draw = random.Random(3)
    prompts = [[draw.randrange(2, 512) for _ in range(draw.randrange(4, 60))] for _ in range(12)]
    cases = [Case(prompts, GREEDY), Case(prompts[:2], GREEDY, together=False)]
    settings = {
        "device": "cuda",
        "attention_backend": backend,
        "sampling_backend": "pytorch",
        "variables": ON_GPU,
    }
    draft_model = tiny_llama
    if method == "lyanna":
        draft_model = tmp_path / "drafter"
        save(drafter_for(tiny_llama), draft_model)
    plain, _ = run_sglang(tiny_llama, cases, drafted=False, **settings)
    drafted, _ = run_sglang(tiny_llama, cases, method=method, draft_model=draft_model, **settings)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        assert with_trees.counters["accepted_tokens"] > 0
