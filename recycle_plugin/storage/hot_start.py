"""Hot start: a run of an engine saves what it learned to a file, and the next run loads it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from tree_kernels.memory import remember

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
    counts = tables.source_stats
    learned = {
        "matrix": tables.matrix,
        "pairs": tables.bigrams[None],  # as files of version 1 have it
        "tried_by_source": counts.tried,
        "hit_by_source": counts.hit,
    }
    expected = {
        name: TableSpec(
            tuple(table.shape),
            vocab_size=None if name.endswith("by_source") else vocab_size,
            optional=name.endswith("by_source"),
        )
        for name, table in learned.items()
    }
    memory = TableSpec((None,), vocab_size=vocab_size, optional=True)
    try:
        if file.exists():
            loaded = load_tables(file, {**expected, "memory": memory}, identity)
            texts = loaded.pop("memory", None)
            for name, table in loaded.items():
                learned[name].copy_(table)
            counts.refresh()
            if texts is not None:
                remember(tables.memory, texts)
    except (OSError, TablesError) as error:
        logger.warning("Token Recycling starts with empty tables and will not save them: %s", error)
        return None

    def snapshot() -> dict[str, torch.Tensor]:
        copies = {name: table.to("cpu", copy=True) for name, table in learned.items()}
        return {**copies, "memory": tables.memory.text()}

    return TableSaver(file, snapshot, identity, logger=logger)
