"""Calls in separate processes, forked from the engine's template."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import v2_on_cpu

from engine_host import template
from engine_host.template import Job

NEW_PYTHON = "PYTHONPATH"
"""A run that sets this variable starts a new Python."""

READ_AT_IMPORT = ("TRITON_INTERPRET", v2_on_cpu.VARIABLE)
"""Variables that are read when the engine is imported: there is a template for each setting."""

MUST_END_WELL = ("vllm",)
"""Engines whose process must end with status 0. SGLang's ends the processes that it started, and
with them now and then its own, after the result is written."""


class RunFailed(Exception):
    """The engine's process failed; the message contains the end of its output.

    Attributes:
        output: All of its output.
    """

    def __init__(self, reason: str, output: str) -> None:
        super().__init__(f"{reason}\n{output[-6000:]}")
        self.output = output


def run_job(
    engine: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    timeout: float,
) -> tuple[Any, str]:
    """Call a module's function in a separate process.

    Args:
        engine: "vllm" or "sglang", which the process has imported.
        function: The function to call, from a module in `tests/support`.
        arguments: Positional arguments, which must be picklable.
        environment: Environment variables to add to those of this process.
        timeout: Seconds after which the process and its children are killed.

    Returns:
        The function's return value, and the process's output.

    Raises:
        RunFailed: The process failed, or ran too long, even if it had written its result.
    """
    whole = os.environ | {"TESTS_ENGINE_PROCESS": engine} | environment
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        log, result, job = place / "log", place / "result.pickle", place / "job.pickle"
        log.touch()
        job.write_bytes(
            pickle.dumps(
                Job(
                    function.__module__,
                    function.__name__,
                    arguments,
                    whole,
                    str(log),
                    str(result),
                )
            )
        )
        if _forks(environment):
            status = _Template.of(engine, environment).run(job, timeout)
        else:
            status = _run_once(job, whole, log, timeout)
        output = log.read_text(errors="replace")
        if status is None:
            raise RunFailed(f"killed after {timeout} seconds", output)
        if not result.exists() or (status != 0 and engine in MUST_END_WELL):
            raise RunFailed(f"exit status {status}", output)
        return pickle.loads(result.read_bytes()), output


def _forks(environment: dict[str, str]) -> bool:
    import torch

    # A process that has used CUDA must not be forked, and the template may have used it.
    return not torch.cuda.is_available() and NEW_PYTHON not in environment


def _run_once(job: Path, environment: dict[str, str], log: Path, timeout: float) -> int | None:
    """The exit status; None if the process was killed after the timeout."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, template.__file__, "--once", str(job)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill_group(process.pid)
            process.wait()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


class _Template:
    """An engine's template process, started for its first job and ended with this process."""

    _running: dict[tuple[str | None, ...], _Template] = {}  # noqa: RUF012

    @classmethod
    def of(cls, engine: str, environment: dict[str, str]) -> _Template:
        """The template for an engine and the variables that are read when it is imported."""
        variables = {name: environment[name] for name in READ_AT_IMPORT if name in environment}
        key = engine, *map(variables.get, READ_AT_IMPORT)
        if key not in cls._running or cls._running[key]._process.poll() is not None:
            cls._running[key] = cls(engine, variables)
        return cls._running[key]

    def __init__(self, engine: str, variables: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", template.__file__, engine],
            env=os.environ | _environment(engine) | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
        )
        atexit.register(self.close)
        self._receive(300)

    def run(self, job: Path, timeout: float) -> int | None:
        """The exit status; None if the process was killed after the timeout."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{job}\n".encode())
        child = self._receive(60)
        try:
            return self._receive(timeout)
        except TimeoutError:
            _kill_group(child)
            self._receive(60)
            return None
        finally:
            _kill_group(child)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _receive(self, timeout: float) -> int:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        ready, _, _ = select.select([self._process.stdout], [], [], deadline - time.monotonic())
        if not ready:
            raise TimeoutError
        content = self._process.stdout.read(8)
        if len(content) < 8:
            self._log.seek(0)
            raise RunFailed("the template ended", self._log.read())
        number: int = struct.unpack("q", content)[0]
        return number


def _environment(engine: str) -> dict[str, str]:
    """Environment variables that must be set when the engine is imported.

    PyTorch is limited to one thread. Otherwise it may start more on import, and a forked process
    would not have them.
    """
    common = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    if engine == "vllm":
        return common | {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return common | {"SGLANG_USE_CPU_ENGINE": "1"}
