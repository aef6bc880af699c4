"""Local model folders in Hugging Face's layout: fingerprints, size, and whether a draft model fits.

Nothing here needs an engine or loads weights into memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

DIGITS = 16
"""Hexadecimal digits of a fingerprint."""

# The formats that read a model's own files. Others make random weights or fetch them elsewhere.
_FORMATS_OF_FILES = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "layered",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)

# A model on the Hub has the first of them, and a cache of its weights alone one of the others.
_MAIN_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")

# Files up to this size are hashed whole. Larger files of a folder share this many samples.
_WHOLE_FILE = 1 << 20
_SAMPLE_SIZE = 4096
_SAMPLES = 1024
_MIN_SAMPLES = 16

FAST_TOKENIZER = "tokenizer.json"
"""The only file of a fast tokenizer."""
# Without it, all of these determine the token ids.
_TOKENIZER_PARTS = (
    "*.model",
    "*.tiktoken",
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def local_folder(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> Path | None:
    """The folder of a model's files on this machine; None if there is none.

    Args:
        model: A folder, or a name on the Hugging Face Hub, whose snapshot is looked up in the local
            cache.
        revision: The snapshot's branch, tag or commit; None for the main branch.
        download_dir: Folder of the cache; None for the user's.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # no engine is installed
        return None
    try:
        # Engines leave out files that they do not need, so the snapshot may not be complete.
        found = [
            try_to_load_from_cache(model, name, cache_dir=download_dir, revision=revision)
            for name in _MAIN_FILES
        ]
    except ValueError:  # no name of a model
        return None
    return next((Path(file).parent for file in found if isinstance(file, str)), None)


