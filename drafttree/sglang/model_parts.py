"""Parts of SGLang's models."""

from __future__ import annotations

from typing import Any


def text_model(model: Any) -> Any:
    """The model for text: some multimodal models have a whole one inside."""
    return getattr(model, "language_model", model)


def output_head(model: Any) -> Any:
    """The output head of a model for text; some with tied weights have their embeddings alone."""
    head = getattr(model, "lm_head", None)
    return model.model.embed_tokens if head is None else head
