"""Token Recycling is primed by the engines' own forwards, at start and between requests."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hosts import Answer, Case, Host, on_v2_too
from primed_prefix import answers_around_priming
from random_prompts import some_prompts
from tiny_models import make_tiny_llama
from top_tokens import check_primed
from typer.testing import CliRunner

from drafttree.cli import app
from recycle_plugin.storage.primed_files import primed_file

VOCAB = 512
K = 8
BOS = 7

SHORT = Case([[5, 9, 11]], {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True})
"""One step that can be drafted for; a drafter without primed rows knows nothing about its root."""
MOST_STEPS = {"v1": 1, "v2": 2}
"""V2 schedules a step before it knows that the last one has ended a request."""
OWN_LOOP = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""Lets vLLM's engine core run in a process of its own, which waits for requests."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), BOS)


def make_model(folder: Path, bos: int | None) -> Path:
    folder.mkdir(exist_ok=True)
    make_tiny_llama(folder, vocab_size=VOCAB, sharpness=2.0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": bos}))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTTREE_CACHE", str(tmp_path))
    return tmp_path


def serve(
    host: Host, model: Path, cases: list[Case], cache: Path, **options: object
) -> tuple[list[Answer], str]:
    return host.run(
        model,
        cases,
        "token-recycling",
        {"nodes": 15, "prime": True, **options},
        environment={"DRAFTTREE_CACHE": str(cache), **OWN_LOOP},
    )


@on_v2_too
@pytest.mark.parametrize("bos", [BOS, None])
def test_rows_that_are_computed_at_start_are_drafted_in_the_first_step(
    host: Host, cache: Path, tmp_path: Path, bos: int | None
) -> None:
    folder = make_model(tmp_path / "model", bos)
    (answer,), log = serve(host, folder, [SHORT], cache, prime_seconds=math.inf)
    check_primed(folder)
    assert f"is primed for {VOCAB} of {VOCAB} tokens" in log
    assert 1 <= answer.counters["drafted_steps"] <= MOST_STEPS[host.runner]


@pytest.mark.full
@on_v2_too
def test_an_idle_engine_computes_the_rows_to_the_end(host: Host, model: Path, cache: Path) -> None:
    """The file is written when all rows are computed."""
    (unprimed,), log = serve(host, model, [SHORT], cache, prime=False)
    assert "Token Recycling is primed" not in log
    assert unprimed.counters["drafted_steps"] == 0
    later = Case(SHORT.prompts, SHORT.sampling, after=primed_file(model, K))
    (first, second), log = serve(host, model, [SHORT, later], cache, prime_seconds=0)
    check_primed(model)
    assert f"is primed for {VOCAB} of {VOCAB} tokens" in log
    assert second.tokens == first.tokens == unprimed.tokens
    assert 1 <= second.counters["drafted_steps"] <= MOST_STEPS[host.runner]


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 5])
def test_cached_prefixes_are_as_before(host: Host, tmp_path: Path, count: int) -> None:
    """In SGLang two prompts stay in the cache; five fill it, so that priming evicts the oldest."""
    model = make_model(tmp_path, BOS)
    prompts = some_prompts(count, longest=400, shortest=300)
    (first, second), progress = answers_around_priming(
        host.name, str(model), prompts, str(tmp_path / "cache"), 24
    )
    assert progress[0][0] < VOCAB
    assert progress[-1] == (VOCAB, VOCAB)
    assert second == first


@pytest.mark.full
def test_the_command_primes_a_model(host: Host, model: Path, cache: Path) -> None:
    arguments = ("--method", "token-recycling", "--model", str(model), "--dtype", "float32")
    result = CliRunner().invoke(app, ["prepare", *arguments, "--engine", host.name])
    assert result.exit_code == 0, result.output
    assert f"Priming Token Recycling: {VOCAB} of {VOCAB} tokens" in result.stderr
    check_primed(model)
