"""What is learnt from one run of an engine to the next, in a file that the user names."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from recycle_plugin.files import Keeper, Table, TablesError, load_tables, tokenizer_identity
from recycle_plugin.tables import Tables


def keep(tables: Tables, file: Path, target: str, logger: logging.Logger) -> Keeper | None:
    """Take over what a file holds, if it is there, and keep it up to date from now on.

    A file that is of no use is left alone: a warning says why, and nothing is saved in its place.
    """
    vocab_size, k = tables.matrix.shape
    identity = {
        "tokenizer": tokenizer_identity(Path(target)),
        "k": str(k),
        "vocabulary": str(vocab_size),
    }
    learnt = {
        "matrix": tables.matrix,
        "pairs": tables.pairs,
        "tried": tables.tally.tried,
        "hit": tables.tally.hit,
    }
    counts = ("tried", "hit")
    expected = {
        name: Table(tuple(table.shape), vocab_size=None if name in counts else vocab_size)
        for name, table in learnt.items()
    }
    try:
        if file.exists():
            for name, table in load_tables(file, expected, identity).items():
                learnt[name].copy_(table)
            tables.tally.refresh()
    except (OSError, TablesError) as error:
        logger.warning("Token Recycling begins with nothing learnt, and saves nothing: %s", error)
        return None

    def snapshot() -> dict[str, torch.Tensor]:
        return {name: table.to("cpu", copy=True) for name, table in learnt.items()}

    return Keeper(file, snapshot, identity, logger=logger)
