"""Fingerprints distinguish models by their weights and their tokenizers."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from drafttree.model_files import (
    ModelSource,
    attention_heads,
    bos_token,
    check_draft_model,
    first_rows_fingerprint,
    folder_with_weights,
    local_folder,
    tokenizer_fingerprint,
    vocabulary_size,
    weights_fingerprint,
    weights_size,
)

LOGGER = logging.getLogger("test")


def test_configurations_with_code_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs if the engine trusts it, and nobody is asked."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "code")
    )
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "configuration.py").write_text(
        "from transformers import PretrainedConfig\n\n"
        "class Own(PretrainedConfig):\n    model_type = 'its_own'\n"
    )
    config = {"model_type": "its_own", "auto_map": {"AutoConfig": "configuration.Own"}}
    config |= {"vocab_size": 77, "num_attention_heads": 6}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="cannot be read"):
        vocabulary_size(ModelSource(str(folder)))
    trusted = ModelSource(str(folder), trust_remote_code=True)
    assert vocabulary_size(trusted) == 77
    assert attention_heads(trusted) == 6
    check_draft_model(trusted, trusted, LOGGER)


def make_weights(folder: Path, rows: int = 64, **files: int) -> Path:
    """A folder with a weights file of each name, random from the seed given."""
    folder.mkdir(exist_ok=True)
    for name, seed in files.items():
        generator = torch.Generator().manual_seed(seed)
        weights = {"a": torch.randn(rows, 64, generator=generator), "b": torch.ones(3)}
        save_file(weights, folder / f"{name}.safetensors")
    (folder / "config.json").write_text('{"vocab_size": 64}')
    return folder


def test_equal_weights_have_equal_fingerprints_in_any_folder(tmp_path: Path) -> None:
    one = weights_fingerprint(make_weights(tmp_path / "one", model=1))
    assert len(one) == 16
    assert one == weights_fingerprint(make_weights(tmp_path / "two", model=1))


@pytest.mark.parametrize("rows", [64, 16384])
def test_other_weights_names_files_and_configurations_differ(tmp_path: Path, rows: int) -> None:
    folders = [
        make_weights(tmp_path / "one", rows, model=1),
        make_weights(tmp_path / "other weights", rows, model=2),
        make_weights(tmp_path / "other name", rows, weights=1),
        make_weights(tmp_path / "more", rows, model=1, more=1),
        make_weights(tmp_path / "other size", rows + 1, model=1),
        make_weights(tmp_path / "other config", rows, model=1),
    ]
    (folders[-1] / "config.json").write_text('{"vocab_size": 65}')
    assert len({weights_fingerprint(folder) for folder in folders}) == len(folders)


def test_a_large_file_is_sampled_from_its_first_byte_to_its_last(tmp_path: Path) -> None:
    folder = make_weights(tmp_path / "model", 16384, model=1)
    file = folder / "model.safetensors"
    seen = {weights_fingerprint(folder)}
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    for place in (header, file.stat().st_size - 1):
        with file.open("r+b") as data:
            data.seek(place)
            data.write(b"\xab")
        seen.add(weights_fingerprint(folder))
    assert len(seen) == 3


def test_a_huge_folder_is_not_read_whole(tmp_path: Path) -> None:
    for part in range(40):
        with (tmp_path / f"model-{part}.safetensors").open("wb") as file:
            file.write((2).to_bytes(8, "little") + b"{}")
            os.ftruncate(file.fileno(), 1 << 36)
    assert weights_fingerprint(tmp_path)  # reading all 2.5 TB would take hours


def test_a_damaged_header_is_hashed_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * (2 << 20))
    assert weights_fingerprint(tmp_path)


def test_a_tokenizer_is_identified_by_its_main_file(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    slow = tokenizer_fingerprint(tmp_path)
    (tmp_path / "merges.txt").write_text("a b")
    assert tokenizer_fingerprint(tmp_path) != slow
    (tmp_path / "tokenizer.json").write_text("{}")
    fast = tokenizer_fingerprint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "new"}')
    assert tokenizer_fingerprint(tmp_path) == fast
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    assert tokenizer_fingerprint(tmp_path) != fast


def test_nothing_to_hash_is_an_error_that_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no \.safetensors file"):
        weights_fingerprint(tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer: expected tokenizer\.json"):
        tokenizer_fingerprint(tmp_path)
    with pytest.raises(ValueError, match=r"has no \.safetensors file"):
        weights_fingerprint(tmp_path / "nowhere")


def test_weights_alone_are_enough(tmp_path: Path) -> None:
    whole = weights_fingerprint(make_weights(tmp_path, model=1))
    (tmp_path / "config.json").unlink()
    assert weights_fingerprint(tmp_path) != whole


def test_the_first_rows_fingerprint_does_not_depend_on_the_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    weights = {"a": torch.arange(6.0).view(3, 2), "b": torch.ones(2)}
    save_file(weights, one / "model.safetensors")
    # Files hold tensors in the order of layers, not of names.
    for name, file in (("a", "model-2"), ("b", "model-1")):
        save_file({name: weights[name]}, two / f"{file}.safetensors")
    (two / "config.json").write_text("{}")
    assert first_rows_fingerprint(one) == first_rows_fingerprint(two)
    assert weights_fingerprint(one) != weights_fingerprint(two)
    save_file({**weights, "b": torch.zeros(2)}, one / "model.safetensors")
    assert first_rows_fingerprint(one) != first_rows_fingerprint(two)
    # Drafters in use carry the fingerprint of their target: the algorithm must not change.
    assert first_rows_fingerprint(two) == "d8de5f913168eb28"
    with pytest.raises(ValueError, match=r"has no \.safetensors file"):
        first_rows_fingerprint(tmp_path)
    (one / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"the weights in .*one cannot be read"):
        first_rows_fingerprint(one)


def test_the_first_rows_fingerprint_covers_tensors_without_dimensions(tmp_path: Path) -> None:
    """Quantised weights have scales that are single numbers."""
    seen = set()
    for scale in (1.0, 2.0):
        weights = {"a": torch.ones(3, 2), "a.scale": torch.tensor(scale)}
        save_file(weights, tmp_path / "model.safetensors")
        seen.add(first_rows_fingerprint(tmp_path))
    assert len(seen) == 2


def test_the_size_of_weights_is_that_of_all_their_files(tmp_path: Path) -> None:
    assert weights_size(tmp_path) == 0
    for name, size in (("a.safetensors", 3), ("b.safetensors", 4), ("c.bin", 5)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert weights_size(tmp_path) == 7


def make_hub_cache(folder: Path, **revisions: str) -> Path:
    """The Hub's local cache with a model `org/name`, which has the given commits by branch."""
    model = folder / "models--org--name"
    (model / "refs").mkdir(parents=True)
    for branch, commit in revisions.items():
        (model / "refs" / branch).write_text(commit)
        snapshot = model / "snapshots" / commit
        snapshot.mkdir(parents=True)
        make_weights(snapshot, model=1)
    return model / "snapshots"


