"""Hot start: a run of an engine saves what it learned to a file, and the next run loads it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from recycle_plugin.storage.table_files import (
    TableSaver,
    TablesError,
    TableSpec,
    load_tables,
    tokenizer_identity,
)
from recycle_plugin.tables import Tables


def open_hot_start(
    tables: Tables, file: Path, target: str, logger: logging.Logger
) -> TableSaver | None:
    """Load the tables from a file, if it exists, and save them to it from now on.

    A file that cannot be used is left untouched: a warning with the reason is logged, None is
    returned and nothing is saved.

    Args:
        tables: Tables to fill and to save.
        file: The user's file; it need not exist yet.
        target: The target's folder, whose tokenizer is part of the file's identity.
        logger: Logger for the warning.
    """
    vocab_size, k = tables.matrix.shape
    identity = {
        "tokenizer": tokenizer_identity(Path(target)),
        "k": str(k),
        "vocabulary": str(vocab_size),
    }
    learned = {
        "matrix": tables.matrix,
        "pairs": tables.bigrams,  # the bigram table's name in files of version 1
        "tried": tables.source_stats.tried,
        "hit": tables.source_stats.hit,
    }
    counts = ("tried", "hit")
    expected = {
        name: TableSpec(tuple(table.shape), vocab_size=None if name in counts else vocab_size)
        for name, table in learned.items()
    }
    try:
        if file.exists():
            for name, table in load_tables(file, expected, identity).items():
                learned[name].copy_(table)
            tables.source_stats.refresh()
    except (OSError, TablesError) as error:
        logger.warning("Token Recycling starts with empty tables and will not save them: %s", error)
        return None

    def snapshot() -> dict[str, torch.Tensor]:
        return {name: table.to("cpu", copy=True) for name, table in learned.items()}

    return TableSaver(file, snapshot, identity, logger=logger)
