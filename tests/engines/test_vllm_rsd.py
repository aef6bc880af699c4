"""RSD in vLLM: what the draft model reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import draft_rows
import pytest
from random_prompts import some_prompts
from tiny_models import make_first_layers
from vllm_runs import Answer, Case, run_vllm

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}


@pytest.mark.full
def test_a_draft_model_reads_each_row_of_a_step_once(
    tiny_llama: Path, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """A request decodes while the prompts of others are read in chunks."""
    prompts = some_prompts(1, longest=9) + some_prompts(3, longest=500, shortest=400)
    case = Case(prompts, GREEDY)
    limits: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 96}
    (plain,), _ = run_vllm(tiny_llama, [case], **limits)
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    method = {"method": "rsd", "model": str(draft), "tree": "beam:3x4"}
    (drafted,), log = run_vllm(tiny_llama, [case], method, draft_rows.ENVIRONMENT, **limits)
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
    draft_rows.check_levels(log, [3, 3, 3, 3])
