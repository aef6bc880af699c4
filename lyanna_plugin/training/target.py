"""The target that a drafter is trained for, as transformers computes it: with whole weights.

Quantised weights are dequantised when they are loaded, because the drafter starts from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def check_format(folder: Path, config: Any) -> None:
    """Check that quantised weights can be dequantised.

    Args:
        folder: Folder of the target.
        config: Its configuration.

    Raises:
        ValueError: They cannot.
    """
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        return
    method = quantisation.get("quant_method")
    # In FP8 without blocks, transformers would not apply the scales.
    in_blocks = method == "fp8" and quantisation.get("weight_block_size") is not None
    if method != "compressed-tensors" and not in_blocks:
        raise ValueError(
            f"the target {folder} is quantised with quant_method={method!r}, which cannot be "
            "dequantised for training: use a target in the compressed-tensors format, in FP8 with "
            "weight_block_size, or without quantisation"
        )


def load_target(folder: Path) -> Any:
    """The target, a causal LM of transformers in bfloat16.

    Raises:
        ValueError: Weights that the drafter starts from, or is trained with, are still quantised.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if (quantisation := getattr(config, "quantization_config", None)) is not None:
        # By default some formats are dequantised at the first forward of the whole model, and not
        # at one of the decoder alone.
        quantisation["dequantize"] = True
    target = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.bfloat16)
    used = {
        "the embeddings": target.get_input_embeddings(),
        "the output head": target.get_output_embeddings(),
    }
    layer = target.get_decoder().layers[-1]
    used |= {name: each for name, each in layer.named_modules() if name.endswith("_proj")}
    for name, module in used.items():
        weight = getattr(module, "weight", None)
        if weight is None or not weight.is_floating_point() or weight.element_size() < 2:
            raise ValueError(
                f"the target {folder} has quantised weights in {name}, which transformers has not "
                "dequantised: update transformers, or use a target without quantisation"
            )
    return target


def last_layer(target: Any) -> dict[str, Tensor]:
    """The weights of the target's last layer in float32, by their names in the layer."""
    layer = target.get_decoder().layers[-1]
    return {name: value.detach().float().cpu() for name, value in layer.state_dict().items()}
