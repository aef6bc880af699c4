"""The newest supported version of vLLM, whose Python files lie over the installed build for CPUs.

There may be no build of it for CPUs yet. So the compiled libraries are those of the installed
version; `TESTS_NEWER_VLLM` names a wheel, or the folder of an unpacked package, if there is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import v2_on_cpu
from lyanna_parts import drafter_for
from random_prompts import some_prompts
from tiny_models import make_first_layers
from vllm_runs import Answer, Case, run_vllm
from vllm_versions import download

from drafttree.vllm.versions import LAST, is_supported
from lyanna_plugin.checkpoint import save
from scripts.hosts.overlay import installed, make_overlay

pytestmark = [pytest.mark.full]

NEWEST = ".".join(map(str, LAST))
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 0.8, "top_p": 0.9, "seed": 7}
PROMPTS = some_prompts(4)
CASES = {
    "greedy": Case(PROMPTS, GREEDY, reset=True, rounds=2),
    "seeded": Case(PROMPTS, SAMPLED, reset=True, rounds=2),
    "seeded alone": Case(PROMPTS, SAMPLED, reset=True, together=False),
}
METHODS: dict[str, dict[str, Any]] = {
    # Copies of the first answers would take the place of branches.
    "token_recycling": {"nodes": 15, "memory": 0},
    "rsd": {"tree": "beam:3x4"},
    # A random drafter, which affects speed alone.
    "lyanna": {"nodes": 12},
}
VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
RUNNERS = {
    "V1": dict[str, str](),
    "V2": {name: value for name, value in v2_on_cpu.ENVIRONMENT.items() if name != VARIABLE},
}
"""What makes the engine choose each of its model runners by itself."""


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables with which a new Python imports the newest version, which chooses its runner."""
    folder = tmp_path_factory.mktemp("newest")
    given = os.environ.get("TESTS_NEWER_VLLM")
    source = Path(given) if given else download(f"vllm=={NEWEST}.*", folder / "wheel")
    version = make_overlay(source, folder / "overlay", installed())
    assert is_supported(version)
    assert version.startswith(f"{NEWEST}.")
    paths = [str(folder / "overlay"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        yield {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def serve(
    tiny_llama: Path, newest: dict[str, str], runner: str
) -> Callable[[dict[str, Any] | None], dict[str, Answer]]:
    """Serves the cases on the runner, with a speculative configuration or without."""

    def run(speculative: dict[str, Any] | None) -> dict[str, Answer]:
        answers, log = run_vllm(
            *(tiny_llama, [*CASES.values()], speculative),
            environment=RUNNERS[runner] | newest,
            **v2_on_cpu.LIMITS,
        )
        assert f"LLM engine (v{NEWEST}." in log
        v2_on_cpu.check_runner(runner.lower(), log)
        return dict(zip(CASES, answers, strict=True))

    return run


@pytest.fixture(scope="module")
def plain(
    serve: Callable[[dict[str, Any] | None], dict[str, Answer]],
) -> dict[str, Answer]:
    return serve(None)


@pytest.fixture(scope="module")
def models(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models of the methods that have one."""
    folder = tmp_path_factory.mktemp("models")
    save(drafter_for(tiny_llama), folder / "lyanna")
    return {
        "rsd": make_first_layers(tiny_llama, folder / "rsd", 1),
        "lyanna": folder / "lyanna",
    }


@pytest.mark.parametrize("method", METHODS)
def test_tokens_equal_plain_decoding(
    serve: Callable[[dict[str, Any] | None], dict[str, Answer]],
    plain: dict[str, Answer],
    models: dict[str, Path],
    proves_drafting: Callable[[Answer], None],
    method: str,
) -> None:
    """RSD samples its drafts, so a seed gives other tokens, whoever shares the batch."""
    model = {"model": str(models[method])} if method in models else {}
    drafted = serve({"method": method, **METHODS[method], **model})
    assert drafted["greedy"].tokens == plain["greedy"].tokens
    expected = drafted if method == "rsd" else plain
    assert drafted["seeded"].tokens == expected["seeded alone"].tokens
    for name in ("greedy", "seeded"):
        proves_drafting(drafted[name])
