"""Files of primed matrices: their names in the cache, their identity, reading and writing."""

from __future__ import annotations

from pathlib import Path

import torch
from tree_kernels.cache import cache_root

from drafttree.model_files import weights_fingerprint
from recycle_plugin.storage.table_files import (
    TableSpec,
    load_tables,
    save_tables,
    tokenizer_identity,
)

_MATRIX = "matrix"


def primed_identity(folder: Path, k: int) -> dict[str, str]:
    """The identity of a primed matrix: fingerprints of the model in `folder`, and k.

    Raises:
        ValueError: The folder contains no model weights.
    """
    weights = weights_fingerprint(folder)
    return {"weights": weights, "tokenizer": tokenizer_identity(folder), "k": str(k)}


def primed_file(folder: Path, k: int) -> Path:
    """The cache file for the primed matrix of the model in `folder`; it need not exist yet.

    Raises:
        ValueError: The folder contains no model weights.
    """
    return cached_file(primed_identity(folder, k))


def cached_file(identity: dict[str, str]) -> Path:
    """The cache file for the primed matrix with this identity."""
    name = "{weights}-{tokenizer}-k{k}.safetensors".format(**identity)
    return cache_root() / "recycle" / name


def partial_file(file: Path) -> Path:
    """The file beside `file` with the rows computed so far."""
    return file.with_name(f"{file.stem}.partial{file.suffix}")


def save_primed(file: Path, matrix: torch.Tensor, identity: dict[str, str]) -> None:
    """Write a primed matrix, `int32 [V, k]`; rows that are not computed yet are -1.

    Raises:
        OSError: The file cannot be written.
    """
    vocabulary = str(matrix.shape[0])
    save_tables(file, {_MATRIX: matrix}, {**identity, "vocabulary": vocabulary})


def load_primed(file: Path, identity: dict[str, str], vocab_size: int) -> torch.Tensor:
    """Read a primed matrix, `int32 [V, k]`, into CPU memory.

    Raises:
        TablesError: The file is missing or damaged, or has another identity.
    """
    expected = {_MATRIX: TableSpec((vocab_size, int(identity["k"])), vocab_size=vocab_size)}
    return load_tables(file, expected, {**identity, "vocabulary": str(vocab_size)})[_MATRIX]


def num_primed_rows(matrix: torch.Tensor) -> int:
    """Number of rows computed so far; they are computed in order of token id."""
    return int((matrix[:, 0] >= 0).cumprod(0).sum())
