"""Token Recycling's tables on disk: safetensors files that carry the identity of their tables.

A file's metadata holds the format, its version and the identity of the tables: everything that must
match for them to be usable, such as the tokenizer's fingerprint and k.

Tables reveal the texts of requests, so new files and folders are for their owner alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import logging
import os
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tree_kernels.cache import make_private

from drafttree.model_files import tokenizer_fingerprint

FORMAT = "drafttree-token-recycling"
VERSION = "1"

# A saver writes its tables once they have not changed for this many seconds.
_IDLE_SECONDS = 1.0
# Partial files of killed writers are removed after this many seconds.
_STALE_SECONDS = 3600.0

_FILE_MODE = 0o600

NamedTensors = Mapping[str, torch.Tensor]
Identity = Mapping[str, str]


class TablesError(ValueError):
    """A file of tables cannot be used; the message names the file, what is wrong and the fix."""


def tokenizer_identity(folder: Path) -> str:
    """The tokenizer's part of an identity: its fingerprint, or `none` if the folder has none."""
    try:
        return tokenizer_fingerprint(folder)
    except ValueError:
        return "none"  # such a model can still be served on token ids


@dataclass(frozen=True)
class TableSpec:
    """The shape, type and values that a loaded table must have.

    Attributes:
        shape: Exact shape; None stands for any size.
        dtype: Exact data type.
        vocab_size: For tables of token ids, the size of the vocabulary: ids must be between -1,
            which means none, and `vocab_size - 1`. None for other tables.
        optional: Whether a file may lack the table, as files of earlier versions do.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype = torch.int32
    vocab_size: int | None = None
    optional: bool = False

    def allows(self, shape: tuple[int, ...]) -> bool:
        """Whether a table of `shape` fits."""
        return len(shape) == len(self.shape) and all(
            wanted in (None, size) for wanted, size in zip(self.shape, shape, strict=True)
        )


def save_tables(file: Path, tables: NamedTensors, identity: Identity) -> None:
    """Write a file of tables atomically: readers see the old file or the new one, never a part.

    Missing folders are created. If several processes write the same file, the last one wins. A new
    file can be read by its owner alone. One that exists keeps its permissions and, if the process
    may set them, its owner and its group. A symbolic link would be replaced, not followed.

    Raises:
        OSError: The file cannot be written.
    """
    contents = {name: table.detach().cpu().contiguous() for name, table in tables.items()}
    data = save(contents, {**identity, "format": FORMAT, "version": VERSION})
    make_private(file.parent)
    _remove_stale(file)
    before = file.stat() if file.exists() else None
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb", opener=_for_owner) as out:
            out.write(data)
            mode = _FILE_MODE
            if before is not None:
                mode = stat.S_IMODE(before.st_mode)
                if not _give_to_owner_of(before, out.fileno()):
                    mode &= ~stat.S_IRWXG  # the group is another one
            os.fchmod(out.fileno(), mode)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE_MODE)


def _give_to_owner_of(other: os.stat_result, descriptor: int) -> bool:
    """Give a new file the owner and the group of another, or the group alone, if this process may.

    Returns:
        Whether it has the group.
    """
    for owner in (other.st_uid, -1):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, owner, other.st_gid)
            return True
    return False


# By process: one that is forked does not have its parent's locks.
_claimed: dict[tuple[int, Path], int] = {}
_savers: dict[Path, TableSaver] = {}


def _has_claimed(file: Path) -> bool:
    """Whether this process has claimed a file; see `claim`."""
    return (os.getpid(), file) in _claimed


def claim(file: Path) -> bool:
    """Become the only process that writes a file, until this process ends.

    The lock is on a hidden file beside it, as saving replaces the file itself.

    Args:
        file: The file's one name, without symbolic links: another would have a lock of its own.

    Returns:
        Whether no other process has claimed it. Where files cannot be locked, that is not known and
        assumed.

    Raises:
        TablesError: The lock belongs to another user, so that it is not known.
    """
    # Closing any other descriptor of the same file would give up a process's own lock.
    if _has_claimed(file):
        return True
    lock = file.with_name(f".{file.name}.lock")
    try:
        make_private(file.parent)
        descriptor = _open_lock(file, lock)
    except OSError as error:
        if isinstance(error, PermissionError) and os.access(lock, os.F_OK):
            raise TablesError(
                f"an engine of another user may save to {file}: stop it if it is running and "
                f"delete {lock}, or name another file with hot_start"
            ) from error
        return True  # saving will fail too, and say so
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    _claimed[os.getpid(), file] = descriptor
    return True


def _open_lock(file: Path, lock: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        descriptor = os.open(lock, flags | os.O_CREAT | os.O_EXCL, _FILE_MODE)
    except FileExistsError:
        return os.open(lock, flags)
    # Root may have made it for another user's file, who must be able to lock it later.
    _give_to_owner_of((file if file.exists() else file.parent).stat(), descriptor)
    return descriptor


def give_up(file: Path) -> None:
    """Let other processes claim a file, if this one has."""
    if (descriptor := _claimed.pop((os.getpid(), file), None)) is not None:
        os.close(descriptor)


def close_earlier(file: Path) -> None:
    """Let an engine of this process save to a file for the last time, if one has done so.

    Otherwise it might save once more when the process ends, over what a later engine has learned.
    """
    if (saver := _savers.get(file)) is not None:
        saver.close()


@contextlib.contextmanager
def claimed(file: Path) -> Iterator[bool]:
    """A context in which this process has claimed a file, if no other has; see `claim`."""
    is_new = not _has_claimed(file)
    try:
        yield claim(file)
    finally:
        if is_new:
            give_up(file)


def load_tables(
    file: Path, expected: Mapping[str, TableSpec], identity: Identity
) -> dict[str, torch.Tensor]:
    """Read the expected tables of a file into CPU memory; other tables in it are ignored.

    Optional tables that the file lacks are missing in the result.

    Raises:
        TablesError: The file is missing, damaged or not readable, or its identity or its tables are
            not as expected.
    """
    if not file.is_file():
        raise TablesError(f"{file} is not a file: give the name of a saved file")
    try:
        file.open("rb").close()
    except PermissionError as error:
        raise TablesError(
            f"this user has no permission to read {file}: change its owner or its mode, or give "
            "another file"
        ) from error
    try:
        with safe_open(file, "pt") as content:
            _check_identity(file, content.metadata() or {}, identity)
            names = set(content.keys())
            missing = [name for name in sorted(expected) if name not in names]
            if lost := [name for name in missing if not expected[name].optional]:
                raise TablesError(f"{file} lacks {', '.join(lost)}: delete it to start again")
            # Cloned, because safetensors maps the file: tensors would change or vanish with it.
            there = [name for name in expected if name in names]
            tables = {name: content.get_tensor(name).clone() for name in there}
    except (OSError, SafetensorError) as error:
        # What cannot be read may be anything of the user's.
        raise TablesError(
            f"{file} is damaged, or not one of Token Recycling's files ({error}): give another "
            "file, or delete it if it is one of Token Recycling's"
        ) from error
    for name, table in tables.items():
        _check_table(file, name, table, expected[name])
    return tables


def _check_identity(file: Path, found: Identity, identity: Identity) -> None:
    if found.get("format") != FORMAT:
        raise TablesError(f"{file} contains no Token Recycling tables: give another file")
    if found.get("version") != VERSION:
        raise TablesError(
            f"{file} has version {found.get('version')}, but only {VERSION} is supported: "
            "delete it to start again, or give another file"
        )
    for key, value in identity.items():
        if found.get(key) != value:
            raise TablesError(
                f"{file} was made for {key} {found.get(key, 'unknown')}, but {value} is served: "
                "give another file, or delete it to start again"
            )


def _check_table(file: Path, name: str, table: torch.Tensor, expected: TableSpec) -> None:
    fix = "give another file, or delete it to start again"
    if not expected.allows(tuple(table.shape)) or table.dtype != expected.dtype:
        raise TablesError(
            f"{name} in {file} is {_describe(table.dtype, table.shape)}, not "
            f"{_describe(expected.dtype, expected.shape)}: {fix}"
        )
    if expected.vocab_size is not None and table.numel():
        low, high = (int(bound) for bound in table.aminmax())
        if low < -1 or high >= expected.vocab_size:
            raise TablesError(
                f"{name} in {file} has ids from {low} to {high}, outside -1 to "
                f"{expected.vocab_size - 1}: the file is damaged, delete it to start again"
            )


def _describe(dtype: torch.dtype, shape: tuple[int | None, ...]) -> str:
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return f"{str(dtype).removeprefix('torch.')} [{sizes}]"


def _remove_stale(file: Path) -> None:
    for partial in file.parent.glob(f".{glob.escape(file.name)}.*.partial"):
        with contextlib.suppress(OSError):  # another writer may have removed it
            if time.time() - partial.stat().st_mtime > _STALE_SECONDS:
                partial.unlink()


class TableSaver:
    """Saves the tables of a serving engine to a file, from a background thread.

    The thread saves periodically, and once the tables have not changed for a second. `close` saves
    once more; it also runs when the process exits normally. A killed process loses the changes
    since the last save.

    `snapshot` is called in that thread while the engine may be writing to the tables, so a saved
    row can mix values from before and after a step. That may lower acceptance but cannot change the
    output, because the target verifies every draft. `snapshot` must return copies in CPU memory
    that nothing else writes to.

    Once the tables' owner is garbage, the thread saves for the last time and other processes may
    claim the file.
    """

    def __init__(
        self,
        file: Path,
        snapshot: Callable[[], NamedTensors],
        identity: Identity,
        every: float = 60.0,
        logger: logging.Logger | None = None,
    ) -> None:
        """Start the thread.

        Args:
            file: File to save to.
            snapshot: Returns copies of the tables by name.
            identity: Identity to store in the file.
            every: Seconds between saves while the tables keep changing.
            logger: Logger for failures.

        Raises:
            ValueError: `every` is not positive.
        """
        if every <= 0:
            raise ValueError(f"every={every} seconds is not positive: use more than 0")
        self._file = file
        self._snapshot = snapshot
        self._identity = dict(identity)
        self._every = every
        self._logger = logger or logging.getLogger(__name__)
        self._before_close: weakref.WeakMethod[Callable[[], None]] | None = None
        self._changed = False
        self._touched = False
        self._emptied = False
        self._failing = False
        self._saving = threading.Lock()
        self._closing = threading.Event()
        self._is_orphan = False
        self._thread = threading.Thread(target=self._run, name="save tables", daemon=True)
        # Unlike atexit, this also runs in processes that multiprocessing forked.
        self._finalizer = Finalize(None, self._finish, exitpriority=10)
        self._thread.start()
        _savers[file] = self

    def belong_to(self, owner: object, before_close: Callable[[], None] | None = None) -> None:
        """Save until an object is garbage, which the saver itself does not keep alive.

        Args:
            owner: The object.
            before_close: Its method that writes to the tables what they still lack, called before
                the last save of a process.
        """
        if before_close is not None:
            self._before_close = weakref.WeakMethod(before_close)
        weakref.finalize(owner, self._orphan).atexit = False

    def _orphan(self) -> None:
        # The collector may run in any thread and anywhere in it, so the saver's own does the rest.
        self._is_orphan = True
        self._closing.set()

    def touch(self) -> None:
        """Record that the tables have changed; cheap enough to call in every step."""
        self._changed = self._touched = True

    def touch_emptied(self) -> None:
        """Record that the tables were emptied: the thread saves soon, however much they change."""
        self._changed = self._emptied = True

    def save(self) -> bool:
        """Save now and return whether it worked; repeated failures are logged once."""
        with self._saving:
            self._changed = self._emptied = False
            try:
                save_tables(self._file, self._snapshot(), self._identity)
            except (OSError, RuntimeError) as error:
                self._changed = True
                if not self._failing:
                    self._logger.warning(
                        "Token Recycling's tables cannot be saved to %s: %s. They stay in memory "
                        "and saving is retried; free disk space or make the folder writable",
                        *(self._file, error),
                    )
                self._failing = True
            else:
                self._failing = False
            return not self._failing

    def close(self) -> None:
        """Save unsaved changes and give the file up; a second call does nothing."""
        self._finalizer()
        # The thread may be saving for an owner that is gone.
        self._thread.join()
        self._give_up()

    def _give_up(self) -> None:
        if _savers.get(self._file) is self:
            give_up(self._file)
            del _savers[self._file]

    def _finish(self) -> None:
        self._closing.set()
        self._thread.join()
        write = None if self._before_close is None else self._before_close()
        if write is not None:
            # If a device failed, saving fails too, and says so.
            with contextlib.suppress(RuntimeError):
                write()
        if self._changed:
            self.save()

    def _run(self) -> None:
        # Some engines kill their processes at shutdown, so tables are also saved when idle.
        saved = time.monotonic()
        while not self._closing.wait(min(self._every, _IDLE_SECONDS)):
            idle, self._touched = not self._touched, False
            # A save that failed is not tried again at once.
            early = (idle or self._emptied) and not self._failing
            if self._changed and (early or time.monotonic() - saved >= self._every):
                self.save()
                saved = time.monotonic()
        if self._is_orphan:
            if self._changed:
                self.save()
            self._finalizer.cancel()
            self._give_up()
