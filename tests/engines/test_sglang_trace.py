"""Traces of answers in the real SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import add_byte_tokenizer, make_tiny_llama
from traces import SCHEMA, by_source, check_trace

pytest.importorskip("sglang", reason="SGLang is not installed here")

from drafttree.bench.engine_process import EngineProcess
from drafttree.bench.protocol import EngineSpec, Request

pytestmark = pytest.mark.full


def test_a_trace_has_the_same_answer_and_the_engines_counts(tmp_path: Path) -> None:
    model = add_byte_tokenizer(make_tiny_llama(tmp_path / "model"))
    config = {"method": "token_recycling", "nodes": 32, "prime": False}
    spec = EngineSpec(str(model), max_model_len=512, speculative_config=config)
    with EngineProcess("sglang", "traced", spec) as engine:
        engine.wait_until_ready()
        free = check_trace(engine, Request([5, 6, 7, 5, 6, 7, 5], 48))
        assert any(source.startswith("n-gram match") for source in by_source(free))
        bound = check_trace(engine, Request([*range(10, 30)], 48, schema=SCHEMA))
        tried, hit = by_source(bound)["forced by a grammar"]
        assert tried == hit > 0
