"""The device operations that draft trees add to a step of the V2 model runner."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import device_operations
import pytest
import triton_on_cpu
import v2_on_cpu
from random_prompts import some_prompts
from vllm_runs import Answer, Case, run_vllm

PARTS = "prepare_attn", "sample", "propose"


@pytest.mark.full
def test_operations_of_a_drafted_step(
    tiny_llama: Path, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """Launches take longer than most of the work on a GPU, so they are counted."""
    file = tmp_path / "operations.jsonl"
    case = Case(some_prompts(1), {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True})
    (answer,), _ = run_vllm(
        tiny_llama,
        [case],
        speculative={"method": "token_recycling", "nodes": 15, "memory": 0},
        environment=v2_on_cpu.ENVIRONMENT
        | triton_on_cpu.ENVIRONMENT
        | {device_operations.VARIABLE: str(file)},
        max_model_len=256,
        max_num_seqs=4,
        num_gpu_blocks_override=20,
    )
    proves_drafting(answer)
    parts = [json.loads(line) for line in file.read_text().splitlines()]
    most = {name: max(len(names) for part, names in parts if part == name) for name in PARTS}
    launched = {each for _, names in parts for each in names}
    assert {"_lay_out_kernel", "_expand_kernel", "_walk_kernel", "_move_kernel"} <= launched
    assert sum(most.values()) <= 19, most
