"""Runs of the real vLLM on its V2 model runner, see `v2_on_cpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from v2_on_cpu import ENVIRONMENT, LIMITS, check_runner
from vllm_runs import Answer, Case, run_vllm

__all__ = ["Answer", "Case", "run_v2"]


def run_v2(
    model: Path,
    cases: list[Case],
    method: str | None = None,
    draft_model: Path | None = None,
    environment: dict[str, str] | None = None,
    planted_fault: str | None = None,
    engine: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[Answer], str]:
    """Serve the cases one after another with one engine, as `vllm_runs.run_vllm` does.

    Args:
        model: The target's folder; the engine reads its tokenizer if it has one.
        cases: The cases to serve.
        method: The method that drafts; None for plain decoding.
        draft_model: The folder of RSD's draft model, or of Lyanna's drafter.
        environment: Further environment variables of the engine's process.
        planted_fault: A fault from `faults`.
        engine: Arguments of the engine that differ from `v2_on_cpu.LIMITS`.
        options: The method's options.

    Returns:
        The answers, and the engine's log.

    Raises:
        RunFailed: The engine did not start, or stopped.
    """
    speculative = None
    if method is not None:
        speculative = {"method": method, **options}
        if draft_model is not None:
            speculative["model"] = str(draft_model)
    answers, log = run_vllm(
        model,
        cases,
        speculative=speculative,
        environment=ENVIRONMENT | (environment or {}),
        planted_fault=planted_fault,
        skip_tokenizer_init=not (model / "tokenizer.json").exists(),
        **{**LIMITS, **(engine or {})},
    )
    return answers, check_runner("v2", log)
