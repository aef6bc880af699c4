"""Settings of SGLang's engines in tests on a GPU, and the comparison of their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_runs import Answer
from tiny_models import make_tiny_llama

HEAD_SIZE = 64
"""Head size of the models. FlashInfer has none that is smaller."""

FLOAT32 = {
    "dtype": "float32",
    "variables": {
        "SGLANG_USE_CPU_ENGINE": "0",
        # SGLang's own Triton kernels would multiply float32 in TF32.
        "TRITON_F32_DEFAULT": "ieee",
        # Its kernels for norms, which are FlashInfer's, have no float32. PyTorch computes these.
        "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    },
}
BFLOAT16 = {"dtype": "bfloat16", "variables": {"SGLANG_USE_CPU_ENGINE": "0"}}

BACKENDS: dict[str, dict[str, Any]] = {
    "triton": FLOAT32,
    "flashinfer": BFLOAT16,
    "fa3": BFLOAT16,
}
"""Settings by attention backend. FlashInfer and FlashAttention 3 do not compute in float32."""

LOGPROBS = 5
"""Number of the best tokens that are known of each position of a plain answer in bfloat16."""

MOST_LOST = 0.2
"""Nats by which a drafted token may be less likely than the best one in bfloat16. On a CPU they
were 0.03 at most."""


def engine_settings(backend: str, **others: Any) -> dict[str, Any]:
    """Keyword arguments of `run_sglang` with an attention backend."""
    common = {"device": "cuda", "attention_backend": backend, "sampling_backend": "pytorch"}
    return {**common, **BACKENDS[backend], **others}


def make_model(folder: Path) -> Path:
    """Save a tiny random Llama that all attention backends serve."""
    return make_tiny_llama(folder, head_size=HEAD_SIZE)


def assert_same_answers(drafted: Answer, plain: Answer, backend: str) -> None:
    """Check that answers with drafts are those without.

    In bfloat16 an answer may be another one from a token on that is about as likely as the best.

    Args:
        drafted: The answers with drafts.
        plain: The answers without; in bfloat16 with `LOGPROBS`.
        backend: The attention backend.
    """
    if BACKENDS[backend] is FLOAT32:
        assert drafted.tokens == plain.tokens
        return
    answers = zip(drafted.tokens, plain.tokens, plain.top_logprobs, strict=True)
    for row, (found, expected, best) in enumerate(answers):
        assert len(found) == len(expected) == len(best)
        for token, other, logprobs in zip(found, expected, best, strict=True):
            if token != other:
                lost = max(logprobs.values()) - logprobs.get(token, float("-inf"))
                assert lost <= MOST_LOST, f"request {row}: {token} in place of {other}"
                break
