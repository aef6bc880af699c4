"""Targets with quantised weights, which training dequantises or refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import quantise
from tiny_models import make_tiny_chat_llama

from lyanna_plugin.checkpoint import layer_config
from lyanna_plugin.training.target import check_format, last_layer, load_target


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_chat_llama(tmp_path_factory.mktemp("target"))


def quantised(whole: Path, folder: Path, form: str) -> Path:
    return quantise(whole, Path(shutil.copytree(whole, folder)), form)


@pytest.mark.parametrize(
    ("form", "error"), [("int8", 0.01), ("int4", 0.08), ("fp8", 0.06), ("fp8-channels", 0.06)]
)
def test_weights_are_dequantised_before_any_forward(
    whole: Path, tmp_path: Path, form: str, error: float
) -> None:
    original = load_target(whole)
    target = load_target(quantised(whole, tmp_path / "target", form))
    assert target.dtype == torch.bfloat16
    found = last_layer(target)
    for name, weight in last_layer(original).items():
        assert (found[name] - weight).abs().max() <= error * weight.abs().max(), name
    # Hidden states come from the decoder alone.
    tokens = torch.arange(5, 25)[None]
    with torch.inference_mode():
        first, second = (
            each.get_decoder()(input_ids=tokens).last_hidden_state.float().flatten()
            for each in (original, target)
        )
    assert torch.cosine_similarity(first, second, 0) > 0.97


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_weights_that_stay_quantised_are_refused(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

    monkeypatch.setattr(
        CompressedTensorsHfQuantizer, "_process_model_after_weight_loading", lambda *_, **__: None
    )
    folder = quantised(whole, tmp_path / "target", form)
    with pytest.raises(ValueError, match=r"quantised weights in self_attn\.q_proj"):
        load_target(folder)


@pytest.mark.parametrize(
    ("quantisation", "is_read"),
    [
        (None, True),
        ({"quant_method": "compressed-tensors"}, True),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, False),
        ({"quant_method": "gptq", "bits": 4}, False),
        ({"quant_method": "modelopt"}, False),
        ({"load_in_8bit": True}, False),
    ],
)
def test_formats(
    whole: Path, tmp_path: Path, quantisation: dict[str, Any] | None, is_read: bool
) -> None:
    config = json.loads((whole / "config.json").read_text())
    if quantisation is not None:
        config["quantization_config"] = quantisation
    (tmp_path / "config.json").write_text(json.dumps(config))
    if is_read:
        check_format(tmp_path, layer_config(tmp_path))
    else:
        with pytest.raises(ValueError, match=r"is quantised with quant_method=.* use a target in"):
            check_format(tmp_path, layer_config(tmp_path))
