"""Tokens of text that no request of a workload resembles, to fill a drafter's memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_tokens(sources: Sequence[Path], model: Path, count: int) -> list[int]:
    """The first `count` tokens of the sources.

    Args:
        sources: Files, and folders of which all `*.py` files are read.
        model: Folder of the model whose tokenizer is used.
        count: Number of tokens.

    Raises:
        ValueError: The sources have fewer tokens.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    tokens: list[int] = []
    for source in sources:
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            text = file.read_text(encoding="utf-8", errors="replace")
            tokens += tokenizer.encode(text, add_special_tokens=False)
            if len(tokens) >= count:
                return tokens[:count]
    raise ValueError(f"the foreign text has {len(tokens)} tokens, fewer than {count}")
