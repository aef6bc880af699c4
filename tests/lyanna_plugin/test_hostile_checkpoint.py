"""Damaged and hostile folders of drafters are refused with a ValueError; pickles are not run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lyanna_parts import drafter_for
from property_settings import CASES
from safetensors.torch import load_file, save_file

from lyanna_plugin.checkpoint import load, save

WEIGHTS, HOT = "model.safetensors", "token_info.hot_tokens"


@pytest.fixture(scope="module")
def valid(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("valid")
    save(drafter_for(target), folder)
    return folder


@pytest.fixture
def folder(valid: Path, tmp_path: Path) -> Path:
    for file in valid.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("hot", ["beyond", "negative", "twice", "floats", "two dimensions"])
def test_hot_tokens_must_be_different_tokens(folder: Path, target: Path, hot: str) -> None:
    weights = load_file(folder / WEIGHTS)
    tokens = weights[HOT].clone()
    if hot == "beyond":
        tokens[0] = 512
    elif hot == "negative":
        tokens[0] = -1
    elif hot == "twice":
        tokens[0] = tokens[1]
    elif hot == "floats":
        tokens = tokens.float()
    else:
        tokens = tokens[None]
    save_file({**weights, HOT: tokens}, folder / WEIGHTS)
    with pytest.raises(ValueError, match="are not different tokens from 0 to 511"):
        load(folder, target)


def test_weights_must_be_finite(folder: Path, target: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["norm.weight"][3] = torch.nan
    save_file(weights, folder / WEIGHTS)
    with pytest.raises(ValueError, match="are not finite numbers"):
        load(folder, target)


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, '"\\ud800"', "[1]", "null"])
def test_hostile_configurations(folder: Path, target: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json is damaged|is not a Lyanna drafter"):
        load(folder, target)


@CASES
@given(data=st.data())
def test_any_field_of_the_configuration(
    valid: Path, target: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("field")
    (folder / WEIGHTS).symlink_to(valid / WEIGHTS)
    config = json.loads((valid / "config.json").read_text())
    part = config["lyanna"] if data.draw(st.booleans()) else config
    value = st.none() | st.integers() | st.text(max_size=5) | st.just([]) | st.just(10**12)
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(value)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        assert load(folder, target)
    except ValueError as error:
        refused = str(error)
    else:
        return
    assert str(folder) in refused


class Payload:
    """Pickled, this makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return Path.mkdir, (self._folder,)


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_pickled_weights_are_refused(folder: Path, target: Path, form: str) -> None:
    made = folder / "made"
    file = folder / WEIGHTS
    if form == "pickle":
        file.write_bytes(pickle.dumps(Payload(made)))
    else:
        torch.save({HOT: Payload(made)}, file)
    with pytest.raises(ValueError, match="are damaged"):
        load(folder, target)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load(folder, target)
    assert not made.exists()
