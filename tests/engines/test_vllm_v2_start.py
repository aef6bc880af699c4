"""What serves draft trees on the V2 model runner is compiled when the engine starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import compiled_at_start
import pytest
from lyanna_parts import drafter_for, predict_embeddings
from random_prompts import some_prompts
from tiny_models import make_first_layers
from vllm_runs import together
from vllm_v2_runs import Answer, Case, run_v2

from lyanna_plugin.checkpoint import save

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 0.8, "seed": 7}
CASES = [
    Case(some_prompts(1, longest=60), GREEDY, rounds=2),
    Case(some_prompts(2, seed=5), [GREEDY, SAMPLED], rounds=2),
]
LIMITS = {"max_num_batched_tokens": 64, "max_num_seqs": 3}
METHODS: dict[str, dict[str, Any]] = {
    "static": {"method": "token_recycling", "tree": "branch:3-2-1"},
    "dynamic": {"method": "token_recycling", "nodes": 7, "memory": 0},
    "auto": {"method": "token_recycling", "nodes": "auto", "memory": 0},
    "rsd": {"method": "rsd", "tree": "beam:2x2"},
    "lyanna": {"method": "lyanna", "nodes": 9, "resample_nodes": 5},
}


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> list[Answer]:
    return run_v2(tiny_llama, CASES, engine=LIMITS)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if each == "dynamic" else pytest.mark.full) for each in METHODS],
)
def test_nothing_is_compiled_while_serving(
    name: str,
    tiny_llama: Path,
    tmp_path: Path,
    plain: list[Answer],
    proves_drafting: Callable[[Answer], None],
) -> None:
    options = dict(METHODS[name])
    if name == "rsd":
        options["draft_model"] = make_first_layers(tiny_llama, tmp_path, 1)
    if name == "lyanna":
        drafter = drafter_for(tiny_llama)
        predict_embeddings(drafter)
        save(drafter, tmp_path)
        options["draft_model"] = tmp_path
    answers, log = run_v2(
        tiny_llama, CASES, environment=compiled_at_start.ENVIRONMENT, engine=LIMITS, **options
    )
    assert compiled_at_start.SERVED in log
    later = [line for line in log.splitlines() if compiled_at_start.LATER in line]
    assert later == [], "\n".join(later)
    # With the same seed RSD draws other numbers than the engine.
    same = 1 if name == "rsd" else 2
    for answer, expected in zip(answers, plain, strict=True):
        assert answer.tokens[:same] == expected.tokens[:same]
    if name in ("static", "dynamic"):
        proves_drafting(together(answers))
    else:
        assert together(answers).counters["accepted_tokens"] > 0
