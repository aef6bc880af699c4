"""Quantises the linear layers of a saved model by rounding to the nearest step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32
"""Inputs that share a scale in the 4-bit formats."""

PER_WORD = 8
"""Weights of 4 bits in a word."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight weights each place of a word holds in AWQ, from its lowest bits on."""

FORMATS = ("int8", "int4", "gptq", "awq", "fp8", "fp8-channels")
"""Compressed-tensors with 8-bit weights and inputs, with 4-bit weights, GPTQ, AWQ, and 8-bit floats
with one scale for a matrix or for each of its rows."""


def needs_avx512(form: str) -> bool:
    """Whether vLLM serves a format on CPUs with AVX-512 alone."""
    return form in ("int4", "gptq", "awq")


def _compressed_tensors(form: str) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint in the compressed-tensors format."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    inputs: dict[str, Any] | None = None
    if form == "int4":
        weights |= {"num_bits": 4, "strategy": "group", "group_size": GROUP}
    else:
        kind = "int" if form == "int8" else "float"
        weights |= {"type": kind, "strategy": "tensor" if form == "fp8" else "channel"}
        inputs = {"num_bits": 8, "type": kind, "symmetric": True}
        inputs |= {"strategy": "tensor" if form == "fp8" else "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    names = {"int8": "int-quantized", "int4": "pack-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": names.get(form, "float-quantized"),
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def _config(form: str) -> dict[str, Any]:
    common = {"quant_method": form, "bits": 4, "group_size": GROUP}
    if form == "gptq":
        return {**common, "desc_act": False, "sym": True, "lm_head": False}
    if form == "awq":
        return {**common, "zero_point": True, "version": "gemm"}
    return _compressed_tensors(form)


def _rounded(weight: Tensor, group: int, most: int) -> tuple[Tensor, Tensor]:
    """Integers of at most `most` like the weight, and the scales `[rows, groups]`."""
    grouped = weight.view(len(weight), -1, group)
    scale = grouped.abs().amax(2, keepdim=True) / most
    rounded = (grouped / scale).round().clamp(-most, most).view_as(weight)
    return rounded, scale[:, :, 0].contiguous()


def _words(values: Tensor, order: tuple[int, ...] = tuple(range(PER_WORD))) -> Tensor:
    """Pack values of 0 to 15 along the last dimension, the first in a word's lowest bits."""
    import torch

    shifts = 4 * torch.arange(PER_WORD)
    grouped = values.long().unflatten(-1, (-1, PER_WORD))[..., list(order)]
    # The highest bit of a word is its sign.
    words = (grouped << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _int8(weight: Tensor) -> dict[str, Tensor]:
    import torch

    rounded, scale = _rounded(weight, weight.shape[1], 127)
    return {"weight": rounded.to(torch.int8), "weight_scale": scale}


def _int4(weight: Tensor) -> dict[str, Tensor]:
    import torch

    rounded, scale = _rounded(weight, GROUP, 7)
    return {
        "weight_packed": _words(rounded + 8),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    """Words run along the inputs; a zero point is stored less one."""
    import torch

    rounded, scale = _rounded(weight, GROUP, 7)
    zeros = torch.full((scale.shape[1], len(weight)), 7)
    return {
        "qweight": _words(rounded + 8).T.contiguous(),
        "qzeros": _words(zeros),
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }


def _awq(weight: Tensor) -> dict[str, Tensor]:
    """Words run along the outputs, in an order of their own."""
    import torch

    rounded, scale = _rounded(weight, GROUP, 7)
    zeros = torch.full((scale.shape[1], len(weight)), 8)
    return {
        "qweight": _words((rounded + 8).T, AWQ_ORDER),
        "qzeros": _words(zeros, AWQ_ORDER),
        "scales": scale.T.contiguous(),
    }


def _fp8(weight: Tensor, *, channels: bool = False) -> dict[str, Tensor]:
    import torch

    most = torch.finfo(torch.float8_e4m3fn).max
    largest = weight.abs().amax(1, keepdim=True) if channels else weight.abs().max()
    scale = largest / most
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale if channels else scale.view(1),
    }


_PACK: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "int8": _int8,
    "int4": _int4,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fp8-channels": lambda weight: _fp8(weight, channels=True),
}


def quantise(model: Path, folder: Path, form: str) -> Path:
    """Save a model with its linear layers in one of `FORMATS`."""
    from safetensors.torch import load_file, save_file

    saved = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            packed = _PACK[form](weight)
            saved |= {name.removesuffix("weight") + part: each for part, each in packed.items()}
        else:
            saved[name] = weight
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = _config(form)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
