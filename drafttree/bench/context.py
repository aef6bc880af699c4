"""The context of the engines of a run, in tokens."""

from __future__ import annotations

import json
from pathlib import Path

from drafttree.bench.errors import InputError
from drafttree.bench.protocol import HELD_BACK
from drafttree.model_files import local_folder

DEFAULT_CONTEXT = 2048
"""Context of a run whose model has a longer one, unless another is asked for."""


def model_context(model: Path, most: int = DEFAULT_CONTEXT, held_back: int = 0) -> int:
    """The context length to use: the model's own, at most `most` tokens.

    Args:
        model: The model's folder.
        most: Greatest context.
        held_back: Tokens of the model's own that are left unused.

    Raises:
        InputError: The folder is none of a model.
    """
    config = model / "config.json"
    if not config.is_file():
        raise InputError(f"{model} is not a model folder: it has no config.json")
    try:
        limit = json.loads(config.read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"cannot read {config}: {error}") from error
    return min(most, limit - held_back) if isinstance(limit, int) else most


def usable_context(
    model: Path,
    max_new_tokens: int,
    engine: str = "vllm",
    draft_model: str | None = None,
    most: int = DEFAULT_CONTEXT,
) -> int:
    """The engines' context, in which there is room for a prompt before the answer.

    Args:
        model: The model's folder.
        max_new_tokens: Greatest number of tokens of an answer.
        engine: The engine that serves the model; it may hold some tokens back.
        draft_model: Folder of the draft model, or its name on the Hub.
        most: Greatest context.

    Raises:
        InputError: There is no room.
    """
    held_back = HELD_BACK[engine]
    context = model_context(model, most, held_back)
    if draft_model is not None and (folder := local_folder(draft_model)):
        # A draft model whose own context is shorter than the engine's is refused.
        context = min(context, model_context(folder, most, held_back))
    if max_new_tokens >= context:
        message = f"--max-new-tokens {max_new_tokens} must be below the context of {context} tokens"
        if context == most:
            message += "; drafttree bench takes a longer one with --context"
        raise InputError(message)
    return context
