"""Traces of answers in the real vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import add_byte_tokenizer, make_tiny_llama
from traces import SCHEMA, by_source, check_trace

pytest.importorskip("vllm", reason="vLLM is not installed here")

from drafttree.bench.engine_process import EngineProcess
from drafttree.bench.protocol import EngineSpec, Request


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