def test_a_model_of_the_hub_is_found_in_its_local_cache(tmp_path: Path) -> None:
    first, second = "1" * 40, "2" * 40
    snapshots = make_hub_cache(tmp_path, main=first, other=second)
    cache = str(tmp_path)
    assert local_folder("org/name", download_dir=cache) == snapshots / first
    assert local_folder("org/name", "other", cache) == snapshots / second
    assert local_folder("org/name", second, cache) == snapshots / second
    assert local_folder("org/name", "unknown", cache) is None
    assert local_folder("org/another", download_dir=cache) is None
    assert local_folder("no name / of a model", download_dir=cache) is None
    assert local_folder(str(snapshots)) == snapshots
    assert folder_with_weights("org/name", "other", cache) == snapshots / second
    # An engine reads the configuration before it downloads the weights.
    (snapshots / second / "model.safetensors").unlink()
    assert local_folder("org/name", "other", cache) == snapshots / second
    assert folder_with_weights("org/name", "other", cache) is None
    # A folder for downloads has the weights alone.
    (snapshots / first / "config.json").unlink()
    assert local_folder("org/name", download_dir=cache) == snapshots / first


@pytest.mark.parametrize(("given", "found"), [(1, 1), (None, None), ([1, 2], None), (64, None)])
def test_the_bos_is_one_token_of_the_vocabulary(given: object, found: int | None) -> None:
    assert bos_token(SimpleNamespace(bos_token_id=given), 64) == found
    assert bos_token(SimpleNamespace(), 64) is None


def test_draft_models_are_compared_with_the_revision_of_the_target_that_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = "1" * 40, "2" * 40
    snapshots = make_hub_cache(tmp_path, main=first, other=second)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for snapshot in (first, second):
        config = {"model_type": "llama", "vocab_size": 64}
        (snapshots / snapshot / "config.json").write_text(json.dumps(config))
        (snapshots / snapshot / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": {snapshot[:1]: 0}}})
        )
    draft = ModelSource(str(snapshots / second))
    with pytest.raises(ValueError, match=r"the tokenizers .* of the target org/name differ"):
        check_draft_model(ModelSource("org/name"), draft, LOGGER)
    check_draft_model(ModelSource("org/name", "other"), draft, LOGGER)
    assert "is no smaller than the target org/name" in caplog.text
    config = {"model_type": "llama", "vocab_size": 65}
    (snapshots / first / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has 64 tokens and the target org/name has 65"):
        check_draft_model(ModelSource("org/name"), draft, LOGGER)
