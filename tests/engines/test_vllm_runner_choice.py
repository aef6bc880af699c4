"""Draft trees are served by the model runner that vLLM itself would run, where it serves them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import v2_on_cpu
from random_prompts import some_prompts
from vllm_configured import configure, find_triton
from vllm_runs import Case, run_vllm

pytest.importorskip("vllm")

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
WORKERS = {
    "V1": ("drafttree.vllm.cpu_worker.TreeCPUWorker", "custom_class", False),
    "V2": ("drafttree.vllm.v2.cpu_worker.TreeCPUWorkerV2", "ngram_gpu", True),
}


@pytest.fixture(autouse=True)
def cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why V1 was chosen, in the words of the log."""
    from drafttree.vllm import runner_choice

    lines: list[str] = []
    monkeypatch.setattr(
        runner_choice.logger, "info_once", lambda line, *words: lines.append(line % words)
    )
    return lines


def assert_served_by(runner: str, config: Any) -> None:
    chosen = config.parallel_config.worker_cls, config.speculative_config.method
    assert (*chosen, config.use_v2_model_runner) == WORKERS[runner]


def test_the_build_for_cpus_runs_v1(tiny_llama: Path, said: list[str]) -> None:
    """So does vLLM itself without Triton, which is nothing to talk about."""
    assert_served_by("V1", configure(tiny_llama))
    assert said == []


@pytest.mark.parametrize(("asked", "runner"), [(None, "V2"), ("1", "V2"), ("0", "V1")])
def test_a_build_with_triton(
    tiny_llama: Path,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    asked: str | None,
    runner: str,
) -> None:
    find_triton(monkeypatch)
    if asked is not None:
        monkeypatch.setenv(VARIABLE, asked)
    assert_served_by(runner, configure(tiny_llama))
    assert said == []


def test_what_v2_does_not_serve_is_served_by_v1(
    tiny_llama: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    from drafttree.vllm import plugin, runner_choice

    find_triton(monkeypatch)
    assert_served_by("V1", configure(tiny_llama, tensor_parallel_size=2))
    assert said.pop() == (
        "vLLM's V1 model runner serves the draft trees here, because draft trees do not work with "
        "tensor_parallel_size=2 on the V2 model runner"
    )
    with monkeypatch.context() as patched:
        method = plugin._METHODS["token_recycling"]
        support = replace(method.kind.vllm, runs_v2=None)
        planted = replace(method, kind=replace(method.kind, vllm=support))
        patched.setitem(plugin._METHODS, "token_recycling", planted)
        assert_served_by("V1", configure(tiny_llama))
    assert "Token Recycling is served by the V1 model runner only" in said.pop()
    with monkeypatch.context() as patched:
        patched.setattr(vllm, "__version__", "0.29.0")
        assert_served_by("V1", configure(tiny_llama))
    assert "V2 model runner of vLLM 0.32 to 0.33, not with that of 0.29.0" in said.pop()
    with monkeypatch.context() as patched:
        patched.setattr(runner_choice, "takes_v2", lambda *_: None)
        assert_served_by("V1", configure(tiny_llama))
    assert "cannot be read" in said.pop()
    assert said == []


def test_settings_with_which_vllm_itself_runs_v1(
    tiny_llama: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own rules are asked, not a copy of them."""
    from vllm.config import VllmConfig

    find_triton(monkeypatch)
    name = "_get_v2_model_runner_unsupported_features"
    monkeypatch.setattr(VllmConfig, name, lambda self: ["everything"])
    assert_served_by("V1", configure(tiny_llama))
    assert said == []


def test_settings_that_only_the_other_runner_serves(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import VllmConfig

    rules = property(lambda self: self.speculative_config is not None)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", rules)
    with pytest.raises(ValueError, match="V1 model runner, but with these settings vLLM takes V2"):
        configure(tiny_llama)


def test_rules_that_cannot_be_read(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from drafttree.vllm.runner_choice import takes_v2

    config = configure(tiny_llama)
    arguments = EngineArgs(model=str(tiny_llama)), config.model_config, config.parallel_config
    assert takes_v2(*arguments) is False
    rules = property(lambda self: self.a_part_that_is_not_there_yet.value)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", rules)
    assert takes_v2(*arguments) is None
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", lambda self: True)
    assert takes_v2(*arguments) is None


@pytest.mark.parametrize(("configured", "started"), [("V1", "V2"), ("V2", "V1")])
def test_a_worker_that_is_to_run_the_other_runner(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, configured: str, started: str
) -> None:
    """A process may have another environment than the one that made the configuration."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    find_triton(monkeypatch)
    monkeypatch.setenv(VARIABLE, str(int(configured == "V2")))
    config = configure(tiny_llama)
    monkeypatch.setenv(VARIABLE, str(int(started == "V2")))
    worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)(
        config, local_rank=0, rank=0, distributed_init_method="tcp://127.0.0.1:1"
    )
    message = f"for vLLM's {configured} model runner, but this worker is to run {started}"
    with pytest.raises(RuntimeError, match=message):
        worker.init_device()


def test_an_engine_runs_v2_unasked(tiny_llama: Path) -> None:
    environment = {k: v for k, v in v2_on_cpu.ENVIRONMENT.items() if k != VARIABLE}
    greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    (answer,), log = run_vllm(
        tiny_llama,
        [Case(some_prompts(2), greedy, rounds=2)],
        speculative={"method": "token_recycling", "nodes": 15},
        environment=environment,
        **v2_on_cpu.LIMITS,
    )
    assert "Using V2 Model Runner" in log
    assert answer.counters["accepted_tokens"] > 0
