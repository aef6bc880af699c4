"""An engine in a separate process, as the bench controls it.

The process is started with `python -m`, so that environment variables are set before any library is
loaded. It communicates through a pipe, and its output goes to a log file that is shown on failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TextIO, cast

from drafttree.bench.errors import EngineError, InputError
from drafttree.bench.protocol import (
    EngineInfo,
    EngineSpec,
    ForwardShape,
    Generation,
    Request,
    Traced,
)

_MODULES = {
    "vllm": "drafttree.bench.vllm_engine",
    "sglang": "drafttree.bench.sglang_engine",
}
ENGINES = tuple(_MODULES)
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_LOG_TAIL_LINES = 40


def check_name(engine: str) -> None:
    """Check the name of an engine.

    Raises:
        InputError: It is not one of `ENGINES`.
    """
    if engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}; known here: {', '.join(ENGINES)}")


class EngineProcess:
    """One engine, plain or with a method, in a child process."""

    def __init__(self, engine: str, label: str, spec: EngineSpec, *, verbose: bool = False) -> None:
        self.label = label
        self._verbose = verbose
        self._info: EngineInfo | None = None
        environment = {**os.environ, **_ENVIRONMENT}
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        environment.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "ERROR")
        if engine == "sglang":
            environment |= sglang_environment()
        if spec.runner is not None:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1" if spec.runner == "v2" else "0"
        self._log: TextIO = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._pipe, child = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULES[engine], str(child.fileno())],
            env=environment,
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if verbose else self._log,
            stderr=None if verbose else subprocess.STDOUT,
        )
        child.close()
        self._pipe.send(spec)

    def wait_until_ready(self) -> EngineInfo:
        """Block until the engine has started; return at once if it has already."""
        if self._info is None:
            self._info = cast(EngineInfo, self._receive())
        return self._info

    def generate(self, requests: list[Request]) -> list[Generation]:
        """Answer the requests as one batch."""
        return cast(list[Generation], self._call("generate", requests))

    def top_logprobs(self, token_ids: list[int]) -> dict[int, float]:
        """The two most likely next tokens and their log-probabilities."""
        return cast(dict[int, float], self._call("top_logprobs", token_ids))

    def logprobs(self, token_ids: list[int], tokens: list[int]) -> dict[int, float]:
        """The log-probabilities of `tokens` after `token_ids`."""
        return cast(dict[int, float], self._call("logprobs", (token_ids, tokens)))

    def forward_seconds(self, shape: ForwardShape) -> list[float]:
        """Latencies of target forwards of one shape, in seconds; no request may be running.

        Empty if the engine cannot time forwards of the model.
        """
        return cast(list[float], self._call("forward_seconds", shape))

    def priming(self) -> Iterator[tuple[int, int]]:
        """Let the drafter compute beforehand what it can; yields how much it has, and of how much.

        No request may be running.
        """
        while True:
            done, everything = cast(tuple[int, int], self._call("prime", None))
            yield done, everything
            if done == everything:
                return

    def reset(self, tables: bool) -> None:
        """Drop cached prefixes; with `tables` also what the method learned and its counters."""
        self._call("reset", tables)

    def counters(self) -> dict[str, int]:
        """The method's own counters since the last reset."""
        return cast(dict[str, int], self._call("counters", None))

    def explain(self) -> list[dict[str, Any]]:
        """How the method chose its tree sizes; empty if they are fixed."""
        return cast(list[dict[str, Any]], self._call("explain", None))

    def choices(self) -> list[dict[str, Any]]:
        """Why the last sizes were chosen, where the engine's scheduler chooses them."""
        return cast(list[dict[str, Any]], self._call("choices", None))

    def acceptance(self) -> dict[str, Any]:
        """Acceptance statistics by node or by candidate source; see `Drafter.acceptance`."""
        return cast(dict[str, Any], self._call("acceptance", None))

    def trace(self, request: Request) -> Traced:
        """Answer a request alone, and record its decode steps."""
        return cast(Traced, self._call("trace", request))

    def draft_seconds(self) -> float:
        """Seconds that a method with a model has spent drafting."""
        return cast(float, self._call("draft_seconds", None))

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, name: str, argument: Any) -> Any:
        try:
            self._pipe.send((name, argument))
        except OSError as error:
            raise self._failure("ended unexpectedly") from error
        return self._receive()

    def _receive(self) -> Any:
        pipe: Connection = self._pipe
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError) as error:
            raise self._failure("ended unexpectedly") from error
        if kind == "error":
            raise self._failure(f"failed: {value}")
        return value

    def _failure(self, what: str) -> EngineError:
        message = f"the {self.label} engine {what}"
        if self._verbose:
            return EngineError(message)
        self._log.flush()
        self._log.seek(0)
        tail = self._log.read().splitlines()[-_LOG_TAIL_LINES:]
        if tail:
            message += "\nlast lines of its output:\n" + "\n".join(tail)
        return EngineError(message)


def sglang_environment() -> dict[str, str]:
    """Environment variables that SGLang needs on a machine without a GPU."""
    import torch

    if torch.cuda.is_available():
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        # By default the engine binds its threads to cores that may not be allowed to this process.
        "SGLANG_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
