"""Files of primed matrices in the user's cache: their names, their identity, reading, writing."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from tree_kernels.cache import cache_root

from drafttree.model_files import weights_fingerprint
from recycle_plugin.storage.table_files import (
    TablesError,
    TableSpec,
    load_tables,
    save_tables,
    tokenizer_identity,
)

EMPTY = -1
"""All candidates of a row that is not computed yet."""

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


def save_primed(file: Path, matrix: torch.Tensor, identity: dict[str, str]) -> None:
    """Write a primed matrix, `int32 [V, k]`; rows that are not computed yet are -1.

    Raises:
        OSError: The file cannot be written.
    """
    vocabulary = str(matrix.shape[0])
    save_tables(file, {_MATRIX: matrix}, {**identity, "vocabulary": vocabulary})


def load_primed(file: Path, identity: dict[str, str], vocab_size: int) -> torch.Tensor:
    """Read a primed matrix, `int32 [V, k]`, into CPU memory; rows not computed yet are -1.

    Raises:
        TablesError: The file is missing or damaged, or has another identity.
    """
    expected = {_MATRIX: TableSpec((vocab_size, int(identity["k"])), vocab_size=vocab_size)}
    return load_tables(file, expected, {**identity, "vocabulary": str(vocab_size)})[_MATRIX]


class PrimedFile:
    """The cache file of one served model, or nothing if the model's files are not known.

    Whatever is wrong with the file is logged once, and then the rows are kept in memory only.

    Attributes:
        path: The file; None if nothing is read or written.
        is_of_other_model: Whether the served model may differ from its files.
    """

    def __init__(
        self,
        folder: Path | None,
        k: int,
        logger: logging.Logger,
        changed_by: str | None = None,
    ) -> None:
        """Find the file.

        Args:
            folder: Folder of the model's files on this machine; None if it is not known.
            k: Candidates per token.
            logger: Logger for warnings.
            changed_by: See `Target.changed_by`.
        """
        self._logger = logger
        self.is_of_other_model = changed_by is not None
        self._identity: dict[str, str] = {}
        self.path: Path | None = None
        try:
            if changed_by is not None:
                raise ValueError(f"with {changed_by} the model may differ from its files")
            if folder is None:
                raise ValueError("the folder of the model's weights is not known")
            self._identity = primed_identity(folder, k)
            self.path = cached_file(self._identity)
        except ValueError as error:
            logger.warning(
                "Primed rows of Token Recycling are kept in memory for this run only: %s", error
            )

    def load(self, vocab_size: int) -> torch.Tensor | None:
        """The rows that are in the file, `int32 [V, k]`; None if it has none that can be used."""
        if self.path is None:
            return None
        try:
            if not self.path.exists():
                return None
            return load_primed(self.path, self._identity, vocab_size)
        except TablesError as error:
            self._logger.warning(
                "Token Recycling is primed anew, and the file is then written again: %s", error
            )
        except OSError as error:
            self._logger.warning(
                "Primed rows of Token Recycling are kept in memory for this run only, because the "
                "cache cannot be read (%s): set DRAFTTREE_CACHE to a folder of your own",
                error,
            )
            self.close()
        return None

    def save(self, matrix: torch.Tensor) -> None:
        """Write the rows of `int32 [V, k]`, and those that another engine has written meanwhile."""
        if self.path is None:
            return
        try:
            matrix = matrix.cpu()
            if self.path.exists():
                matrix = self._merged(matrix)
            save_primed(self.path, matrix, self._identity)
        except OSError as error:
            self._logger.warning(
                "Primed rows of Token Recycling are kept in memory for this run only, because the "
                "cache cannot be written (%s): set DRAFTTREE_CACHE to a writable folder",
                error,
            )
            self.close()

    def close(self) -> None:
        """Write no more rows."""
        self.path = None

    def _merged(self, matrix: torch.Tensor) -> torch.Tensor:
        assert self.path is not None
        try:
            written = load_primed(self.path, self._identity, len(matrix))
        except TablesError:  # `load` has warned of it
            return matrix
        return torch.where(matrix[:, :1] == EMPTY, written, matrix)
