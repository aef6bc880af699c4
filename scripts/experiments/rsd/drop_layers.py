"""Make a draft model of a target by leaving out some of its layers, without training.

    python -m scripts.experiments.rsd.drop_layers TARGET --first 14 --count 6 --output DRAFT

Needs transformers.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer


def main(
    target: Path,
    output: Annotated[Path, typer.Option(help="Folder of the draft model.")],
    first: Annotated[int, typer.Option(help="The first layer that is left out.")],
    count: Annotated[int, typer.Option(help="Number of adjacent layers that are left out.")],
) -> None:
    """Write the draft model."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    layers = model.model.layers
    if not 0 <= first < first + count < len(layers):
        raise typer.BadParameter(f"layers {first} to {first + count - 1} of {len(layers)}")
    del layers[first : first + count]
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        del model.config.layer_types[first : first + count]
    model.save_pretrained(output)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (target / file).exists():
            shutil.copy(target / file, output / file)


if __name__ == "__main__":
    typer.run(main)