def folder_with_weights(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> Path | None:
    """As `local_folder`, and None for a folder without weights."""
    folder = local_folder(model, revision, download_dir)
    return folder if folder is not None and weights_size(folder) else None


def reads_files(load_format: str) -> bool:
    """Whether an engine with this `load_format` reads the weights from the model's own files.

    Random weights (`dummy`) are none of these, and nothing is known of the formats of plugins.
    """
    return load_format in _FORMATS_OF_FILES


def bos_token(config: Any, vocab_size: int) -> int | None:
    """The token that texts begin with, from a model's text configuration; None if it has none."""
    token = getattr(config, "bos_token_id", None)
    return token if isinstance(token, int) and 0 <= token < vocab_size else None


def weights_size(folder: Path) -> int:
    """Size of a model's weights in bytes; 0 for a folder without any."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def weights_fingerprint(folder: Path) -> str:
    """Content hash of a model folder's weights, `*.safetensors`, and of its `config.json`.

    For a large file it covers the name, the size, the header (names, types and shapes of all
    tensors) and evenly spaced samples of the data, so hundreds of gigabytes take a fraction of a
    second. Further training changes nearly every byte and is always seen; an edit of a few bytes
    may not be.

    Raises:
        ValueError: The folder has no weights, or they cannot be read.
    """
    files = _weights(folder)
    samples = max(_MIN_SAMPLES, _SAMPLES // len(files))
    digest = hashlib.sha256()
    try:
        for file in files:
            _add(digest, file, samples)
        config = folder / "config.json"
        if config.is_file():
            _add(digest, config, samples)
    except OSError as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from error
    return digest.hexdigest()[:DIGITS]


def first_rows_fingerprint(folder: Path) -> str:
    """Content hash of the name and the first row of every tensor of a model folder.

    Trained drafters store it as the identity of their target. They do not store
    `weights_fingerprint`, because copies of a target may have another `config.json` or be split
    into files differently, and because existing drafters already carry this one. A tensor without
    dimensions is hashed whole.

    Raises:
        ValueError: The folder has no weights, or they cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    digest = hashlib.sha256()
    file_of: dict[str, Any] = {}
    try:
        with ExitStack() as opened:
            for path in _weights(folder):
                file = opened.enter_context(safe_open(path, "pt"))
                file_of |= dict.fromkeys(file.keys(), file)
            for name, file in sorted(file_of.items(), key=itemgetter(0)):
                rows = file.get_slice(name)
                first = rows[:1] if rows.get_shape() else file.get_tensor(name)
                digest.update(name.encode() + first.float().numpy().tobytes())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from error
    return digest.hexdigest()[:DIGITS]


def tokenizer_fingerprint(folder: Path) -> str:
    """Content hash of the files that determine the token ids of a model folder.

    These are `tokenizer.json` or, if there is none, all files of a slow tokenizer.

    Raises:
        ValueError: The folder has no tokenizer, or it cannot be read.
    """
    files = _found(folder, (FAST_TOKENIZER,)) or _found(folder, _TOKENIZER_PARTS)
    if not files:
        raise ValueError(
            f"{folder} has no tokenizer: expected {FAST_TOKENIZER}, or files such as "
            "tokenizer.model or vocab.json"
        )
    digest = hashlib.sha256()
    try:
        for file in files:
            content = file.read_bytes()
            digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
    except OSError as error:
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error
    return digest.hexdigest()[:DIGITS]


@dataclass(frozen=True)
class ModelSource:
    """A model as an engine names it.

    Attributes:
        name: Folder of the model, or its name on the Hugging Face Hub.
        revision: Branch, tag or commit on the Hub; None for the main branch.
        trust_remote_code: Whether code among its files may run to read its configuration.
        download_dir: Folder of the local cache with its weights; None for the user's.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    download_dir: str | None = None


def check_draft_model(target: ModelSource, draft: ModelSource, logger: logging.Logger) -> None:
    """Refuse a draft model whose token ids differ from the target's, and warn if it is not smaller.

    Of a model on the Hub the configuration and the tokenizer are downloaded if they are missing.
    Without a `tokenizer.json` of both only the sizes of the vocabularies are compared.

    Args:
        target: The target.
        draft: The draft model.
        logger: Logger for the warning.

    Raises:
        ValueError: The vocabularies differ, or a configuration cannot be read.
    """
    sizes = [vocabulary_size(target, "target"), vocabulary_size(draft, "draft model")]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft model {draft.name} has {sizes[1]} tokens and the target {target.name} has "
            f"{sizes[0]}: use a draft model of the same family"
        )
    files = _fast_tokenizer(target), _fast_tokenizer(draft)
    if files[0] and files[1] and _vocabulary(files[0]) != _vocabulary(files[1]):
        raise ValueError(
            f"the tokenizers of the draft model {draft.name} and of the target {target.name} "
            "differ: use a draft model of the same family"
        )
    folders = [
        local_folder(model.name, model.revision, model.download_dir) for model in (target, draft)
    ]
    bytes_of_weights = [weights_size(folder) if folder else 0 for folder in folders]
    if 0 < bytes_of_weights[0] <= bytes_of_weights[1]:
        logger.warning(
            "The draft model %s is no smaller than the target %s: it will not be faster",
            draft.name,
            target.name,
        )


def vocabulary_size(model: ModelSource, role: str = "model") -> int:
    """The number of tokens of a model's logits, from its configuration.

    Args:
        model: The model.
        role: What the model is, for the message.

    Raises:
        ValueError: The configuration cannot be read.
    """
    return _number(model, role, "vocab_size")


def attention_heads(model: ModelSource, role: str = "model") -> int:
    """The number of a model's query heads; otherwise as `vocabulary_size`."""
    return _number(model, role, "num_attention_heads")


def _number(model: ModelSource, role: str, field: str) -> int:
    """A number in a model's configuration."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        return int(getattr(config.get_text_config(), field))
    except Exception as error:
        # What transformers raises depends on what is wrong with the file.
        raise ValueError(f"the {role} {model.name} cannot be read: {error}") from error


def _fast_tokenizer(model: ModelSource) -> Path | None:
    """A model's `tokenizer.json`; None if it has none."""
    from transformers.utils import cached_file

    try:
        found = cached_file(model.name, FAST_TOKENIZER, revision=model.revision)
    except OSError:
        return None
    return Path(found) if found is not None else None


def _vocabulary(file: Path) -> Any:
    """The vocabulary in a `tokenizer.json`.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("model", {}).get("vocab")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"the tokenizer {file} is damaged: {error!r}") from error


def _weights(folder: Path) -> list[Path]:
    files = _found(folder, ("*.safetensors",))
    if not files:
        raise ValueError(f"{folder} has no .safetensors file: name the folder of a model's weights")
    return files


def _found(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({f for pattern in patterns for f in folder.glob(pattern) if f.is_file()})


def _add(digest: hashlib._Hash, file: Path, samples: int) -> None:
    with file.open("rb", buffering=0) as data:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        if size <= _WHOLE_FILE:
            digest.update(data.readall())
            return
        # A safetensors file starts with the length of its header, which may be wrong if the file is
        # damaged.
        header = min(int.from_bytes(data.read(8), "little"), size - 8)
        digest.update(data.read(header))
        first, last = 8 + header, max(8 + header, size - _SAMPLE_SIZE)
        for number in range(samples):
            data.seek(first + (last - first) * number // (samples - 1))
            digest.update(data.read(_SAMPLE_SIZE))
