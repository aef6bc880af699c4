"""What a trace must show, in either engine."""

from __future__ import annotations

import json
from collections import Counter

from drafttree.bench.engine_process import EngineProcess
from drafttree.bench.protocol import Request, Traced

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green", "blue"]}, "sure": {"type": "boolean"}},
        "required": ["colour", "sure"],
        "additionalProperties": False,
    }
)


def by_source(traced: Traced) -> dict[str, tuple[int, int]]:
    tried = Counter(node.source for step in traced.steps for node in step.tried)
    hit = Counter(node.source for step in traced.steps for node in step.tried if node.accepted)
    return {source: (tried[source], hit[source]) for source in tried}


def check_trace(engine: EngineProcess, request: Request) -> Traced:
    """An answer is the same with and without a trace, whose counts are the engine's own."""
    engine.reset(tables=True)
    plain = engine.generate([request])[0]
    counted = engine.counters()
    engine.reset(tables=True)
    traced = engine.trace(request)
    generation, steps = traced.generation, traced.steps
    assert generation.token_ids == plain.token_ids
    assert (generation.steps, generation.step_tokens) == (plain.steps, plain.step_tokens)
    assert engine.counters() == counted
    assert len(steps) == counted["steps"] > 0
    assert sum(len(step.nodes) - 1 for step in steps) == counted["draft_tokens"] > 0
    assert sum(len(step.emitted) - 1 for step in steps) == counted["accepted_tokens"] > 0
    emitted = [token.token for step in steps for token in step.emitted]
    answer = generation.token_ids
    assert [answer[0], *emitted][: len(answer)] == answer
    assert by_source(traced) == {
        row["source"]: (row["tried"], row["hit"]) for row in engine.acceptance()["sources"]
    }
    roots = [step.nodes[0].token for step in steps]
    assert roots == [answer[0], *(step.bonus.token for step in steps[:-1])]
    for step in steps:
        assert step.seconds.draft > 0
        assert step.seconds.forward > 0
        assert step.seconds.verify > 0
        assert step.seconds.rest > 0
    assert traced.prompt_seconds.forward > 0
    # Nothing is recorded afterwards.
    engine.reset(tables=True)
    assert engine.generate([request])[0].token_ids == plain.token_ids
    return traced
