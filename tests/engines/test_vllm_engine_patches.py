"""In the real vLLM exactly what `PATCHES` lists is replaced, once; other engines are unchanged."""

from __future__ import annotations

import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from engine_host.jobs import run_job
from vllm_configured import configure
from vllm_patch_report import make_report
from vllm_runs import ENVIRONMENT

from drafttree.vllm.patches import PATCHES, keep_convolutions

REGISTERED = "vllm.engine.arg_utils:EngineArgs.create_speculative_config"
CHECK = "vllm.sampling_params:SamplingParams._validate_spec_decode"

IDLE = "vllm.v1.engine.core:EngineCoreProc._notify_idle_state_callbacks"

OF_CLASSES = {REGISTERED, CHECK, IDLE}

OTHERS = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "a runner's class",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "a runner's class",
    "vllm.v1.worker.gpu.mm.rope:RopeState": "for M-RoPE alone",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": "a registry of the module",
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_spec_forward": "for chains alone",
}
"""Targets that are no attributes, or that an engine with trees leaves as they are."""


@pytest.fixture(scope="module")
def report(tiny_llama: Path) -> dict[str, Any]:
    made, _ = run_job("vllm", make_report, (str(tiny_llama),), ENVIRONMENT, 200)
    assert isinstance(made, dict)
    return made


def test_registration_wraps_one_method(report: dict[str, Any]) -> None:
    assert report["registered"] == [REGISTERED]


def test_other_methods_are_passed_on(report: dict[str, Any]) -> None:
    assert report["passed_on"] == [True] * 5


def test_an_engine_replaces_three_methods(report: dict[str, Any]) -> None:
    assert report["served"] == sorted(OF_CLASSES)


def test_an_engine_core_is_patched_when_it_receives_the_configuration(
    report: dict[str, Any],
) -> None:
    assert report["received"] == [False, True]


def test_engine_cores_prime_only_for_drafttree_methods(report: dict[str, Any]) -> None:
    assert report["primed"] == {"plain": ["stock"], "ours": ["stock", "primed"]}


def test_the_runner_is_adopted(report: dict[str, Any]) -> None:
    assert report["runner"] == ["ModelFreeRunner", "CPUModelRunner"]


def test_the_list_is_complete(report: dict[str, Any]) -> None:
    listed = {patch.target for patch in PATCHES} - OF_CLASSES - OTHERS.keys()
    assert set(report["applied"]) == {target.partition(":")[2] for target in listed} | {
        "SimpleNamespace.overrides"
    }


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_targets_exist(patch: Any) -> None:
    module, _, name = patch.target.partition(":")
    assert hasattr(import_module(module), name.partition(".")[0])


def test_convolutions_are_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    name = "_spec_forward"
    stock = getattr(gdn_attention, name)
    monkeypatch.setattr(gdn_attention, name, stock)  # restored after the test
    keep_convolutions()
    replaced = getattr(gdn_attention, name)
    keep_convolutions()
    assert getattr(gdn_attention, name) is replaced is not stock
    monkeypatch.setattr(gdn_attention, name, lambda layer: layer)
    with pytest.raises(RuntimeError, match="_spec_forward takes"):
        keep_convolutions()


def test_startup_plans_are_those_of_a_method_and_its_options(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM keeps of an earlier start, it finds by the configuration's hash."""
    several: list[dict[str, Any]] = [
        {"nodes": 8},
        {"nodes": 8, "memory": False},
        {"method": "rsd", "model": str(tiny_llama), "tree": "beam:2x4"},
    ]

    def hashes() -> list[str]:
        made = [configure(tiny_llama, each) for each in several]
        for config in made:
            assert pickle.loads(pickle.dumps(config)).compute_hash() == config.compute_hash()
        return [config.compute_hash() for config in made]

    monkeypatch.delenv("VLLM_ENABLE_STARTUP_PLAN", raising=False)
    assert len({*hashes()}) == 1
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    assert len({*hashes()}) == 3
    assert hashes() == hashes()


def test_a_second_call_changes_nothing(report: dict[str, Any]) -> None:
    assert report["twice"] == []


def test_contexts_restore_what_they_replace(report: dict[str, Any]) -> None:
    assert report["restored"] == []


def test_an_unknown_engine_is_refused(report: dict[str, Any]) -> None:
    assert len(report["refused"]) == 21
    for name, message in report["refused"].items():
        assert name in message
        assert "does not support this vLLM" in message
