"""What tells one local model folder's weights and tokenizer from another's: short hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

DIGITS = 16

# A file is hashed whole up to here, and a folder's larger ones by about so many samples together.
_WHOLE = 1 << 20
_SAMPLE = 4096
_SAMPLES = 1024
_FEWEST = 16

# The fast tokenizer's file says all; without it, every other file has a part in the ids.
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


def weights_fingerprint(folder: Path) -> str:
    """A short hash of a model folder's weights, `*.safetensors`, and its `config.json`.

    Of a large file its name, size, header (names, types and shapes of all tensors) and samples
    spread evenly over the data are hashed, so that hundreds of gigabytes take a fraction of a
    second. A model trained further differs nearly everywhere; a change of a few bytes by hand may
    go unseen.

    Raises:
        ValueError: there is nothing to hash, or it cannot be read.
    """
    files = _found(folder, ("*.safetensors",))
    if not files:
        raise ValueError(f"{folder} has no .safetensors file: name the folder of a model's weights")
    samples = max(_FEWEST, _SAMPLES // len(files))
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


def tokenizer_fingerprint(folder: Path) -> str:
    """A short hash of what gives a model folder's tokens their ids.

    That is `tokenizer.json`; only where there is none, all files of a slow tokenizer.

    Raises:
        ValueError: there is nothing to hash, or it cannot be read.
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


def _found(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({f for pattern in patterns for f in folder.glob(pattern) if f.is_file()})


def _add(digest: hashlib._Hash, file: Path, samples: int) -> None:
    with file.open("rb", buffering=0) as data:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        if size <= _WHOLE:
            digest.update(data.readall())
            return
        # A safetensors file begins with its header's length; a damaged one must not ask for more.
        header = min(int.from_bytes(data.read(8), "little"), size - 8)
        digest.update(data.read(header))
        first, last = 8 + header, max(8 + header, size - _SAMPLE)
        for number in range(samples):
            data.seek(first + (last - first) * number // (samples - 1))
            digest.update(data.read(_SAMPLE))
