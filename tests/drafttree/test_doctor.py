"""`drafttree doctor` reports what is installed, and what is broken instead of failing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from drafttree.cli import diagnosis, environment
from drafttree.cli.diagnosis import diagnose
from drafttree.cli.doctor import doctor
from drafttree.cli.finding import Finding
from drafttree.compatibility import ENGINES, features
from drafttree.method import installed_methods

MACHINE = Finding(section="machine", name="Python", value="3.12.1")


def fake_package(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)


def fake_sglang(folder: Path, version: str) -> None:
    fake_package(folder, "sglang", f"__version__ = '{version}'\n")
    for name in ("srt", "srt/managers"):
        fake_package(folder / "sglang", name, "")
    (folder / "sglang" / "srt" / "managers" / "scheduler.py").write_text("Scheduler = None\n")


def find(findings: Iterable[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_CPU_KVCACHE_SPACE"),
        "SGLANG_PLUGINS",
    ):
        monkeypatch.delenv(name, raising=False)


def test_the_command_prints_json() -> None:
    command = [str(Path(sys.executable).with_name("drafttree")), "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {})
    assert result.returncode == 0, result.stderr
    findings = [Finding.model_validate(item) for item in json.loads(result.stdout)]
    sections = {finding.section for finding in findings}
    assert {"machine", "libraries", "engines", "methods"} <= sections
    assert find(findings, "torch").status == "ok"


def test_the_table_shows_every_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = Finding(section="traps", name="a trap", value="seen", status="problem", advice="fix it")
    monkeypatch.setitem(doctor.__globals__, "diagnose", lambda: [MACHINE, trap])
    doctor()
    shown = capsys.readouterr().out
    for text in ("Python", "3.12.1", "a trap", "seen", "problem", "fix it"):
        assert text in shown


def test_broken_packages_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "triton", "torchvision", "torchaudio", "torchcodec"):
        fake_package(tmp_path, name, "raise RuntimeError('operator does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    findings = diagnose()
    for name in ("vLLM", "torchvision", "torchcodec"):
        finding = find(findings, name)
        assert finding.status == "problem"
        assert "broken: RuntimeError: operator does not exist" in finding.value
        assert finding.advice


@pytest.mark.parametrize(
    ("version", "status", "value"),
    [
        ("0.26.0", "note", "untested"),
        ("0.33.1", "note", "untested"),
        ("0.25.1", "problem", "unsupported"),
        ("0.34.0", "problem", "unsupported"),
        ("1.0.0", "problem", "unsupported"),
    ],
)
def test_the_version_of_vllm_is_checked(
    version: str, status: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_package(tmp_path, "vllm", f"__version__ = '{version}'\nLLM = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    vllm = find(list(diagnosis.engines()), "vLLM")
    assert vllm.status == status
    assert vllm.value.startswith(version)
    assert value in vllm.value


def test_the_tested_version_is_ok_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, "vllm", "__version__ = '0.32.0'\nLLM = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(environment, "has_cuda", lambda: False)
    assert find(list(diagnosis.engines()), "vLLM").status == "ok"


def test_the_tested_version_on_a_gpu_is_as_the_compatibility_table_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_package(tmp_path, "vllm", "__version__ = '0.32.0'\nLLM = None\n")
    fake_sglang(tmp_path, "0.5.23")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(environment, "has_cuda", lambda: True)
    findings = list(diagnosis.engines())
    vllm, sglang = (find(findings, name) for name in ("vLLM", "SGLang"))
    titles = {
        engine: {
            state: sorted(
                method.title
                for method in installed_methods().values()
                if features()["cuda"].cell(engine, method.kind.name).state == state
            )
            for state in ("tested", "untested")
        }
        for engine in ENGINES
    }
    assert titles["vllm"]["tested"]
    assert vllm.value == f"0.32.0, tested on a GPU with {', '.join(titles['vllm']['tested'])}"
    assert vllm.advice == f"served, untested on a GPU: {', '.join(titles['vllm']['untested'])}"
    assert sglang.value == "0.5.23, untested on a GPU"
    assert sglang.advice == f"served, untested on a GPU: {', '.join(titles['sglang']['untested'])}"
    assert vllm.status == sglang.status == "note"


@pytest.mark.parametrize(
    ("version", "triton", "asked", "status", "value"),
    [
        ("0.32.0", True, None, "ok", "V2, and V1 for what V2 does not serve"),
        ("0.33.0", True, "1", "ok", "V2"),
        ("0.32.0", True, "0", "ok", "V1: VLLM_USE_V2_MODEL_RUNNER=0"),
        ("0.32.0", False, None, "ok", "V1: V2 needs Triton"),
        ("0.32.0", False, "1", "problem", "V1: V2 needs Triton"),
        ("0.29.0", True, "1", "problem", "V1: for draft trees V2 needs vLLM 0.32 to 0.33"),
    ],
)
def test_the_model_runner_is_named(
    version: str,
    triton: bool,
    asked: str | None,
    status: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = f"__version__ = '{version}'\nfrom vllm import triton_utils as LLM\n"
    fake_package(tmp_path, "vllm", code)
    fake_package(tmp_path / "vllm", "triton_utils", f"HAS_TRITON = {triton}\n")
    monkeypatch.syspath_prepend(tmp_path)
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    runner = find(diagnosis.engines(), "vLLM's model runner")
    assert runner.status == status
    assert runner.value.startswith(value)
    assert bool(runner.advice) is (status == "problem")


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_a_plugin_that_an_engine_will_not_load_is_a_problem(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = list(diagnosis.methods())
    assert {finding.status for finding in findings} == {"ok"}
    assert {"lyanna", "rsd", "token_recycling"} <= {finding.name for finding in findings}
    choice = diagnosis.PLUGIN_CHOICES[engine]
    for chosen, status in (("another, drafttree", "ok"), ("another", "problem")):
        monkeypatch.setenv(choice, chosen)
        assert find(list(diagnosis.methods()), f"{engine} plugin").status == status
    (problem,) = [finding for finding in diagnosis.methods() if finding.status == "problem"]
    assert f"add drafttree to {choice}" in problem.advice
    monkeypatch.setattr(diagnosis, "PLUGIN", "absent")
    assert "reinstall" in find(list(diagnosis.methods()), f"{engine} plugin").advice


@pytest.mark.parametrize(
    ("version", "status", "value"),
    [
        ("0.5.23", "ok", "tested"),
        ("0.5.24", "problem", "unsupported"),
        ("0.5.17", "note", "supported but untested with this version"),
    ],
)
def test_the_version_of_sglang_is_checked(
    version: str, status: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sglang(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(environment, "has_cuda", lambda: False)
    sglang = find(list(diagnosis.engines()), "SGLang")
    assert (sglang.status, sglang.value) == (status, f"{version}, {value}")


def test_traps_in_settings_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_cuda", lambda: False)
    monkeypatch.setattr(environment, "CUDA_COMPANIONS", ())
    found = {finding.name: finding.status for finding in diagnosis.traps()}
    assert found == {"VLLM_CPU_KVCACHE_SPACE": "note"}


@pytest.mark.parametrize(
    ("command", "value", "status"),
    [
        (("echo", "g++ 12"), "g++ 12 --version", "ok"),
        (("false",), "broken: ", "note"),
        (None, "not found", "note"),
    ],
)
def test_the_compiler_is_reported(
    command: tuple[str, ...] | None, value: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "find_compiler", lambda: command)
    found = find(diagnosis.machine(), "C++ compiler")
    assert found.value.startswith(value)
    assert found.status == status
    assert bool(found.advice) == (status == "note")
