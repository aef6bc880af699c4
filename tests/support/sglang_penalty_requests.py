"""Requests with penalties, as SGLang's penalizers and drafttree's read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def penalty_request(emitted: list[int], **penalties: float) -> Any:
    """A request that has emitted some tokens, with the penalties given and no others."""
    given = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**(given | penalties), stop_token_ids={3, 5}),
        output_ids=emitted,
        eos_token_ids={7},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None),
    )
