"""The checks of `drafttree doctor`."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tree_kernels.machine import find_compiler, processor_name

from drafttree import __version__
from drafttree.cli import environment
from drafttree.cli.engine_checks import engines
from drafttree.cli.finding import Finding
from drafttree.compatibility import ENGINES, refused
from drafttree.method import GROUP, Method

PLUGIN_GROUPS = {"vLLM": "vllm.general_plugins", "SGLang": "sglang.srt.plugins"}
PLUGIN_CHOICES = {"vLLM": "VLLM_PLUGINS", "SGLang": "SGLANG_PLUGINS"}
PLUGIN = "drafttree"


def diagnose() -> list[Finding]:
    """Run all checks, section by section."""
    parts: list[Callable[[], Iterator[Finding]]] = [machine, libraries, engines, methods, traps]
    return [finding for part in parts for finding in part()]


def machine() -> Iterator[Finding]:
    """Python, the platform, the processor and the C++ compiler."""
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
    yield Finding(section="machine", name="cores", value=str(environment.cores()))
    yield Finding(section="machine", name="memory", value=environment.memory())
    yield _judge_compiler()


def libraries() -> Iterator[Finding]:
    """drafttree, torch with its devices, and Triton."""
    yield Finding(section="libraries", name="drafttree", value=__version__)
    torch = environment.try_import("torch")
    if torch.version is None:
        yield Finding(
            section="libraries",
            name="torch",
            value=torch.error or "not installed",
            status="problem",
            advice="reinstall torch, which everything else needs",
        )
    else:
        yield Finding(
            section="libraries", name="torch", value=f"{torch.version}, {environment.devices()}"
        )
    triton = environment.try_import("triton")
    yield Finding(
        section="libraries",
        name="triton",
        value=triton.version or triton.error or "not installed",
        status="note" if triton.error else "ok",
        advice="the plain PyTorch kernels are used instead" if triton.version is None else "",
    )


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
    for package, error in environment.broken_companions().items():
        yield Finding(
            section="traps",
            name=package,
            value=f"broken: {error}",
            status="problem",
            advice=f"it was built for another torch and breaks vLLM: pip uninstall {package}",
        )
    if not environment.has_cuda() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        yield Finding(
            section="traps",
            name="VLLM_CPU_KVCACHE_SPACE",
            value="not set",
            status="note",
            advice="on a CPU vLLM takes nearly all memory without it: set it to GiB, such as 1",
        )


def _judge_compiler() -> Finding:
    finding = Finding(section="machine", name="C++ compiler", value="not found", status="note")
    compiler = find_compiler()
    try:
        if compiler is not None:
            version = subprocess.run(
                [*compiler, "--version"], capture_output=True, text=True, timeout=10, check=True
            )
            finding.value, finding.status = version.stdout.partition("\n")[0], "ok"
            return finding
    except (OSError, subprocess.SubprocessError) as error:
        finding.value = f"broken: {error}"
    finding.advice = (
        "vLLM's compiled mode needs one, and so do CPU kernels that the wheel does not contain: "
        "install g++, and set CXX if it has another name"
    )
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
