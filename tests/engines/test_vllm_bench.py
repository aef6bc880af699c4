"""`drafttree bench` in the real vLLM, on a few prompts; times are not checked."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_families import make_tiny_family
from tiny_models import make_tiny_llama
from typer.testing import CliRunner

pytest.importorskip("vllm", reason="vLLM is not installed here")

from drafttree.bench.engine_process import EngineProcess
from drafttree.bench.methods import resolve_method
from drafttree.bench.models import ensure
from drafttree.bench.prompts import Prompt
from drafttree.bench.protocol import EngineSpec, ForwardShape, Generation, Request
from drafttree.bench.run import BenchSettings, Pair
from drafttree.bench.tree_fit import MeasuredTree
from drafttree.cli import app
from drafttree.tree import StaticTree

PROMPTS = (
    {"question_id": 1, "category": "qa", "turns": ["Count from one to ten.", "Once more."]},
    {"question_id": 2, "category": "math", "turns": ["What is 2 + 2? And 2 + 2 + 2?"]},
    {"question_id": "x", "category": "qa", "turns": ["Say hello three times."]},
)


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure("smollm2-135m")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return path


def bench(model: Path, output: Path, *arguments: str) -> Any:
    return CliRunner().invoke(
        app, ["bench", "--model", str(model), "--output", str(output), "--eager", *arguments]
    )


def report_of(model: Path, prompts: Path, *arguments: str, waves: int = 1) -> dict[str, Any]:
    output = prompts.with_name("report.json")
    result = bench(
        model,
        output,
        "--prompts",
        str(prompts),
        "--max-new-tokens",
        "24",
        "--waves",
        str(waves),
        *arguments,
    )
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(output.read_text())
    assert report["prompts"] == 3 * waves
    assert len(report["waves"]) == waves
    assert report["engine"] == "vllm"
    assert report["device"]
    assert report["runner"] == "v1"  # vLLM for CPUs has no other
    assert set(report["per_category"]) == {"qa", "math"}
    return report


@pytest.mark.full
def test_ngram(model: Path, prompts: Path) -> None:
    report = report_of(
        model, prompts, "--method", "ngram", "--repeat", "2", "--option", "num_speculative_tokens=3"
    )
    assert report["options"] == {"num_speculative_tokens": 3}
    assert report["identical"] + report["ties"] == 3
    assert report["baseline_mean_accepted_tokens"] == 1.0
    assert report["mean_accepted_tokens"] > 1.0
    assert report["steps"] < report["baseline_steps"]
    assert len(report["repetitions"]) == 2


@pytest.mark.full
def test_a_draft_model_of_vllm(model: Path, prompts: Path) -> None:
    # The target as its own draft model, so whatever it drafts is accepted.
    method = ("--method", "draft-model", "--option", f"model={model}")
    report = report_of(model, prompts, *method, "--option", "num_speculative_tokens=3")
    assert report["identical"] + report["ties"] == 3
    assert report["mean_accepted_tokens"] > 3.0


def test_suffix_decoding_remembers_the_first_wave(model: Path, prompts: Path) -> None:
    pytest.importorskip("arctic_inference", reason="arctic-inference is not installed here")
    report = report_of(model, prompts, "--method", "suffix", "--repeat", "2", waves=2)
    assert report["identical"] + report["ties"] == 6
    first, second = (wave["mean_accepted_tokens"] for wave in report["waves"])
    assert second > 1.5 * first > 1.0
    assert "drafted_share" not in report["waves"][0]
    # In the second repetition the first wave is new again, so both repetitions take as many steps.
    assert [each["steps"] for each in report["repetitions"]] == [report["steps"]] * 2


def test_tree_method(model: Path, prompts: Path) -> None:
    method = ("--method", "token-recycling", "--option", "nodes=32", "--option", "prime=false")
    report = report_of(model, prompts, *method, "--batch-size", "2", waves=2)
    assert report["identical"] + report["ties"] == 6
    assert report["mean_accepted_tokens"] > 1.0
    counters = report["counters"]
    assert counters["steps"] == report["steps"]
    assert counters["drafted_steps"] > 0
    first, second = report["waves"]
    assert second["mean_accepted_tokens"] > first["mean_accepted_tokens"]
    assert first["steps"] + second["steps"] == report["steps"]
    assert 0 < first["drafted_share"] <= 1
    assert first["drafts_per_step"] > 1
    assert counters["accepted_tokens"] > 0
    assert counters["non_first_child_accepted"] > 0
    assert counters["kv_rows_moved"] > 0
    sources = report["acceptance"]["sources"]
    assert sum(row["hit"] for row in sources) == counters["accepted_tokens"]
    # Forwards are timed with the mean number of drafted nodes.
    drafted = report["counters"]["draft_tokens"] / report["counters"]["drafted_steps"]
    assert report["cost_tokens"] == 1 + round(drafted) > 1
    assert report["cost_context"] > 24
    assert report["verify_cost"] > 0
    assert report["chain_cost"] > 0
    accepted = report["mean_accepted_tokens"]
    assert report["possible_decode_speedup"] == pytest.approx(accepted / report["verify_cost"])


@pytest.mark.full
def test_a_static_trees_acceptance_is_counted_by_node(tmp_path: Path, model: Path) -> None:
    options = {"tree": "branch:3-2-2-1", "prime": False}
    config = {"method": "token_recycling", **options}
    folder = make_tiny_llama(tmp_path / "model")
    for path in model.glob("token*"):
        shutil.copy(path, folder)
    spec = EngineSpec(
        str(folder), batch_size=2, max_model_len=256, eager=True, speculative_config=config
    )
    with EngineProcess("vllm", "static", spec) as engine:
        engine.wait_until_ready()
        engine.generate([Request([5, 6, 7], 48), Request([9, 8], 33)])
        counters, acceptance = engine.counters(), engine.acceptance()
        measured = MeasuredTree.from_counts(acceptance, counters["steps"])
        assert measured.tree == StaticTree.from_notation("branch:3-2-2-1")
        assert counters["accepted_tokens"] > 0
        assert sum(acceptance["hit"]) == counters["accepted_tokens"]
        engine.reset(tables=True)
        assert not any(engine.acceptance()["tried"])


class FixedChat:
    """Replaces the chat template: the prompt is always the same."""

    def render(self, turns: object, answers: object) -> list[int]:
        return [5, 6, 7]

    def decode(self, token_ids: object) -> str:
        return ""


class NullObserver:
    """Ignores the progress of a run."""

    def status(self, text: str) -> None: ...

    def advance(self) -> None: ...

    def answered(self, *answer: Prompt | list[Generation]) -> None: ...


@pytest.mark.full
def test_a_token_with_a_twin_is_a_tie(tmp_path: Path, model: Path) -> None:
    """In this model token t + 256 is always as likely as token t."""
    from transformers import LlamaForCausalLM

    folder = make_tiny_llama(tmp_path / "model")
    twins = LlamaForCausalLM.from_pretrained(folder)
    twins.lm_head.weight.data[256:] = twins.lm_head.weight.data[:256]
    twins.save_pretrained(folder)
    for path in model.glob("token*"):
        shutil.copy(path, folder)
    prompt = Prompt(1, "qa", ("Hello",))
    settings = BenchSettings("vllm", resolve_method("none", {}), folder, [prompt], 16)
    spec = EngineSpec(str(folder), max_model_len=256, eager=True)
    with EngineProcess("vllm", "plain", spec) as engine:
        engine.wait_until_ready()
        side_by_side = Pair(settings, NullObserver(), FixedChat(), 256, engine, engine)
        plain = engine.generate([Request([5, 6, 7], 16)])
        assert side_by_side.verdict(prompt, plain, plain) == "identical"
        for offset, verdict in ((256, "tie"), (1, "different")):
            tokens = [*plain[0].token_ids]
            tokens[9] = (tokens[9] + offset) % 512
            other = [replace(plain[0], token_ids=tokens)]
            assert side_by_side.verdict(prompt, plain, other) == verdict
            # Then the engine is asked for these two tokens alone.
            assert side_by_side.verdict(replace(prompt, schema="{}"), plain, other) == verdict


@pytest.mark.full
def test_recurrent_layers_are_served_without_cached_prefixes(tmp_path: Path) -> None:
    """Without Triton their states could not be cached; verification is not timed."""
    spec = EngineSpec(
        str(make_tiny_family("qwen3_next", tmp_path)),
        dtype="bfloat16",
        max_model_len=256,
        eager=True,
        speculative_config={"method": "token_recycling"},
        tokenizer=False,
    )
    with EngineProcess("vllm", "chains", spec) as engine:
        engine.wait_until_ready()
        [answer] = engine.generate([Request([5, 6, 7], 24)])
        assert engine.counters()["steps"] == answer.steps > 0
        assert engine.forward_seconds(ForwardShape(1, 4, 32, tree=True, repeat=1)) == []


def test_engine_that_cannot_start(model: Path, prompts: Path) -> None:
    output = prompts.with_name("report.json")
    result = bench(
        model,
        output,
        *("--method", "ngram", "--prompts", str(prompts)),
        *("--option", "num_speculative_tokens=-1"),
    )
    assert result.exit_code == 1
    assert "num_speculative_tokens" in result.output
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--method", "oracle"], "unknown method"),
        (["--method", "none", "--prompts", "absent.jsonl"], "cannot read the prompts"),
        (["--method", "none", "--engine", "steam"], "unknown engine"),
        (["--method", "none", "--option", "nodes"], "expected KEY=VALUE"),
    ],
)
def test_wrong_input(tmp_path: Path, model: Path, arguments: list[str], complaint: str) -> None:
    result = bench(model, tmp_path / "report.json", *arguments)
    assert result.exit_code == 2
    assert complaint in result.output


def test_a_runner_that_vllm_does_not_have(model: Path, tmp_path: Path) -> None:
    result = bench(model, tmp_path / "v2.json", "--method", "none", "--runner", "v2")
    assert result.exit_code == 1
    assert "the plain engine failed" in result.output
    assert "Model Runner V2 requires Triton" in " ".join(result.output.split())


def test_wrong_model(tmp_path: Path) -> None:
    result = bench(tmp_path, tmp_path / "report.json", "--method", "none")
    assert result.exit_code == 2
    assert "is not a model folder" in " ".join(result.output.split())
