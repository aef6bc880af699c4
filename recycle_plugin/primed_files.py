"""Where the primed matrix of a model is kept, and what a file of one must be."""

from __future__ import annotations

from pathlib import Path

import torch

from drafttree.cache import cache_root
from drafttree.fingerprint import weights_fingerprint
from recycle_plugin.files import Table, load_tables, save_tables, tokenizer_identity

_MATRIX = "matrix"


def primed_identity(folder: Path, k: int) -> dict[str, str]:
    """What a primed matrix depends on: the model in `folder`, and k.

    Raises:
        ValueError: it is no folder with a model's weights.
    """
    weights = weights_fingerprint(folder)
    return {"weights": weights, "tokenizer": tokenizer_identity(folder), "k": str(k)}


def primed_file(folder: Path, k: int) -> Path:
    """The file for the primed matrix of the model in `folder`; it need not be there yet.

    Raises:
        ValueError: it is no folder with a model's weights.
    """
    return file_of(primed_identity(folder, k))


def file_of(identity: dict[str, str]) -> Path:
    """The file for the primed matrix of that identity."""
    name = "{weights}-{tokenizer}-k{k}.safetensors".format(**identity)
    return cache_root() / "recycle" / name


def partial_file(file: Path) -> Path:
    """Where the rows are kept while not all are made."""
    return file.with_name(f"{file.stem}.partial{file.suffix}")


def save_primed(file: Path, matrix: torch.Tensor, identity: dict[str, str]) -> None:
    """Write a primed matrix, `int32 [V, k]`; rows not made yet hold -1.

    Raises:
        OSError: it cannot be written.
    """
    vocabulary = str(matrix.shape[0])
    save_tables(file, {_MATRIX: matrix}, {**identity, "vocabulary": vocabulary})


def load_primed(file: Path, identity: dict[str, str], vocab_size: int) -> torch.Tensor:
    """Read a primed matrix, `int32 [V, k]`, on the CPU.

    Raises:
        TablesError: there is none, it is damaged, or it belongs to something else.
    """
    expected = {_MATRIX: Table((vocab_size, int(identity["k"])), vocab_size=vocab_size)}
    return load_tables(file, expected, {**identity, "vocabulary": str(vocab_size)})[_MATRIX]


def rows_made(matrix: torch.Tensor) -> int:
    """How many rows of a primed matrix are made; they are made from the lowest id up."""
    return int((matrix[:, 0] >= 0).cumprod(0).sum())
