"""A drafter's folder in Hugging Face's layout: `config.json` and `model.safetensors`.

`config.json` is the target's with one layer, so that the hosts can size a KV cache by it, and
Lyanna's own settings under one key.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from lyanna_plugin.config_file import ARCHITECTURE, KEY, DrafterConfig
from lyanna_plugin.model import Drafter

FAMILIES = ("llama", "qwen2")
_WEIGHTS = "model.safetensors"


def layer_config(target: Path) -> Any:
    """The target's configuration with one layer.

    Raises:
        ValueError: the target cannot be read, or is of a family that is not known.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ValueError(f"the target {target} cannot be read: {error}") from error
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"the target {target} is a {config.model_type} model: Lyanna knows the families "
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


def fingerprint(target: Path) -> str:
    """A short hash of the beginnings of all the target's tensors.

    Raises:
        ValueError: they cannot be read.
    """
    digest = hashlib.sha256()
    try:
        files = sorted(target.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError("there is no .safetensors file")
        for file in files:
            with safe_open(file, "pt") as weights:
                for name in sorted(weights.keys()):
                    first = weights.get_slice(name)[:1].float()
                    digest.update(name.encode() + first.numpy().tobytes())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights of the target {target} cannot be read: {error}") from error
    return digest.hexdigest()[:16]


def save(drafter: Drafter, folder: Path) -> None:
    """Write a drafter's folder, its weights in bfloat16; files there are replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    written = drafter.layer_config.to_dict() | {
        "architectures": [ARCHITECTURE],
        "dtype": "bfloat16",
        KEY: drafter.config.model_dump(),
    }
    # Where the target lay while this was trained is of no use to others.
    written.pop("_name_or_path", None)
    weights = {
        name: (value.bfloat16() if value.is_floating_point() else value).contiguous().cpu()
        for name, value in drafter.state_dict().items()
    }
    partial = folder / f".{_WEIGHTS}.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(folder / _WEIGHTS)
    partial = folder / ".config.json.partial"
    partial.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "config.json")


def _read_config(folder: Path) -> tuple[DrafterConfig, dict[str, Any]]:
    """Lyanna's part of a folder's configuration, and the whole.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"model={str(folder)!r} is no drafter: it has no config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if KEY not in config:
            raise ValueError(
                f"model={str(folder)!r} is no Lyanna drafter: make one with "
                "`drafttree train lyanna`"
            )
        return DrafterConfig.model_validate(config[KEY]), config
    except (json.JSONDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def check(target: str, drafter: str) -> None:
    """Refuse a folder that holds no drafter to serve the target with; no weights are loaded.

    Raises:
        ValueError: naming what is wrong and the mend.
    """
    if not Path(target).is_dir():
        raise ValueError(
            f"the target {target!r} is no folder: Lyanna must look at its weights, so name the "
            "folder that they are in"
        )
    config, _ = _checked(Path(drafter), Path(target))
    if config.feeds_tokens or not config.token_info:
        lacks = "feeds every token back" if config.feeds_tokens else "has no token info"
        raise ValueError(
            f"model={drafter!r} {lacks}, so it serves comparisons only: train one without --eagle "
            "and --no-token-info"
        )


def load(folder: Path, target: Path) -> Drafter:
    """The drafter in `folder`, in float32, checked against the target that it is for.

    Raises:
        ValueError: it was trained for another target, or the folder is damaged.
    """
    config, layer = _checked(folder, target)
    try:
        weights = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights in {folder} are damaged: {error}") from error
    hot = weights.get("token_info.hot_tokens", torch.empty(0, dtype=torch.int32))
    drafter = Drafter(layer, config, hot)
    try:
        drafter.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"the weights in {folder} do not fit its config.json: {error}") from error
    return drafter.float()


def _checked(folder: Path, target: Path) -> tuple[DrafterConfig, Any]:
    """A drafter's configuration, and its layer's, made for the target."""
    config, found = _read_config(folder)
    layer = layer_config(target)
    for key in ("hidden_size", "vocab_size", "model_type"):
        if found.get(key) != getattr(layer, key):
            raise ValueError(
                f"model={str(folder)!r} was trained for {config.target} with {key} "
                f"{found.get(key)}, but the target {target.name} has {getattr(layer, key)}: use "
                "the drafter of this target"
            )
    if fingerprint(target) != config.fingerprint:
        raise ValueError(
            f"model={str(folder)!r} was trained for {config.target}, whose weights are not those "
            f"of the target {target.name}: use the drafter of this target"
        )
    if not (folder / _WEIGHTS).is_file():
        raise ValueError(f"model={str(folder)!r} has no {_WEIGHTS}: copy the whole folder")
    return config, layer
