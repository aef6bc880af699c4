"""Local model folders in Hugging Face's layout: fingerprints, size, and whether a draft model fits.

Nothing here needs an engine or loads weights into memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from contextlib import ExitStack
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

# Files up to this size are hashed whole. Larger files of a folder share this many samples.
_WHOLE_FILE = 1 << 20
_SAMPLE_SIZE = 4096
_SAMPLES = 1024
_MIN_SAMPLES = 16

# A fast tokenizer is one file. Without it, all of these determine the token ids.
_FAST_TOKENIZER = "tokenizer.json"
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
        from huggingface_hub import snapshot_download
    except ImportError:  # no engine is installed
        return None
    try:
        found = snapshot_download(
            model, revision=revision, cache_dir=download_dir, local_files_only=True
        )
    except (OSError, ValueError):  # not in the cache, or no name of a model
        return None
    return Path(found)


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
    files = _found(folder, (_FAST_TOKENIZER,)) or _found(folder, _TOKENIZER_PARTS)
    if not files:
        raise ValueError(
            f"{folder} has no tokenizer: expected {_FAST_TOKENIZER}, or files such as "
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


def check_draft_model(
    target: str, draft: str, logger: logging.Logger, *, trust_remote_code: bool = False
) -> None:
    """Refuse a draft model whose token ids differ from the target's, and warn if it is not smaller.

    Without a `tokenizer.json` in both folders only the sizes of the vocabularies are compared.

    Args:
        target: Folder of the target, or a name that transformers resolves.
        draft: Folder of the draft model, or a name that transformers resolves.
        logger: Logger for the warning.
        trust_remote_code: Whether code in the folders may run to read their configurations.

    Raises:
        ValueError: The vocabularies differ, or a configuration cannot be read.
    """
    trusted = {"trust_remote_code": trust_remote_code}
    sizes = [
        vocabulary_size(target, "target", **trusted),
        vocabulary_size(draft, "draft model", **trusted),
    ]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft model {draft} has {sizes[1]} tokens and the target {target} has "
            f"{sizes[0]}: use a draft model of the same family"
        )
    files = [Path(folder) / _FAST_TOKENIZER for folder in (target, draft)]
    if all(file.is_file() for file in files):
        vocabularies = [_vocabulary(file) for file in files]
        if vocabularies[0] != vocabularies[1]:
            raise ValueError(
                f"the tokenizers of the draft model {draft} and of the target {target} differ: use "
                "a draft model of the same family"
            )
    if 0 < weights_size(Path(target)) <= weights_size(Path(draft)):
        logger.warning(
            "The draft model %s is no smaller than the target %s: it will not be faster",
            draft,
            target,
        )


def vocabulary_size(
    model: str | Path, name: str = "model", *, trust_remote_code: bool = False
) -> int:
    """The number of tokens of a model's logits, from its configuration.

    Args:
        model: Folder of the model, or its name on the Hub.
        name: What the model is, for the message.
        trust_remote_code: Whether code in the folder may run to read its configuration.

    Raises:
        ValueError: The configuration cannot be read.
    """
    return _number(model, name, "vocab_size", trust_remote_code)


def attention_heads(
    model: str | Path, name: str = "model", *, trust_remote_code: bool = False
) -> int:
    """The number of a model's query heads; otherwise as `vocabulary_size`."""
    return _number(model, name, "num_attention_heads", trust_remote_code)


def _number(model: str | Path, name: str, field: str, trust_remote_code: bool) -> int:
    """A number in a model's configuration."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        return int(getattr(config.get_text_config(), field))
    except Exception as error:
        # What transformers raises depends on what is wrong with the file.
        raise ValueError(f"the {name} {model} cannot be read: {error}") from error


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
