"""SGLang replaces NaN in logits if it is asked to; trees are then verified against what is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from random_prompts import some_prompts
from safetensors.torch import load_file, save_file
from sglang_runs import Answer, Case, run_sglang
from tiny_models import make_tiny_llama

BROKEN = 77
"""A token whose logit is always NaN."""


def test_a_token_with_nan_as_its_logit_is_not_emitted(
    tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    file = make_tiny_llama(tmp_path) / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][BROKEN] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    settings = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
    case = Case(some_prompts(8), settings)
    asked = {"SGLANG_SANITIZE_NAN_LOGITS": "1"}
    (plain,), _ = run_sglang(tmp_path, [case], drafted=False, variables=asked)
    (drafted,), _ = run_sglang(tmp_path, [case], variables=asked)
    assert all(BROKEN not in tokens for tokens in plain.tokens)
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
