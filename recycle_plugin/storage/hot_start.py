"""Hot start: a run of an engine saves what it learned to a file, and the next run loads it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tree_kernels.memory import TextMemory

from drafttree.method import Remembered
from drafttree.model_files import ModelSource, vocabulary_size
from recycle_plugin.storage.table_files import (
    TableSaver,
    TablesError,
    TableSpec,
    claim,
    claimed,
    close_earlier,
    give_up,
    load_tables,
    save_tables,
    tokenizer_identity,
)
from recycle_plugin.tables import Tables

if TYPE_CHECKING:
    from recycle_plugin.config import RecycleOptions


class _Learned:
    """What is kept of an engine's tables, by its name in a file.

    Args:
        tables: The tables.
        target: The target's folder, whose tokenizer is part of the file's identity.
    """

    def __init__(self, tables: Tables, target: Path) -> None:
        self._vocab_size, k = tables.matrix.shape
        self._owner = tables
        self._stats = tables.source_stats
        self._tables = {
            "matrix": tables.matrix,
            "pairs": tables.bigrams[None],  # as files of version 1 have it
        }
        self._counts = {"hit_by_source": self._stats.hit, "tried_by_source": self._stats.tried}
        self.identity = {
            "tokenizer": tokenizer_identity(target),
            "k": str(k),
            "vocabulary": str(self._vocab_size),
        }

    def load(self, file: Path, *, grows: bool = False) -> int:
        """Fill the tables from a file; what files of earlier versions lack stays empty.

        Args:
            file: The file.
            grows: Whether a memory that is too small for the texts in the file becomes larger.

        Returns:
            The number of tokens of the texts in the file.

        Raises:
            TablesError: The file is damaged or belongs to other tables.
        """
        size = self._vocab_size
        expected = {
            **{
                name: TableSpec(tuple(t.shape), vocab_size=size) for name, t in self._tables.items()
            },
            **{name: TableSpec(tuple(t.shape), optional=True) for name, t in self._counts.items()},
            "memory": TableSpec((None,), vocab_size=size, optional=True),
        }
        loaded = load_tables(file, expected, self.identity)
        _check_counts(file, loaded)
        texts = loaded.pop("memory", None)
        for name, table in loaded.items():
            (self._tables | self._counts)[name].copy_(table)
        while bool((self._stats.tried > self._stats.MOST_TRIED).any()):
            self._stats.halve()
        self._stats.refresh()
        if texts is None:
            return 0
        memory = self._owner.memory
        if grows and len(texts) > memory.capacity:
            self._owner.memory = TextMemory.of(len(texts), memory.tokens.device)
        self._owner.remember(texts)
        return int((texts >= 0).sum())

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Copies in CPU memory."""
        tables = self._tables | self._counts
        copies = {name: table.to("cpu", copy=True) for name, table in tables.items()}
        # The engine may count between two copies, or set the counts back.
        copies["hit_by_source"].clamp_(max=copies["tried_by_source"])
        return {**copies, "memory": self._owner.memory.text()}


def _check_counts(file: Path, loaded: dict[str, torch.Tensor]) -> None:
    """Refuse counts that no acceptance has; probabilities are computed from them."""
    tried, hit = loaded.get("tried_by_source"), loaded.get("hit_by_source")
    is_valid = (tried is None) == (hit is None)
    if tried is not None and hit is not None:
        is_valid = bool(((hit >= 0) & (hit <= tried)).all())
    if not is_valid:
        raise TablesError(
            f"the counts of accepted drafts in {file} are impossible: the file is damaged, delete "
            "it to start again"
        )


def _is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def open_hot_start(
    tables: Tables, file: Path, target: Path, logger: logging.Logger
) -> TableSaver | None:
    """Load the tables from a file, if it exists, and save them to it from now on.

    A file that cannot be used is left untouched: a warning with the reason is logged, None is
    returned and nothing is saved. One process at a time saves to a file; others load it alone. In
    one process the engine that was started last saves to it.

    Args:
        tables: Tables to fill and to save.
        file: The user's file; it need not exist yet.
        target: The target's folder, whose tokenizer is part of the file's identity.
        logger: Logger for the warning.
    """
    learned = _Learned(tables, target)
    close_earlier(file)
    why_unsaved = None
    try:
        # Claimed first: what another process saved in between would be lost.
        if not claim(file):
            why_unsaved = (
                "another engine or replica does: name another file with hot_start to keep them too"
            )
    except TablesError as error:
        why_unsaved = str(error)
    try:
        exists = file.exists()
        if exists:
            learned.load(file)
            if why_unsaved is None and not (_is_writable(file) and _is_writable(file.parent)):
                give_up(file)
                why_unsaved = "this user has no permission to write it"
    except (OSError, TablesError) as error:
        give_up(file)
        logger.warning("Token Recycling starts with empty tables and will not save them: %s", error)
        return None
    if why_unsaved is not None:
        logger.warning(
            "Token Recycling starts with %s and will not save them, because %s",
            f"the tables in {file}" if exists else "empty tables",
            why_unsaved,
        )
        return None
    return TableSaver(file, learned.snapshot, learned.identity, logger=logger)


def remember_corpus(target: Path, options: RecycleOptions, texts: Iterable[str]) -> Remembered:
    """Put texts into the memory of the file that `hot_start` names, for the engine's next start.

    The memory is as large as the options say or, if they do not name its size, as what the file
    holds. What came last is kept.

    Args:
        target: The target's folder.
        options: The options that the engine will have.
        texts: The texts.

    Raises:
        ValueError: The options name no file or have no memory, the file belongs to another model
            or an engine saves to it, or the target has no tokenizer.
        OSError: The file cannot be written.
    """
    file = options.hot_start_file
    if file is None:
        raise ValueError("a corpus needs a file to be kept in: give the option hot_start=FILE")
    if not options.memory_tokens:
        raise ValueError(f"memory={options.memory} keeps no corpus: leave memory out")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    except Exception as error:
        # This may run third-party code, which can raise anything.
        raise ValueError(f"transformers cannot load the tokenizer in {target}: {error}") from error
    tables = Tables(
        vocabulary_size(ModelSource(str(target))),
        options.k,
        torch.device("cpu"),
        bigrams=True,
        hot_start=True,
        memory=options.memory_tokens,
    )
    learned = _Learned(tables, target)
    with claimed(file) as is_claimed:
        if not is_claimed:
            raise ValueError(
                f"an engine saves to hot_start={options.hot_start}, and would replace the file: "
                "stop it first, or give texts to a running SGLang server by /add_external_corpus"
            )
        earlier = 0
        if file.exists():
            earlier = learned.load(file, grows="memory" not in options.model_fields_set)
        count = 0
        for text in texts:
            tokens = tokenizer.encode(text, add_special_tokens=False)
            count += tables.remember(torch.tensor(tokens, dtype=torch.int32))
        save_tables(file, learned.snapshot(), learned.identity)
    # Whatever leaves the memory is older than what stays.
    kept = int((tables.memory.tokens >= 0).sum())
    of_texts = min(count, kept)
    return Remembered(given=count, kept=of_texts, dropped=earlier - (kept - of_texts))
