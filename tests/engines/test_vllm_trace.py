"""Traces of answers in the real vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import add_byte_tokenizer, make_tiny_llama
from traces import SCHEMA, by_source, check_trace
from typer.testing import CliRunner

pytest.importorskip("vllm", reason="vLLM is not installed here")

from drafttree.bench.engine_process import EngineProcess
from drafttree.bench.protocol import EngineSpec, Request
from drafttree.bench.trace import read_trace
from drafttree.cli import app


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return add_byte_tokenizer(make_tiny_llama(folder))


def spec_of(model: Path, **options: Any) -> EngineSpec:
    config = {"method": "token_recycling", "prime": False, **options}
    return EngineSpec(str(model), max_model_len=512, eager=True, speculative_config=config)


def test_a_trace_has_the_same_answer_and_the_engines_counts(model: Path) -> None:
    with EngineProcess("vllm", "traced", spec_of(model, nodes=32)) as engine:
        engine.wait_until_ready()
        free = check_trace(engine, Request([5, 6, 7, 5, 6, 7, 5], 48))
        assert any(source.startswith("n-gram match") for source in by_source(free))
        assert engine.counters()["kv_rows_moved"] > 0
        assert any(node.parent for step in free.steps for node in step.nodes[1:])
        bound = check_trace(engine, Request([*range(10, 30)], 48, schema=SCHEMA))
        tried, hit = by_source(bound)["forced by a grammar"]
        assert tried == hit > 0
        sampled = check_trace(engine, Request([5, 6, 7, 5, 6, 7, 5], 32, temperature=0.8, seed=3))
        assert sampled.generation.token_ids != free.generation.token_ids[:32]


@pytest.mark.full
def test_the_command_writes_a_trace_and_a_page(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"question_id": 1, "category": "other", "turns": ["Never asked."]},
        {"question_id": 2, "category": "mine", "turns": ["abc abc", "abc"]},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    written, page = tmp_path / "trace.json", tmp_path / "trace.html"
    result = CliRunner().invoke(
        app,
        [
            *("trace", "--method", "token-recycling", "--model", str(model), "--eager"),
            *("--prompts", str(prompts), "--index", "1", "--waves", "2"),
            *("--option", "nodes=16", "--option", "prime=false", "--max-new-tokens", "40"),
            *("--json", str(written), "--html", str(page)),
        ],
    )
    assert result.exit_code == 0, result.output
    trace = read_trace(written)
    assert trace.prompt == ["abc abc", "abc"]
    assert (trace.engine, trace.method) == ("vllm", "token-recycling")
    assert trace.options == {"nodes": 16, "prime": False}
    assert 0 < len(trace.tokens) <= 40
    # The first wave's answer is in the memory.
    assert any(row["source"].startswith("memory match") for row in trace.by_source())
    assert "step 1:" in result.output
    assert trace.model in page.read_text()
