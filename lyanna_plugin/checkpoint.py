"""A drafter's folder in Hugging Face's layout: `config.json` and `model.safetensors`.

`config.json` is the target's configuration with one layer, from which the hosts compute the size of
the KV cache, and has Lyanna's own settings under the key `lyanna`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafttree.model_files import first_rows_fingerprint
from lyanna_plugin.model import LyannaConfig, LyannaModel

FAMILIES = ("llama", "qwen2")
_KEY = "lyanna"
_WEIGHTS = "model.safetensors"


def layer_config(target: Path) -> Any:
    """The target's configuration with one layer.

    Raises:
        ValueError: The target cannot be read, or belongs to a family that is not supported.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ValueError(f"the target {target} cannot be read: {error}") from error
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"the target {target} is a {config.model_type} model: Lyanna supports the families "
            f"{' and '.join(FAMILIES)}"
        )
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    if getattr(config, "mlp_bias", None) is None:
        config.mlp_bias = False
    return config


def save(drafter: LyannaModel, folder: Path) -> None:
    """Write a drafter's folder, with weights in bfloat16. Each file is replaced atomically.

    Raises:
        ValueError: A weight is not a finite number.
        OSError: A file cannot be written.
    """
    if not _are_finite(drafter.state_dict()):
        raise ValueError(
            f"the weights for {folder} are not finite numbers: train with a lower --learning-rate"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = drafter.layer_config.to_dict() | {
        "architectures": [drafter.architecture],
        "dtype": "bfloat16",
        _KEY: drafter.config.model_dump(),
    }
    # The target's path on the machine that trained this is of no use elsewhere.
    written.pop("_name_or_path", None)
    weights = {
        name: (value.bfloat16() if value.is_floating_point() else value).contiguous().cpu()
        for name, value in drafter.state_dict().items()
    }
    partial = folder / f".{_WEIGHTS}.partial"
    try:
        save_file(weights, partial, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{partial} cannot be written ({error}): free space") from error
    partial.replace(folder / _WEIGHTS)
    partial = folder / ".config.json.partial"
    partial.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "config.json")


def _read_config(folder: Path) -> tuple[LyannaConfig, dict[str, Any]]:
    """Lyanna's settings in a folder's `config.json`, and the whole file.

    Raises:
        ValueError: The file does not exist, is damaged or has no settings of Lyanna.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"model={str(folder)!r} is not a drafter: it has no config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        settings = LyannaConfig.model_validate(config[_KEY]) if _KEY in config else None
    # ValueError: JSON and UTF-8 that are wrong, numbers that are too long, and failed validation.
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if settings is None:
        raise ValueError(
            f"model={str(folder)!r} is not a Lyanna drafter: train one with "
            "`drafttree train lyanna`"
        )
    return settings, config


def check(target: str, drafter: str) -> None:
    """Check that a drafter can serve a target, without loading its weights.

    Raises:
        ValueError: The drafter cannot serve the target; the message names the reason and the fix.
    """
    if not Path(target).is_dir():
        raise ValueError(
            f"the weights of the target {target} are not on this machine, and Lyanna compares them "
            f"with the drafter's: download them first, with `hf download {target}`, or give the "
            "path of the target's folder"
        )
    _checked(Path(drafter), Path(target), LyannaModel)


def load(folder: Path, target: Path, model: type[LyannaModel] = LyannaModel) -> LyannaModel:
    """Load a drafter in float32.

    Args:
        folder: The drafter's folder.
        target: Folder of the target.
        model: Class of the drafter; its architecture must match the folder's.

    Raises:
        ValueError: The drafter was trained for another target, has another class, or is damaged.
    """
    config, layer = _checked(folder, target, model)
    try:
        weights = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights in {folder} are damaged: {error}") from error
    if not _are_finite(weights):
        raise ValueError(
            f"the weights in {folder} are not finite numbers: train again, with a lower "
            "--learning-rate"
        )
    hot = weights.get("token_info.hot_tokens", torch.empty(0, dtype=torch.int32))
    _check_hot_tokens(folder, hot, layer.vocab_size)
    try:
        drafter = model(layer, config, hot)
        drafter.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"the weights in {folder} do not fit its config.json: {error}") from error
    return drafter.float()


def _are_finite(weights: Mapping[str, torch.Tensor]) -> bool:
    # PyTorch has no `isfinite` for FP8.
    return all(bool(each.float().isfinite().all()) for each in weights.values())


def _check_hot_tokens(folder: Path, hot: torch.Tensor, vocab_size: int) -> None:
    """Refuse hot tokens that are not different tokens: logits are indexed by them."""
    if hot.ndim != 1 or hot.is_floating_point() or hot.is_complex():
        is_valid = False
    else:
        within = (hot >= 0) & (hot < vocab_size)
        is_valid = bool(within.all()) and len({*hot.tolist()}) == len(hot)
    if not is_valid:
        raise ValueError(
            f"the weights in {folder} are damaged: token_info.hot_tokens are not different tokens "
            f"from 0 to {vocab_size - 1}"
        )


def _checked(folder: Path, target: Path, model: type[LyannaModel]) -> tuple[LyannaConfig, Any]:
    """The configurations of a drafter and of its layer, checked against the target."""
    config, found = _read_config(folder)
    if found.get("architectures") != [model.architecture]:
        raise ValueError(
            f"model={str(folder)!r} has architectures={found.get('architectures')}, not "
            f"{[model.architecture]}: train a drafter with `drafttree train lyanna`"
        )
    layer = layer_config(target)
    for key in ("hidden_size", "vocab_size", "model_type"):
        if found.get(key) != getattr(layer, key):
            raise ValueError(
                f"model={str(folder)!r} was trained for {config.target} with {key} "
                f"{found.get(key)}, but the target {target} has {getattr(layer, key)}: use "
                "the drafter of this target"
            )
    if first_rows_fingerprint(target) != config.fingerprint:
        raise ValueError(
            f"model={str(folder)!r} was trained for {config.target}, whose weights are not those "
            f"of the target {target}: use the drafter of this target"
        )
    if not (folder / _WEIGHTS).is_file():
        raise ValueError(f"model={str(folder)!r} has no {_WEIGHTS}: copy the whole folder")
    return config, layer
