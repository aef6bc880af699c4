"""The process that imports an engine once and forks for each run.

    python template.py ENGINE           serves jobs from stdin until it ends
    python template.py --once JOB       runs one job in this process, which imports the engine

A job is a pickled `Job`. It runs in a separate process with its own environment, as if Python had
been started for it, but with the engine's modules already imported. The template itself runs no
torch operator and starts no thread, so its forks are in a clean state.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import struct
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parents[1]

PRELOADED = {
    "vllm": (
        "vllm",
        "vllm.entrypoints.llm",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.model_executor.models.llama",
        "drafttree.vllm.plugin",
        "drafttree.vllm.cpu_worker",
        "transformers.models.llama.modeling_llama",
    ),
    "sglang": (
        "sglang",
        "sglang.srt.entrypoints.engine",
        "sglang.srt.managers.scheduler",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.tokenizer_manager",
        "sglang.srt.models.registry",
        "drafttree.sglang.plugin",
        "transformers.models.llama.modeling_llama",
    ),
}
"""Modules that every run imports. Importing them registers no method and patches nothing."""

OF_V2 = ("vllm.v1.worker.cpu.model_runner", "drafttree.vllm.v2.cpu_worker")
"""Further modules that every run of vLLM's V2 model runner imports."""


@dataclass
class Job:
    """A call in a separate process.

    Attributes:
        module: Module of the function, importable from `tests/support`.
        function: Name of the function.
        arguments: Positional arguments, which must be picklable.
        environment: The whole environment of the process.
        log: File for standard output and standard error.
        result: File for the pickled return value; absent if the job failed.
    """

    module: str
    function: str
    arguments: tuple[Any, ...]
    environment: dict[str, str]
    log: str
    result: str


def run(job: Job) -> None:
    """Run a job in this process."""
    import hooks

    hooks.install()
    function = getattr(importlib.import_module(job.module), job.function)
    made = function(*job.arguments)
    partial = Path(job.result + ".part")
    partial.write_bytes(pickle.dumps(made))
    partial.rename(job.result)


def enter(environment: dict[str, str], log: str) -> None:
    """Give this process its environment and its output."""
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)


def _fork(job: Job) -> int:
    from engine_host import spares

    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        enter(job.environment, job.log)
        spares.install(job.log)
        run(job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            _end_process()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_process() -> None:
    """Do what the interpreter does at exit, before modules are torn down."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def serve(engine: str) -> None:
    """Fork for each job that is named on stdin; reply with the child's id, then its exit status."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    import v2_on_cpu

    modules = PRELOADED[engine]
    if os.environ.get(v2_on_cpu.VARIABLE):
        v2_on_cpu.enable()
        modules += OF_V2
    for name in modules:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError(f"importing {engine} has started threads, which a fork would lack")
    gc.collect()
    gc.freeze()
    answers.write(struct.pack("q", 0))
    for line in sys.stdin:
        child = _fork(pickle.loads(Path(line.strip()).read_bytes()))
        answers.write(struct.pack("q", child))
        _, status = os.waitpid(child, 0)
        answers.write(struct.pack("q", os.waitstatus_to_exitcode(status)))


if __name__ in ("__main__", "__mp_main__") and str(SUPPORT) not in sys.path:
    sys.path.insert(0, str(SUPPORT))

if __name__ == "__mp_main__" and "TESTS_ENGINE_PROCESS" in os.environ:
    import hooks

    hooks.install()

if __name__ == "__main__":
    sys.modules["engine_host.template"] = sys.modules["__main__"]
    Job.__module__ = "engine_host.template"
    if sys.argv[1] == "--once":
        run(pickle.loads(Path(sys.argv[2]).read_bytes()))
    else:
        serve(sys.argv[1])
