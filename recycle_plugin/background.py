"""Primes while an engine serves: one process of the lowest priority, whose rows the engine takes
over as they are made."""

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

from recycle_plugin.files import TablesError
from recycle_plugin.primed_files import (
    file_of,
    load_primed,
    partial_file,
    primed_identity,
    rows_made,
)

_LOOK_EVERY = 2.0
_TELL_EVERY = 60.0

# They colour what is read here, bind threads to cores, or put a process into a group of ranks.
_NOT_INHERITED = (
    "FORCE_COLOR",
    *("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
)


class Rows(NamedTuple):
    """New rows of the primed matrix: of the tokens from `first` on, `int32 [n, k]` on the CPU."""

    first: int
    candidates: torch.Tensor


class Priming:
    """The primed matrix of a served model, as it comes to be.

    When rows come differs from one process to the next: ranks that must draft alike let one of
    them begin, and share what it polls at one step.
    """

    @classmethod
    def begin(
        cls,
        folder: str | Path,
        k: int,
        vocab_size: int,
        logger: logging.Logger | None = None,
        look_every: float = _LOOK_EVERY,
    ) -> Self | None:
        """Take the finished matrix if it is there, else begin to make it in the background.

        Where that is not possible, one warning says why and None is returned: serving goes on
        unprimed. The same holds for what goes wrong later on.

        Args:
            vocab_size: the width of the engine's logits.
            look_every: seconds between looks at what the process has made.
        """
        logger = logger or logging.getLogger(__name__)
        folder = Path(folder)
        if not folder.is_dir():
            logger.warning(
                "Token Recycling is not primed: %s is no local folder. Name the folder that the "
                "model's weights are in",
                folder,
            )
            return None
        try:
            return cls(folder.absolute(), k, vocab_size, logger, look_every)
        except ValueError as error:
            logger.warning("Token Recycling is not primed: %s", error)
            return None

    def __init__(
        self, folder: Path, k: int, vocab_size: int, logger: logging.Logger, look_every: float
    ) -> None:
        """As `begin`, which answers for the error.

        Raises:
            ValueError: the folder holds no model's weights.
        """
        self._folder = folder
        self._identity = primed_identity(folder, k)
        self._file = file_of(self._identity)
        self._vocab_size = vocab_size
        self._logger = logger
        self._look_every = look_every
        self._new: deque[Rows] = deque()
        self._taken = 0
        self._seen: dict[Path, int] = {}
        self._refused = ""
        self._told = time.monotonic()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._take(self._file)
        if self.finished:
            logger.info("Token Recycling is primed from %s", self._file)
            return
        self._thread = threading.Thread(target=self._run, name="priming", daemon=True)
        # Unlike atexit, this also runs in processes that multiprocessing forked.
        self._finalizer = Finalize(None, self._stop, exitpriority=10)
        self._thread.start()

    @property
    def finished(self) -> bool:
        """Whether all rows are made; `poll` may still hold some."""
        return self._taken == self._vocab_size

    def poll(self) -> Rows | None:
        """New rows, if there are any; cheap enough for every step."""
        return self._new.popleft() if self._new else None

    @property
    def running(self) -> bool:
        """Whether more rows may come than `poll` holds now."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """End the background process, if there is one. What it has made is not lost."""
        if self._thread is not None:
            self._finalizer()

    def _stop(self) -> None:
        assert self._thread is not None
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                self._file = self._file_to_write(stack)
                errors = stack.enter_context(tempfile.TemporaryFile())
                child = self._start(errors)
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
        """The file, or one in a temporary folder where the cache cannot be written."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._file.parent):
                return self._file
        except OSError as error:
            self._logger.warning(
                "the cache cannot be written (%s), so that Token Recycling is primed for this run "
                "only: set DRAFTTREE_CACHE to a folder that can",
                error,
            )
        return Path(stack.enter_context(_temporary_folder())) / self._file.name

    def _start(self, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "recycle_plugin.priming", str(self._folder)]
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
        _yield_to_others(child.pid)
        self._logger.info(
            "Token Recycling is being primed in the background by process %d; "
            "`drafttree prepare` does so beforehand",
            child.pid,
        )
        return child

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        """Take over what the child makes until it is finished or ends, or nobody wants it."""
        while not self._closing.is_set():
            ended = child.poll() is not None
            self._take(partial_file(self._file))
            self._take(self._file)
            if self.finished:
                self._logger.info("Token Recycling is primed")
            if self.finished or ended:
                return
            self._tell()
            self._closing.wait(self._look_every)

    def _take(self, file: Path) -> None:
        """Take over what is new in a file."""
        try:
            when = file.stat().st_mtime_ns
            if self._seen.get(file) == when:
                return
            self._seen[file] = when
            matrix = load_primed(file, self._identity, self._vocab_size)
        except OSError:
            return  # not made yet, or it gave way to the finished file
        except TablesError as error:
            self._refused = str(error)  # the child makes it anew
            return
        made = rows_made(matrix)
        if made > self._taken:
            self._new.append(Rows(self._taken, matrix[self._taken : made]))
            self._taken = made

    def _tell(self) -> None:
        if time.monotonic() - self._told > _TELL_EVERY:
            self._told = time.monotonic()
            self._logger.info(
                "Token Recycling is primed for %d of %d tokens", self._taken, self._vocab_size
            )

    def _reason(self, child: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
        """Why a child that ended has not finished."""
        if child.returncode == 0:
            return self._refused
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
        if child.returncode < 0 or not said:
            return f"its process ended with status {child.returncode}"
        return said[-1].removeprefix("error: ")


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="drafttree-", ignore_cleanup_errors=True)


def _yield_to_others(process: int) -> None:
    """Let a process run when nobody else would, and be the first to go when memory runs out."""
    try:
        os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process, 19)
    # Engines bind the thread that starts processes to one core.
    with contextlib.suppress(AttributeError, OSError):
        threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
        cores = set().union(*(os.sched_getaffinity(thread) for thread in threads))
        os.sched_setaffinity(process, cores)
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/oom_score_adj").write_text("1000")
