"""Run an engine's own tests of speculative decoding with Token Recycling.

    python -m scripts.hosts.own_tests vllm|sglang [ARGUMENTS OF PYTEST]

SGLang's come with its wheel (`sglang.test.kits`). vLLM's are in its source only: `HOST_SOURCE`
names the folder of a source release or a checkout; without it, the release of the installed version
is downloaded. What a run needs beside the environment is kept in drafttree's cache folder.

`HOSTS_PLAIN=1` runs the same tests without a method, to see which fail by the model alone.
`GSM8K` names a folder with GSM8K's `train.jsonl` and `test.jsonl`, which some of vLLM's tests read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Annotated
from urllib.request import Request, urlopen

import typer
from tree_kernels.cache import cache_root

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "tests" / "hosts"
QUESTIONS = 8
"""Questions of GSM8K that vLLM's tests find; they take as many as there are."""

PACKAGES = {"vllm": ("tblib",), "sglang": ("tabulate",)}
"""Packages that the engines' tests import and the environments lack."""

ASYNC = "tests/v1/e2e/general/test_async_scheduling.py"
NGRAM_SUFFIX = "tests/v1/e2e/spec_decode/ngram_suffix/test_ngram_suffix.py"
VLLM_TESTS = (
    "tests/v1/e2e/test_cpu_spec_decode.py::test_ngram_spec_decode_matches_baseline",
    "tests/v1/spec_decode/test_max_len.py::test_ngram_max_len",
    "tests/v1/engine/test_llm_engine.py::test_engine_metrics",
    "tests/v1/sample/test_logprobs.py::test_spec_decode_logprobs",
    f"{ASYNC}::test_with_ngram_gpu_spec_decoding",
)
WITH_GSM8K = (f"{NGRAM_SUFFIX}::test_suffix_decoding_acceptance",)


def main(
    engine: Annotated[str, typer.Argument(help="vllm or sglang")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of pytest.")] = None,
) -> None:
    """Run the tests of one engine, and exit as pytest does."""
    cache = cache_root() / "host-tests"
    folder, command, variables = {"vllm": _vllm, "sglang": _sglang}[engine](cache)
    path = [ROOT, ROOT / "kernels", OURS, ROOT / "tests" / "support", _packages(engine, cache)]
    path += [OURS / "stubs"] if engine == "sglang" else []
    variables |= {
        "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")]),
        # The engines' tests call their commands by name.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *command]
    done = subprocess.run(
        [*pytest, *(arguments or ())], cwd=folder, env=os.environ | variables, check=False
    )
    raise typer.Exit(done.returncode)


def _sglang(cache: Path) -> tuple[Path, list[str], dict[str, str]]:
    sys.path.append(str(ROOT / "tests" / "support"))
    from sglang_runs import environment

    return ROOT, [str(OURS / "sglang_kits.py")], environment()


def _vllm(cache: Path) -> tuple[Path, list[str], dict[str, str]]:
    folder = _vllm_source(cache)
    tests, variables = list(VLLM_TESTS), {"VLLM_CPU_KVCACHE_SPACE": "1", "ENFORCE_EAGER": "1"}
    if given := os.environ.get("GSM8K"):
        tests += WITH_GSM8K
        # The tests look into the folder for temporary files before they download.
        variables["TMPDIR"] = str(_few_questions(Path(given).absolute(), cache / "tmp"))
    return folder, ["-p", "vllm_plugin", *tests], variables


def _packages(engine: str, cache: Path) -> Path:
    """A folder with the packages that the tests need; it holds nothing else."""
    folder = cache / f"packages-{engine}"
    for package in PACKAGES[engine]:
        if not (folder / package).exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*command, "--target", str(folder), package], check=True)
    return folder


def _vllm_source(cache: Path) -> Path:
    """A folder with vLLM's tests and their settings, and without vLLM itself."""
    release = re.match(r"[\d.]+", version("vllm-cpu"))
    assert release is not None
    folder = cache / f"vllm-{release[0].rstrip('.')}"
    given = os.environ.get("HOST_SOURCE")
    if given:
        folder = cache / "vllm-given"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(given) / "tests", folder / "tests")
        shutil.copy(Path(given) / "pyproject.toml", folder)
    elif not folder.exists():
        _unpack(_download("vllm", release[0].rstrip(".")), folder)
    return folder


def _download(package: str, release: str) -> bytes:
    """A source release, from the package index that pip uses.

    `pip download` cannot get it: pip runs a source release to read its metadata, and vLLM's fails
    without a compiler for GPUs.
    """
    configured = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    index = (
        os.environ.get("PIP_INDEX_URL")
        or subprocess.run(configured, capture_output=True, text=True, check=False).stdout.strip()
    )
    address = f"{(index or 'https://pypi.org/simple').rstrip('/')}/{package}/"
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    name = f"{package}-{release}.tar.gz"
    with urlopen(Request(address, headers=accept)) as answer:
        (found,) = [each for each in json.load(answer)["files"] if each["filename"] == name]
    with urlopen(found["url"]) as answer:
        data: bytes = answer.read()
    if hashlib.sha256(data).hexdigest() != found["hashes"]["sha256"]:
        raise RuntimeError(f"{name} is not the file that the index names")
    return data


def _unpack(release: bytes, folder: Path) -> None:
    """Unpack the tests of a source release and the settings of pytest."""
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with tarfile.open(fileobj=BytesIO(release)) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if name == "pyproject.toml" or name.startswith("tests/"):
                member.name = name
                archive.extract(member, unfinished, filter="data")
    unfinished.rename(folder)


def _few_questions(given: Path, folder: Path) -> Path:
    """A folder with the examples and the first questions of GSM8K."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(given / "train.jsonl", folder)
    with (given / "test.jsonl").open() as questions:
        (folder / "test.jsonl").write_text("".join(islice(questions, QUESTIONS)))
    return folder


if __name__ == "__main__":
    typer.run(main)
