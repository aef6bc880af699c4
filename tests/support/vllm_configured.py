"""vLLM's configuration, as it is made before the engine's processes start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def configure(model: Path, speculative: dict[str, Any] | None = None, **engine: Any) -> Any:
    """Make the engine's configuration, as `LLM(...)` does before it starts processes."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(model),
        speculative_config={"method": "token_recycling"} | (speculative or {}),
        **{"dtype": "float32", "max_model_len": 512, "skip_tokenizer_init": True, **engine},
    )
    return arguments.create_engine_config()


def complaints(settings: list[tuple[Path, dict[str, Any], dict[str, Any]]]) -> list[str]:
    """The errors with which configurations are refused; empty for those that are made.

    Args:
        settings: For each a model, the speculative configuration and the engine's arguments.
    """
    messages = []
    for model, speculative, engine in settings:
        try:
            configure(model, speculative, **engine)
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages


def find_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's configuration find Triton, as in a build for GPUs."""
    from vllm import triton_utils
    from vllm.config import vllm as configuration

    for module in (triton_utils, configuration):
        monkeypatch.setattr(module, "HAS_TRITON", True)
