"""Every Triton kernel compiles for A100s and Hopper GPUs, fits into their shared memory, spills no
registers, and is compiled once for all batch sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import bench_kernels
import pytest
import torch
from tree_kernels import tree_attention
from tree_kernels.attention_variant import AttentionVariant

pytest.importorskip("triton", reason="Triton is not installed")

from gpu_compiler import MOST_SHARED, Compiled, compile_only, usage

CASES = {name: case for name, case in bench_kernels.KERNELS.items() if "cuda" in case.devices}


SPILLS: dict[tuple[str, int], int] = {}
"""Bytes that a thread of a kernel spills, by its name and the compute capability; else none."""


def check_fits(compiled: Compiled, capability: int) -> None:
    """Check that there are kernels, and that each fits into a GPU's registers and shared memory."""
    assert compiled.kernels
    for name, kernel in zip(compiled.names, compiled.kernels, strict=True):
        assert kernel.metadata.target.arch == capability
        assert kernel.metadata.shared <= MOST_SHARED[capability]
        assert usage(kernel).stack <= SPILLS.get((name, capability), 0), name


@pytest.mark.parametrize("capability", MOST_SHARED)
@pytest.mark.parametrize("name", CASES)
def test_it_compiles_and_fits(name: str, capability: int) -> None:
    case = CASES[name]
    work = case.make(**case.sizes[0])
    with compile_only(capability) as compiled, torch.inference_mode():
        work.ours()
    check_fits(compiled, capability)


@pytest.mark.parametrize("name", CASES)
def test_one_compilation_serves_all_batch_sizes(name: str) -> None:
    """A compilation while serving would block all requests for a second or more."""
    case = CASES[name]
    batch = "requests" if "requests" in case.quick else "rows"
    works = [case.make(**{**case.quick, batch: size}) for size in (1, 2, 3, 7, 16, 33)]
    with compile_only() as compiled, torch.inference_mode():
        for work in works:
            work.ours()
    assert compiled.programs() == len(set(compiled.names))


@pytest.mark.parametrize("window", [128, 0])
def test_windows_soft_caps_and_sinks_compile(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a window, what flash attention has read is merged too."""
    variant = AttentionVariant(window, 50.0)
    plain = tree_attention.tree_attention

    def varied(*given: Any, **named: Any) -> torch.Tensor:
        sinks = torch.zeros(given[0].shape[1])
        return plain(*given, variant=replace(variant, sinks=sinks), **named)

    monkeypatch.setattr(tree_attention, "tree_attention", varied)
    case = CASES["tree_attention" if window else "tree_attention_after_flash"]
    work = case.make(**case.sizes[0])
    with compile_only() as compiled, torch.inference_mode():
        work.ours()
    check_fits(compiled, 90)


@pytest.mark.parametrize("capability", MOST_SHARED)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(9, 3, 64), (8, 8, 80), (28, 4, 128)])
@pytest.mark.parametrize("tree_size", [8, 128])
def test_attention_after_flash_compiles_for_other_models(
    tree_size: int, heads: int, kv_heads: int, head_size: int, capability: int
) -> None:
    size = {"requests": 1, "tree_size": tree_size, "context": 64}
    shape = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size}
    work = CASES["tree_attention_after_flash"].make(**size, **shape)
    with compile_only(capability) as compiled, torch.inference_mode():
        work.ours()
    check_fits(compiled, capability)


@pytest.mark.parametrize("capability", MOST_SHARED)
@pytest.mark.parametrize("rows", [1, 4])
def test_attention_over_pages_of_one_token_compiles(rows: int, capability: int) -> None:
    """So are the KV slots of SGLang, in which a drafter's layer attends from a few rows."""
    requests, context = 8, 512
    query = torch.zeros(requests * rows, 32, 128, dtype=torch.bfloat16)
    cache = torch.zeros(requests * context, 1, 8, 128, dtype=torch.bfloat16)
    table = torch.arange(requests * context, dtype=torch.int32).view(requests, context)
    starts = rows * torch.arange(requests + 1, dtype=torch.int32)
    lengths, counts = (torch.full((requests,), each, dtype=torch.int32) for each in (context, rows))
    masks = torch.zeros(len(query), 1, dtype=torch.int32)
    paged = cache, cache, table, starts, lengths, counts, masks
    with compile_only(capability) as compiled, torch.inference_mode():
        tree_attention.tree_attention(query, *paged, 0.1, rows)
    check_fits(compiled, capability)


def test_few_compilations_of_attention_serve_prompts_of_all_lengths() -> None:
    """Short prompts share their KV among programs, long ones do not, whatever their lengths."""
    page, pages = 16, 512
    cache = torch.zeros(pages, page, 12, 64, dtype=torch.bfloat16)
    table = torch.zeros(1, pages, dtype=torch.int32)
    with compile_only() as compiled, torch.inference_mode():
        for rows in (33, 70, 96, 100, 200, 400, 700, 1500, 3000):
            query = torch.zeros(rows, 36, 64, dtype=torch.bfloat16)
            starts, lengths = (
                torch.tensor(each, dtype=torch.int32) for each in ([0, rows], [rows])
            )
            for words in (1, 2, 3):
                masks = torch.zeros(rows, words, dtype=torch.int32)
                paged = cache, cache, table, starts, lengths, lengths, masks
                tree_attention.tree_attention(query, *paged, 0.1, rows)
    assert compiled.programs() == 3
