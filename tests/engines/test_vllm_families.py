"""Families of models beside Llama: tokens in vLLM with draft trees equal those without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lyanna_parts import drafter_for
from quantised_models import FORMATS, needs_avx512, quantise
from random_prompts import some_prompts
from tiny_families import FAMILIES, make_tiny_family
from tiny_models import make_first_layers
from vllm_runs import Answer, Case, run_vllm

from drafttree.quantization import quantize
from lyanna_plugin.checkpoint import save

GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 0.5, "max_tokens": 32, "ignore_eos": True}

TREES = {"method": "token_recycling"}


HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()

DTYPES = {} if torch.cpu._is_amx_tile_supported() else {"int8": "float32"}
"""Data types of quantised models' other weights, where it is not the one of 4-bit kernels. With AMX
the engine's kernel for 8-bit integers takes bfloat16 alone. Without AVX-512, attention along trees
rounds otherwise than the engine's in bfloat16, and activations that are rounded to 8-bit floats
then often differ."""
if not HAS_AVX512:
    DTYPES |= {"fp8": "float32", "fp8-channels": "float32"}


def skip_where_unserved(form: str) -> None:
    """Skip a test on a CPU on which vLLM does not serve a format of weights."""
    if needs_avx512(form) and not HAS_AVX512:
        pytest.skip(f"vLLM's kernel for {form} weights needs AVX-512")


@pytest.mark.parametrize(
    "form",
    [
        name if name in ("int8", "int4") else pytest.param(name, marks=pytest.mark.full)
        for name in FORMATS
    ],
)
def test_quantised_weights(
    form: str, tiny_llama: Path, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    skip_where_unserved(form)
    model = quantise(tiny_llama, tmp_path, form)
    equals_plain_decoding(model, proves_drafting, dtype=DTYPES.get(form, "bfloat16"))


def test_a_quantised_copy_of_the_target_as_its_draft_model(
    tiny_llama: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    quantize(tiny_llama, draft, report=lambda line: None)
    cases = [Case(some_prompts(8), GREEDY)]
    dtype = DTYPES.get("int8", "bfloat16")
    plain, _ = run_vllm(tiny_llama, cases, dtype=dtype)
    method = {"method": "rsd", "model": str(draft)}
    drafted, _ = run_vllm(tiny_llama, cases, method, dtype=dtype)
    assert drafted[0].tokens == plain[0].tokens
    assert drafted[0].counters["accepted_tokens"] > drafted[0].counters["steps"]


@pytest.mark.full
def test_rsd_with_a_mixture_of_experts(
    tmp_path_factory: pytest.TempPathFactory, proves_drafting: Callable[[Answer], None]
) -> None:
    """The draft model is the target's first layer."""
    target = make_tiny_family("qwen3_moe", tmp_path_factory.mktemp("mixture"))
    draft = make_first_layers(target, tmp_path_factory.mktemp("draft"), 1)
    case = Case(some_prompts(8), GREEDY, rounds=2)
    (plain,), _ = run_vllm(target, [case])
    method = {"method": "rsd", "model": str(draft), "tree": "beam:3x4"}
    (drafted,), _ = run_vllm(target, [case], method)
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)


@pytest.mark.full
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_lyanna_with_quantised_weights(form: str, tiny_llama: Path, tmp_path: Path) -> None:
    skip_where_unserved(form)
    (tmp_path / "target").mkdir()
    model = quantise(tiny_llama, tmp_path / "target", form)
    save(drafter_for(model), tmp_path / "drafter")
    cases = [Case(some_prompts(12), GREEDY)]
    engine = {"dtype": DTYPES.get(form, "bfloat16")}
    plain, _ = run_vllm(model, cases, **engine)
    method = {"method": "lyanna", "model": str(tmp_path / "drafter"), "nodes": 12}
    drafted, _ = run_vllm(model, cases, method, **engine)
    assert drafted[0].tokens == plain[0].tokens
    assert drafted[0].counters["accepted_tokens"] > 0


LONGER = (
    *("mixtral", "mistral", "heads_of_80", "heads_of_112", "wide_window", "window_below_the_depth"),
    *("gemma2", "gemma3"),
)
"""Families that the full product tests, as others of their kind are tested always."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.full) if name in LONGER else name for name in FAMILIES],
)
def test_tokens_are_those_of_plain_decoding(
    family: str, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    equals_plain_decoding(make_tiny_family(family, tmp_path), proves_drafting)


def equals_plain_decoding(
    model: Path, proves_drafting: Callable[[Answer], None], **engine: Any
) -> None:
    cases = [
        Case(some_prompts(8), GREEDY),
        Case(some_prompts(4, seed=4), GREEDY, together=False),
        Case(some_prompts(8, seed=5), [SEEDED | {"seed": seed} for seed in range(8)]),
    ]
    plain, _ = run_vllm(model, cases, **engine)
    drafted, _ = run_vllm(model, cases, TREES, **engine)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
