"""Whether a draft model speaks the target's language: a draft is a token id, so ids must agree."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def check_vocabularies(target: Path, draft: Path) -> None:
    """Refuse a draft model whose tokens are not the target's.

    Both are folders in Hugging Face's layout. Where a tokenizer's file is missing, the sizes of
    the vocabularies are all that can be compared.

    Raises:
        ValueError: naming what differs and the mend.
    """
    sizes = []
    for name, folder in (("target", target), ("draft model", draft)):
        if not (folder / "config.json").is_file():
            raise ValueError(f"the {name} {folder} is no model's folder: it holds no config.json")
        sizes.append(int(_read(folder / "config.json").get("vocab_size", 0)))
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft model {draft} has {sizes[1]} tokens and the target {target} has "
            f"{sizes[0]}: use a draft model of the same family"
        )
    files = [folder / "tokenizer.json" for folder in (target, draft)]
    if all(file.is_file() for file in files):
        ours, theirs = (_read(file).get("model", {}).get("vocab") for file in files)
        if ours != theirs:
            raise ValueError(
                f"the tokenizers of the draft model {draft} and of the target {target} differ: use "
                "a draft model of the same family"
            )


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content
