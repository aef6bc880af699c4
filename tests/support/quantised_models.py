"""Quantises the linear layers of a saved model by rounding to the nearest step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GROUP = 32
"""Inputs that share a scale in the 4-bit format."""


def _layers(bits: int) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint in the compressed-tensors format."""
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True}
    inputs = None
    if bits == 8:
        weights |= {"strategy": "channel", "dynamic": False}
        inputs = {"num_bits": 8, "type": "int", "symmetric": True}
        inputs |= {"strategy": "token", "dynamic": True}
    else:
        weights |= {"strategy": "group", "group_size": GROUP, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def quantise(model: Path, folder: Path, bits: int) -> Path:
    """Save a model with weights of 8 bits, and inputs of 8 bits too, or of 4 bits in groups."""
    import torch
    from safetensors.torch import load_file, save_file

    saved = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            saved[name] = weight
            continue
        rows, columns = weight.shape
        group = columns if bits == 8 else GROUP
        grouped = weight.view(rows, -1, group)
        most = 2 ** (bits - 1) - 1
        scale = grouped.abs().amax(2, keepdim=True) / most
        rounded = (grouped / scale).round().clamp(-most, most).view(rows, columns)
        prefix = name.removesuffix("weight")
        saved[prefix + "weight_scale"] = scale[:, :, 0].contiguous()
        if bits == 8:
            saved[name] = rounded.to(torch.int8)
            continue
        # Eight weights to a word, the first in its lowest bits.
        shifts = 4 * torch.arange(8)
        words = ((rounded.long() + 8).view(rows, -1, 8) << shifts).sum(2)
        saved[prefix + "weight_packed"] = words.to(torch.int32)
        saved[prefix + "weight_shape"] = torch.tensor([rows, columns])
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = _layers(bits)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
