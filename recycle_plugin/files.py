"""Token Recycling's tables on disk: safetensors files that say what they belong to.

A file's metadata holds the format, its version and the tables' identity: what must be equal for
them to be of use, such as the tokenizer's fingerprint and k.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from drafttree.fingerprint import tokenizer_fingerprint

FORMAT = "drafttree-token-recycling"
VERSION = "1"

# A keeper's tables rest when they have not changed for so many seconds.
_REST = 1.0
# What a killed writer left is removed after so many seconds.
_STALE = 3600.0

Tables = Mapping[str, torch.Tensor]
Identity = Mapping[str, str]


class TablesError(ValueError):
    """A file of tables is of no use here; the message names it, what is wrong and the mend."""


def tokenizer_identity(folder: Path) -> str:
    """What tells the tokenizer of a model's folder from others, as part of tables' identity."""
    try:
        return tokenizer_fingerprint(folder)
    except ValueError:
        return "none"  # a model can be served on token ids alone


@dataclass(frozen=True)
class Table:
    """What a table must be.

    Attributes:
        vocab_size: of one that holds token ids: each must be below it, and at least -1, which
            stands for none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int32
    vocab_size: int | None = None


def save_tables(file: Path, tables: Tables, identity: Identity) -> None:
    """Write a file of tables, or replace it whole: a reader never sees half a file.

    Its folder is made if need be. Another writer of the same file does no harm: the last wins.

    Raises:
        OSError: it cannot be written.
    """
    contents = {name: table.detach().cpu().contiguous() for name, table in tables.items()}
    data = save(contents, {**identity, "format": FORMAT, "version": VERSION})
    file.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(file)
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def load_tables(
    file: Path, expected: Mapping[str, Table], identity: Identity
) -> dict[str, torch.Tensor]:
    """Read the expected tables of a file, on the CPU; what else it holds is left there.

    Raises:
        TablesError: there is no such file, it is damaged, or it belongs to something else.
    """
    if not file.is_file():
        raise TablesError(f"{file} is no file: name one that was saved before")
    try:
        with safe_open(file, "pt") as content:
            _check_identity(file, content.metadata() or {}, identity)
            missing = sorted(set(expected).difference(content.keys()))
            if missing:
                raise TablesError(f"{file} lacks {', '.join(missing)}: delete it to begin anew")
            # Copies: its own tensors are the file's memory, and change or vanish with it.
            tables = {name: content.get_tensor(name).clone() for name in expected}
    except (OSError, SafetensorError) as error:
        raise TablesError(
            f"{file} is damaged or cannot be read ({error}): delete it to begin anew"
        ) from error
    for name, table in tables.items():
        _check_table(file, name, table, expected[name])
    return tables


def _check_identity(file: Path, found: Identity, identity: Identity) -> None:
    if found.get("format") != FORMAT:
        raise TablesError(f"{file} holds no tables of Token Recycling: name another file")
    if found.get("version") != VERSION:
        raise TablesError(
            f"{file} is of version {found.get('version')}, and {VERSION} is known here: "
            "delete it to begin anew, or name another file"
        )
    for key, value in identity.items():
        if found.get(key) != value:
            raise TablesError(
                f"{file} belongs to another {key}, {found.get(key, 'unknown')}, and {value} is "
                "served: name another file, or delete it to begin anew"
            )


def _check_table(file: Path, name: str, table: torch.Tensor, expected: Table) -> None:
    mend = "name another file, or delete it to begin anew"
    if table.shape != expected.shape or table.dtype != expected.dtype:
        raise TablesError(
            f"{name} in {file} is {_describe(table.dtype, table.shape)}, not "
            f"{_describe(expected.dtype, expected.shape)}: {mend}"
        )
    if expected.vocab_size is not None and table.numel():
        low, high = (int(bound) for bound in table.aminmax())
        if low < -1 or high >= expected.vocab_size:
            raise TablesError(
                f"{name} in {file} holds ids from {low} to {high}, which are not all between -1 "
                f"and {expected.vocab_size - 1}: it is damaged, delete it to begin anew"
            )


def _describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {[*shape]}"


def _remove_stale(file: Path) -> None:
    for partial in file.parent.glob(f".{file.name}.*.partial"):
        with contextlib.suppress(OSError):  # another writer may have been faster
            if time.time() - partial.stat().st_mtime > _STALE:
                partial.unlink()


class Keeper:
    """Keeps a file up to date with tables that change while an engine serves.

    A thread saves them now and then, and when they have not changed for a second; they are saved a
    last time by `close`, at the latest when the process ends by itself. A killed one loses
    what came after the last save.

    `snapshot` is called in that thread, while the tables may be written to. So a saved row may be
    torn, half of before and half of after a step. That can make a draft worse, never an answer:
    whatever is drafted, the target verifies. Its values must be such that nobody writes to them
    while they are written out, copies on the CPU.
    """

    def __init__(
        self,
        file: Path,
        snapshot: Callable[[], Tables],
        identity: Identity,
        every: float = 60.0,
        logger: logging.Logger | None = None,
    ) -> None:
        """Begin to keep `file`, saved once in `every` seconds while the tables change.

        Raises:
            ValueError: `every` is not positive.
        """
        if every <= 0:
            raise ValueError(f"every={every} seconds is too often: give more than 0")
        self._file = file
        self._snapshot = snapshot
        self._identity = dict(identity)
        self._every = every
        self._logger = logger or logging.getLogger(__name__)
        self._changed = False
        self._touched = False
        self._failing = False
        self._saving = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keep tables", daemon=True)
        # Unlike atexit, this also runs in processes that multiprocessing forked.
        self._finalizer = Finalize(None, self._finish, exitpriority=10)
        self._thread.start()

    def touch(self) -> None:
        """Hear that the tables have changed; cheap enough for every step."""
        self._changed = self._touched = True

    def save(self) -> bool:
        """Save now; whether it worked. A failure is logged, once until it works again."""
        with self._saving:
            self._changed = False
            try:
                save_tables(self._file, self._snapshot(), self._identity)
            except (OSError, RuntimeError) as error:
                self._changed = True
                if not self._failing:
                    self._logger.warning(
                        "Token Recycling's tables cannot be saved to %s: %s. They are tried again "
                        "and kept in memory meanwhile; free the disk or let the folder be written",
                        *(self._file, error),
                    )
                self._failing = True
            else:
                self._failing = False
            return not self._failing

    def close(self) -> None:
        """Stop, and save what has changed a last time. Closing again does nothing."""
        self._finalizer()

    def _finish(self) -> None:
        self._closing.set()
        self._thread.join()
        if self._changed:
            self.save()

    def _run(self) -> None:
        # Some hosts kill their processes at the end: what was learnt is saved once they rest.
        saved = time.monotonic()
        while not self._closing.wait(min(self._every, _REST)):
            resting, self._touched = not self._touched, False
            if self._changed and (resting or time.monotonic() - saved >= self._every):
                self.save()
                saved = time.monotonic()
