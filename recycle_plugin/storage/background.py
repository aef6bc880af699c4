"""Priming while an engine serves: a lowest-priority process computes rows, and the engine copies
them as they appear."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO, NamedTuple, Self

import torch

from recycle_plugin.storage.primed_files import (
    cached_file,
    load_primed,
    num_primed_rows,
    partial_file,
    primed_identity,
)
from recycle_plugin.storage.table_files import TablesError

_POLL_SECONDS = 2.0
_LOG_SECONDS = 60.0

# Variables that would colour the process's output, bind its threads to cores or make it a rank of a
# process group.
_NOT_INHERITED = (
    "FORCE_COLOR",
    *("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
)


class Rows(NamedTuple):
    """New rows of the primed matrix.

    Attributes:
        first: Token id of the first row.
        candidates: Candidates of tokens `first` to `first + n - 1`, `int32 [n, k]` on the CPU.
    """

    first: int
    candidates: torch.Tensor


class BackgroundPriming:
    """The primed matrix of a served model, row by row as it is computed.

    The step at which rows arrive differs between processes. Ranks that must draft identically
    therefore let one of them prime and broadcast what it polls.
    """

    @classmethod
    def start(
        cls,
        folder: str | Path,
        k: int,
        vocab_size: int,
        logger: logging.Logger | None = None,
        poll_seconds: float = _POLL_SECONDS,
    ) -> Self | None:
        """Load the finished matrix if there is one, else compute it in the background.

        Computation starts at the first `poll`. If the model cannot be primed, one warning with the
        reason is logged, None is returned and serving continues unprimed. A later failure also logs
        one warning.

        Args:
            folder: Folder of the model.
            k: Candidates per token.
            vocab_size: Width of the engine's logits.
            logger: Logger for progress and warnings.
            poll_seconds: Seconds between reads of the process's partial file.
        """
        logger = logger or logging.getLogger(__name__)
        folder = Path(folder)
        if not folder.is_dir():
            logger.warning(
                "Token Recycling is not primed: %s is not a local folder. Give the folder that "
                "holds the model's weights",
                folder,
            )
            return None
        try:
            return cls(folder.absolute(), k, vocab_size, logger, poll_seconds)
        except ValueError as error:
            logger.warning("Token Recycling is not primed: %s", error)
            return None

    def __init__(
        self, folder: Path, k: int, vocab_size: int, logger: logging.Logger, poll_seconds: float
    ) -> None:
        """See `start`, which turns the error into a warning.

        Raises:
            ValueError: The folder contains no model weights.
        """
        self._folder = folder
        self._identity = primed_identity(folder, k)
        self._file = cached_file(self._identity)
        self._vocab_size = vocab_size
        self._logger = logger
        self._poll_seconds = poll_seconds
        self._new: deque[Rows] = deque()
        self._taken = 0
        self._seen: dict[Path, int] = {}
        self._refused = ""
        self._logged = time.monotonic()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._take(self._file)
        if self.finished:
            logger.info("Token Recycling is primed from %s", self._file)
            return
        self._thread = threading.Thread(target=self._run, name="priming", daemon=True)
        # Unlike atexit, this also runs in processes that multiprocessing forked.
        self._finalizer = Finalize(None, self._stop, exitpriority=10)

    @property
    def finished(self) -> bool:
        """Whether all rows are computed; `poll` may not have returned all of them yet."""
        return self._taken == self._vocab_size

    def poll(self) -> Rows | None:
        """Return new rows, if there are any; cheap enough to call in every step.

        The first call starts the process: by then a starting engine has allocated its memory.
        """
        if self._thread is not None and self._thread.ident is None:
            self._thread.start()
        return self._new.popleft() if self._new else None

    @property
    def running(self) -> bool:
        """Whether rows may still arrive after those that `poll` can return now."""
        return self._thread is not None and (self._thread.ident is None or self._thread.is_alive())

    def close(self) -> None:
        """Stop the background process, if there is one; the rows that it saved are kept."""
        if self._thread is not None:
            self._finalizer()

    def _stop(self) -> None:
        assert self._thread is not None
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                self._file = self._file_to_write(stack)
                errors = stack.enter_context(tempfile.TemporaryFile())
                child = self._spawn(errors)
                stack.callback(child.wait)
                stack.callback(child.kill)
                self._watch(child)
                if not self.finished and not self._closing.is_set():
                    self._warn(self._reason(child, errors))
        except OSError as error:
            self._warn(error)

    def _warn(self, reason: object) -> None:
        self._logger.warning("Token Recycling is not primed: %s", reason)

    def _file_to_write(self, stack: contextlib.ExitStack) -> Path:
        """The cache file, or one in a temporary folder if the cache cannot be written."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._file.parent):
                return self._file
        except OSError as error:
            self._logger.warning(
                "the cache cannot be written (%s), so Token Recycling is primed for this run only: "
                "set DRAFTTREE_CACHE to a writable folder",
                error,
            )
        return Path(stack.enter_context(_temporary_folder())) / self._file.name

    def _spawn(self, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "recycle_plugin.storage.priming", str(self._folder)]
        command += [str(self._file), "--k", self._identity["k"]]
        command += ["--vocab-size", str(self._vocab_size), "--parent", str(os.getpid())]
        environment = {n: value for n, value in os.environ.items() if n not in _NOT_INHERITED}
        environment |= {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        null = subprocess.DEVNULL
        child = subprocess.Popen(command, env=environment, stdin=null, stdout=null, stderr=errors)
        _lower_priority(child.pid)
        self._logger.info(
            "Token Recycling is being primed in the background by process %d; "
            "run `drafttree prepare` to do this beforehand",
            child.pid,
        )
        return child

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        """Read the child's rows until all are computed, it exits or this object is closed."""
        while not self._closing.is_set():
            ended = child.poll() is not None
            self._take(partial_file(self._file))
            self._take(self._file)
            if self.finished:
                self._logger.info("Token Recycling is primed")
            if self.finished or ended:
                return
            self._log_progress()
            self._closing.wait(self._poll_seconds)

    def _take(self, file: Path) -> None:
        """Queue the rows of a file that were not queued before."""
        try:
            modified = file.stat().st_mtime_ns
            if self._seen.get(file) == modified:
                return
            self._seen[file] = modified
            matrix = load_primed(file, self._identity, self._vocab_size)
        except OSError:
            return  # not written yet, or replaced by the finished file
        except TablesError as error:
            self._refused = str(error)  # the child computes it again
            return
        made = num_primed_rows(matrix)
        if made > self._taken:
            self._new.append(Rows(self._taken, matrix[self._taken : made]))
            self._taken = made

    def _log_progress(self) -> None:
        if time.monotonic() - self._logged > _LOG_SECONDS:
            self._logged = time.monotonic()
            self._logger.info(
                "Token Recycling is primed for %d of %d tokens", self._taken, self._vocab_size
            )

    def _reason(self, child: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
        """The reason why the child exited before all rows were computed."""
        if child.returncode == 0:
            return self._refused
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        if child.returncode < 0 or not lines:
            return f"its process ended with status {child.returncode}"
        return lines[-1].removeprefix("error: ")


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="drafttree-", ignore_cleanup_errors=True)


def _lower_priority(process: int) -> None:
    """Run a process only when cores are idle, and let it be killed first if memory runs out."""
    try:
        os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process, 19)
    # Engines may have bound this thread to one core: allow the child all cores of this process.
    with contextlib.suppress(AttributeError, OSError):
        threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
        cores = set().union(*(os.sched_getaffinity(thread) for thread in threads))
        os.sched_setaffinity(process, cores)
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/oom_score_adj").write_text("1000")
