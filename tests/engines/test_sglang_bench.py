"""`drafttree bench` in the real SGLang, on a few prompts; times are not checked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from sglang_runs import Case, RunFailed, run_sglang
from typer.testing import CliRunner

from drafttree.cli import app

PROMPTS = (
    {"question_id": 1, "category": "qa", "turns": ["Count from one to ten.", "Once more."]},
    {"question_id": 2, "category": "math", "turns": ["What is 2 + 2? And 2 + 2 + 2?"]},
    {"question_id": "x", "category": "qa", "turns": ["Say hello three times."]},
)


def bench(model: Path, output: Path, *arguments: str) -> Any:
    given = ["--engine", "sglang", "--model", str(model), "--output", str(output), *arguments]
    return CliRunner().invoke(app, ["bench", *given])


def test_a_tree_method(smollm2: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    result = bench(
        smollm2,
        output,
        *("--method", "token-recycling", "--option", "nodes=32", "--batch-size", "2"),
        *("--option", "prime=false"),
        *("--prompts", str(prompts), "--max-new-tokens", "24", "--waves", "2"),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    assert report["engine"] == "sglang"
    assert report["engine_version"] == "0.5.23"
    assert report["device"] == "cpu"
    assert report["identical"] + report["ties"] == report["prompts"] == 6
    assert report["mean_accepted_tokens"] > 1.0
    assert report["baseline_mean_accepted_tokens"] == 1.0
    counters = report["counters"]
    assert counters["steps"] == report["steps"]
    first, second = report["waves"]
    assert second["mean_accepted_tokens"] > first["mean_accepted_tokens"]
    assert first["steps"] + second["steps"] == report["steps"]
    assert counters["non_first_child_accepted"] > 0
    assert counters["kv_rows_moved"] > 0
    sources = report["acceptance"]["sources"]
    assert sum(row["hit"] for row in sources) == counters["accepted_tokens"]
    # Forwards are timed with the mean number of drafted nodes.
    drafted = report["counters"]["draft_tokens"] / report["counters"]["drafted_steps"]
    assert report["cost_tokens"] == 1 + round(drafted) > 1
    assert report["verify_cost"] > 0
    assert report["chain_cost"] > 0


@pytest.mark.full
def test_answers_that_follow_a_schema(smollm2: Path, tmp_path: Path) -> None:
    """Both sides are bound by it, and what it forces is a source of drafts."""
    city = {"type": "string", "enum": ["Lisbon", "Oslo", "Rome"]}
    schema = {
        "type": "object",
        "properties": {"city": city, "sunny": {"type": "boolean"}},
        "required": ["city", "sunny"],
        "additionalProperties": False,
    }
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text("".join(json.dumps(each | {"schema": schema}) + "\n" for each in PROMPTS))
    result = bench(
        smollm2,
        output,
        *("--method", "token-recycling", "--option", "nodes=16", "--option", "prime=false"),
        *("--prompts", str(prompts), "--max-new-tokens", "24"),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    assert report["identical"] == report["prompts"] == 3
    forced, *sources = report["acceptance"]["sources"]
    assert forced["source"] == "forced by a grammar"
    assert forced["hit"] == forced["tried"] > 0
    hits = forced["hit"] + sum(row["hit"] for row in sources)
    assert hits == report["counters"]["accepted_tokens"]


@pytest.mark.full
def test_the_best_two_tokens_and_their_logprobs(smollm2: Path) -> None:
    from drafttree.bench.engine_process import EngineProcess
    from drafttree.bench.protocol import EngineSpec, Request

    spec = EngineSpec(str(smollm2), max_model_len=256)
    with EngineProcess("sglang", "plain", spec) as engine:
        engine.wait_until_ready()
        prompt = [504, 3575, 282, 4649, 314]
        (answer,) = engine.generate([Request(prompt, 3)])
        best = engine.top_logprobs(prompt + answer.token_ids[:2])
        assert len(best) == 2
        assert max(best, key=best.__getitem__) == answer.token_ids[2]
        assert all(logprob < 0 for logprob in best.values())
        assert answer.steps == 2
        asked = engine.logprobs(prompt + answer.token_ids[:2], [*best, 7])
        assert {token: asked[token] for token in best} == pytest.approx(best)
        assert asked[7] < min(best.values())


@pytest.mark.full
def test_the_whole_context_is_usable_and_no_more(smollm2: Path) -> None:
    """SGLang holds some tokens back, and ends requests that are too long as if it answered them."""
    from drafttree.bench.engine_process import EngineProcess
    from drafttree.bench.errors import EngineError
    from drafttree.bench.protocol import HELD_BACK, EngineSpec, Request

    spec = EngineSpec(str(smollm2), max_model_len=64)
    with EngineProcess("sglang", "plain", spec) as engine:
        engine.wait_until_ready()
        for length, tokens in ((60, 4), (63, 1)):
            [answer] = engine.generate([Request([504] * length, tokens)])
            assert len(answer.token_ids) == tokens
        assert len(engine.top_logprobs([504] * 63)) == 2
        with pytest.raises(EngineError, match="SGLang aborted a request: Input length"):
            engine.generate([Request([504] * (64 + HELD_BACK["sglang"]), 1)])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--method", "ngram"], "cannot verify drafts"),
        (["--method", "suffix"], "use --engine vllm"),
        (["--method", "draft-model", "--option", "model=DRAFT"], "a CPU with AMX"),
        (["--method", "token-recycling", "--runner", "v2"], "--runner v2 is vLLM's own"),
        (["--method", "token-recycling", "--option", "nodes=0"], "nodes"),
        (["--method", "oracle"], "unknown method"),
    ],
)
def test_errors_name_what_cannot_run(
    smollm2: Path, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    result = bench(smollm2, tmp_path / "report.json", *arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())


@pytest.mark.full
def test_the_engines_own_draft_models_do_not_start_on_a_cpu_without_amx(tiny_llama: Path) -> None:
    """So the bench refuses them."""
    refused = "EAGLE is not supported in decode attention backend torch_native"
    with pytest.raises(RunFailed, match=refused):
        run_sglang(
            tiny_llama,
            [Case([[5, 6, 7]], {"max_new_tokens": 4})],
            drafted=False,
            speculative_algorithm="STANDALONE",
            speculative_draft_model_path=str(tiny_llama),
            speculative_num_steps=3,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=4,
        )


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "on_cuda", "served"),
    [
        ("float32", False, True, {"attention_backend": "triton"}),
        ("bfloat16", False, True, {}),
        ("float32", True, True, {}),
        ("float32", False, False, {}),
    ],
)
def test_float32_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, dtype: str, on_cpu: bool, on_cuda: bool, served: dict[str, str]
) -> None:
    from drafttree.bench.protocol import EngineSpec
    from drafttree.bench.sglang_engine import _for_float32

    variable = "SGLANG_FORCE_FUSED_OP_BACKEND"
    monkeypatch.setenv(variable, "")
    monkeypatch.delenv(variable)  # so that it is unset again after the test
    monkeypatch.setattr("sglang.srt.utils.is_cpu", lambda: on_cpu)
    monkeypatch.setattr("sglang.srt.utils.is_cuda", lambda: on_cuda)
    assert _for_float32(EngineSpec("model", dtype=dtype)) == served
    assert os.environ.get(variable) == ("torch" if served else None)
