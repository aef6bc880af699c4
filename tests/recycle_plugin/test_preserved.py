"""What an engine's dummy requests leave of tables that were loaded: everything."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest.mock import Mock

import torch
from tree_kernels.memory import remember

from recycle_plugin import Tables
from recycle_plugin.storage.hot_start import open_hot_start
from recycle_plugin.storage.table_files import TableSaver

LOGGER = logging.getLogger("test")


def tables_of(file: Path) -> Tables:
    """Tables that are loaded from a file and saved to it."""
    tables = Tables(300, 8, torch.device("cpu"), bigrams=True, hot_start=True, memory=64)
    tables.saver = open_hot_start(tables, file, file.parent, LOGGER)
    return tables


def learn(tables: Tables, seed: int) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(seed))
    tokens = torch.tensor([4, 5, 6], dtype=torch.int32) + seed
    tables.learn(torch.zeros(3, dtype=torch.int64), tokens, tokens - 1, logits)
    remember(tables.memory, tokens)


def held(tables: Tables) -> list[torch.Tensor]:
    return [tables.matrix.clone(), tables.bigrams.clone(), tables.memory.text()]


def saved(tables: Tables) -> None:
    assert isinstance(tables.saver, TableSaver)
    tables.saver.close()


def test_tables_and_their_file_stay_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "tables"
    first = tables_of(file)
    learn(first, 1)
    saved(first)
    before = file.read_bytes()
    tables = tables_of(file)
    known = held(tables)
    with tables.preserved():
        learn(tables, 100)
        tables.reset()
        learn(tables, 200)
    assert all(map(torch.equal, held(tables), known))
    assert bool((known[0][5] >= 0).all())
    saved(tables)
    assert file.read_bytes() == before
    # What is learned later is saved.
    tables = tables_of(file)
    with tables.preserved():
        pass
    learn(tables, 2)
    saved(tables)
    assert file.read_bytes() != before


def test_primed_rows_are_still_kept_in_the_cache(tmp_path: Path) -> None:
    """A reset ends that, as it stands for new weights."""
    tables = tables_of(tmp_path / "tables")
    tables.priming = priming = Mock(matrix=tables.matrix.clone())
    with tables.preserved():
        tables.reset()
    assert tables.priming is priming
    priming.stop_saving.assert_not_called()
    tables.reset()
    priming.stop_saving.assert_called_once()
