"""The newest supported version of vLLM, whose Python files lie over the installed build for CPUs.

There may be no build of it for CPUs yet. So the compiled libraries are those of the installed
version; `TESTS_NEWER_VLLM` names a wheel, or the folder of an unpacked package, if there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import v2_on_cpu
from lyanna_parts import drafter_for
from random_prompts import some_prompts
from vllm_runs import Answer, Case, run_vllm

from drafttree.vllm.versions import LAST, is_supported
from lyanna_plugin.checkpoint import save
from scripts.hosts.overlay import installed, make_overlay

pytestmark = [pytest.mark.full]

NEWEST = ".".join(map(str, LAST))
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 0.8, "top_p": 0.9, "seed": 7}
CASES = [Case(some_prompts(4), settings, reset=True, rounds=2) for settings in (GREEDY, SAMPLED)]
VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
RUNNERS = {
    "V1": dict[str, str](),
    "V2": {name: value for name, value in v2_on_cpu.ENVIRONMENT.items() if name != VARIABLE},
}
"""What makes the engine choose each of its model runners by itself."""


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which a new Python imports the newest version."""
    folder = tmp_path_factory.mktemp("newest")
    source = Path(os.environ.get("TESTS_NEWER_VLLM") or _download(folder / "wheel"))
    version = make_overlay(source, folder / "overlay", installed())
    assert is_supported(version)
    assert version.startswith(f"{NEWEST}.")
    paths = [str(folder / "overlay"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", f"vllm=={NEWEST}.*"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        pytest.skip(f"vLLM {NEWEST} cannot be downloaded: {done.stderr[-300:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.parametrize("runner", RUNNERS)
def test_tokens_equal_plain_decoding(
    tiny_llama: Path,
    newest: dict[str, str],
    proves_drafting: Callable[[Answer], None],
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    environment = RUNNERS[runner] | newest
    method = {"method": "token_recycling", "nodes": 15, "memory": 0}
    plain, _ = run_vllm(tiny_llama, CASES, environment=environment, **v2_on_cpu.LIMITS)
    drafted, log = run_vllm(
        tiny_llama, CASES, speculative=method, environment=environment, **v2_on_cpu.LIMITS
    )
    assert f"LLM engine (v{NEWEST}." in log
    assert ("Using V2 Model Runner" in log) is (runner == "V2")
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
    proves_drafting(drafted[0])


@pytest.mark.parametrize("method", ["rsd", "lyanna"])
def test_methods_with_a_model(
    tiny_llama: Path, newest: dict[str, str], tmp_path: Path, method: str
) -> None:
    model = tiny_llama
    if method == "lyanna":
        model = tmp_path / "drafter"
        save(drafter_for(tiny_llama), model)
    cases, limits = CASES[:1], v2_on_cpu.LIMITS
    environment = newest | {VARIABLE: "0"}
    (plain,), _ = run_vllm(tiny_llama, cases, environment=environment, **limits)
    (drafted,), _ = run_vllm(
        tiny_llama,
        cases,
        speculative={"method": method, "model": str(model)},
        environment=environment,
        **limits,
    )
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 0
