"""On a GPU, vLLM is configured to run whole trees as CUDA graphs, and is otherwise unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import configured_for_cuda
import pytest
from tiny_families import make_tiny_family
from vllm_runs import ENVIRONMENT

OURS = {"method": "token_recycling", "prime": False}


def configured(
    *arguments: dict[str, Any], variables: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(configured_for_cuda.__file__), json.dumps(arguments)],
        env=os.environ | ENVIRONMENT | (variables or {}),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"mode"')]


def test_whole_trees_are_captured_on_v1(tiny_llama: Path) -> None:
    model = {"model": str(tiny_llama), "max_model_len": 512}
    few = {"nodes": 15}
    rsd = {"method": "rsd", "model": str(tiny_llama), "tree": "beam:3x5"}
    trees, small, limited, sized, off, drafts, plain = configured(
        {**model, "speculative_config": OURS},
        {**model, "speculative_config": OURS | few},
        {**model, "speculative_config": OURS, "max_num_batched_tokens": 512},
        {**model, "speculative_config": OURS | few, "cudagraph_capture_sizes": [16, 320]},
        {**model, "speculative_config": OURS, "compilation_config": {"cudagraph_mode": "NONE"}},
        {**model, "speculative_config": rsd},
        model,
        variables={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    )
    graphs = trees.pop("graphs")
    assert {int(tokens): tuple(graph) for tokens, graph in graphs.items()} == {
        1: ("PIECEWISE", 1),
        3: ("PIECEWISE", 4),
        8: ("PIECEWISE", 8),
        64: ("PIECEWISE", 64),
        81: ("FULL", 81),
        82: ("PIECEWISE", 162),
        162: ("FULL", 162),
        4096: ("NONE", 4096),
    }
    assert trees == {
        "mode": "FULL_AND_PIECEWISE",
        "sizes": [81 * requests for requests in range(1, 17)],
        "backend": "TRITON_ATTN",
        "worker": "drafttree.vllm.gpu_worker.TreeGPUWorker",
        "asynchronous": False,
    }
    assert small["sizes"] == [16 * requests for requests in (*range(1, 17), 24, 32)]
    assert limited["sizes"] == [81 * requests for requests in range(1, 7)]
    assert sized["sizes"] == [16, 320]
    assert sized["graphs"]["1"] == ["PIECEWISE", 16]
    assert off["mode"] == "NONE"
    assert off["graphs"]["1"] == ["NONE", 1]
    assert drafts["worker"] == "drafttree.vllm.gpu_worker.TreeGPUWorker"
    assert (drafts["sizes"], drafts["backend"]) == (small["sizes"], "TRITON_ATTN")
    assert plain["backend"] is None
    assert plain["sizes"][:3] == [1, 2, 4]
    assert not plain["worker"].startswith("drafttree")


def test_chains_run_on_the_engines_own_attention(tiny_llama: Path, tmp_path: Path) -> None:
    """A whole chain of each request is one graph; its attention backend stays the engine's."""
    latent = make_tiny_family("deepseek_v2", tmp_path)
    model = {"max_model_len": 512, "dtype": "bfloat16", "speculative_config": OURS}
    mla, flash, trees = configured(
        {**model, "model": str(latent)},
        {**model, "model": str(tiny_llama), "attention_backend": "FLASH_ATTN"},
        {**model, "model": str(tiny_llama), "attention_backend": "TRITON_ATTN"},
    )
    for chains in (mla, flash):
        assert chains["worker"] == "drafttree.vllm.chains.gpu_worker.ChainGPUWorker"
        assert chains["sizes"][:2] == [32, 64]
        assert chains["graphs"]["64"] == ["FULL", 64]
        assert chains["graphs"]["1"] == ["PIECEWISE", 1]
    assert mla["backend"] is None
    assert flash["backend"] == "FLASH_ATTN"
    assert trees["worker"] == "drafttree.vllm.v2.gpu_worker.TreeGPUWorkerV2"


def test_v2_serves_where_nothing_asks_for_v1(tiny_llama: Path) -> None:
    """V2 captures the sizes of its tiers by itself, and schedules ahead."""
    model = {"model": str(tiny_llama), "max_model_len": 512}
    rsd = {"method": "rsd", "model": str(tiny_llama)}
    trees, drafts, parallel, plain = configured(
        {**model, "speculative_config": OURS},
        {**model, "speculative_config": rsd},
        {**model, "speculative_config": OURS, "tensor_parallel_size": 2},
        model,
    )
    assert trees["worker"] == "drafttree.vllm.v2.gpu_worker.TreeGPUWorkerV2"
    assert (trees["mode"], trees["backend"]) == ("FULL_AND_PIECEWISE", "TRITON_ATTN")
    assert trees["asynchronous"]
    assert drafts["worker"] == trees["worker"]
    assert drafts["backend"] == "TRITON_ATTN"
    assert parallel["worker"] == "drafttree.vllm.gpu_worker.TreeGPUWorker"
    assert parallel["backend"] == "TRITON_ATTN"
    assert not parallel["asynchronous"]
    assert not plain["worker"].startswith("drafttree")


@pytest.mark.parametrize(
    ("method", "v2", "support"),
    [
        ("token_recycling", True, "ALWAYS"),
        ("rsd", False, "ALWAYS"),
        ("rsd", True, "NEVER"),
        ("lyanna", True, "NEVER"),
    ],
)
def test_no_whole_graph_where_a_hook_drafts(method: str, v2: bool, support: str) -> None:
    """On V2 a drafter with a model drafts in a hook before the target's forward."""
    from drafttree.vllm.attention.triton import TritonTreeMetadataBuilder
    from drafttree.vllm.patches import mark_requested

    speculative: Any = SimpleNamespace()
    mark_requested(speculative, method, {}, shows_trees=True)
    config: Any = SimpleNamespace(speculative_config=speculative, use_v2_model_runner=v2)
    spec: Any = None
    found = TritonTreeMetadataBuilder.get_cudagraph_support(config, spec)
    assert found.name == support


def test_a_kv_cache_of_8_bit_floats(tiny_llama: Path) -> None:
    model = {"model": str(tiny_llama), "max_model_len": 512, "dtype": "bfloat16"}
    (trees,) = configured({**model, "speculative_config": OURS, "kv_cache_dtype": "fp8"})
    assert trees["backend"] == "TRITON_ATTN"
    assert trees["worker"].startswith("drafttree.vllm.")
