"""Whether a draft model fits its target: a draft is a token id, so both must mean the same by it.

Both are folders in Hugging Face's layout, or names that its library resolves; no engine is needed
to look at them.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any


def check_draft_model(target: str, draft: str, logger: logging.Logger) -> None:
    """Refuse a draft model whose tokens are not the target's; warn of one that is too large.

    Where a folder with a tokenizer's file is missing, only the sizes of the vocabularies can be
    compared.

    Raises:
        ValueError: naming what differs and the mend.
    """
    sizes = [_vocabulary_size("target", target), _vocabulary_size("draft model", draft)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft model {draft} has {sizes[1]} tokens and the target {target} has "
            f"{sizes[0]}: use a draft model of the same family"
        )
    files = [Path(folder) / "tokenizer.json" for folder in (target, draft)]
    if all(file.is_file() for file in files):
        ours, theirs = (_read(file).get("model", {}).get("vocab") for file in files)
        if ours != theirs:
            raise ValueError(
                f"the tokenizers of the draft model {draft} and of the target {target} differ: use "
                "a draft model of the same family"
            )
    if 0 < weights_size(Path(target)) <= weights_size(Path(draft)):
        logger.warning(
            "The draft model %s is no smaller than the target %s: it will not be faster",
            draft,
            target,
        )


def weights_size(folder: Path) -> int:
    """The bytes of a model's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _vocabulary_size(name: str, model: str) -> int:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"the {name} {model} cannot be read: {error}") from error
    return int(config.get_text_config().vocab_size)


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content
