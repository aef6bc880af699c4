"""Make a draft model of a target without training: leave out layers, or round its weights.

    python -m scripts.experiments.rsd.weaken TARGET --bits 3 --output DRAFT
    python -m scripts.experiments.rsd.weaken TARGET --first 18 --count 6 --output DRAFT

The output is stored in bfloat16, whatever the number of bits, so its speed and size are not those
of a quantised model. Needs transformers.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

GROUP = 64
"""Number of adjacent weights of a row that share a scale."""


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Weights rounded to `2^bits` evenly spaced values between each group's smallest and largest.

    Args:
        weight: `[out, in]`, with `in` a multiple of `GROUP`.
        bits: Bits per weight.
    """
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.aminmax(dim=2, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-12)
    return (((groups - low) / step).round() * step + low).view_as(weight).to(weight.dtype)


def main(
    target: Path,
    output: Annotated[Path, typer.Option(help="Folder of the draft model.")],
    first: Annotated[int, typer.Option(help="The first layer that is left out.")] = 0,
    count: Annotated[int, typer.Option(help="Number of adjacent layers that are left out.")] = 0,
    bits: Annotated[int, typer.Option(help="Bits of the layers' weights; 16 keeps them.")] = 16,
) -> None:
    """Write the draft model."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    layers = model.model.layers
    if not 0 <= first <= first + count < len(layers):
        raise typer.BadParameter(f"layers {first} to {first + count - 1} of {len(layers)}")
    del layers[first : first + count]
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        del model.config.layer_types[first : first + count]
    if bits < 16:
        for parameter in layers.parameters():
            if parameter.dim() == 2:
                parameter.data = rounded(parameter.data, bits)
    model.save_pretrained(output)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (target / file).exists():
            shutil.copy(target / file, output / file)


if __name__ == "__main__":
    typer.run(main)
