"""RSD and Lyanna in SGLang with shapes of trees that change from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import scripted_shapes
from hosts import SGLANG, Answer, Case
from lyanna_parts import drafter_for
from overfitted_drafter import LENGTH, PROMPTS, make_overfitted
from random_prompts import some_prompts
from simulated_drafting import BEAMS
from tiny_models import make_first_layers

from drafttree.budget.level_acceptance import NO_DRAFTS, TreeShape
from lyanna_plugin import LyannaOptions
from lyanna_plugin.checkpoint import save

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 80, "ignore_eos": True}
LYANNA_SHAPES = LyannaOptions(model="any", nodes="auto").shapes


def accepted(answer: Answer) -> float:
    """Accepted draft tokens per step with drafts."""
    counters = answer.counters
    return counters["accepted_tokens"] / counters["drafted_steps"]


def mean_depth(shapes: Sequence[TreeShape]) -> float:
    """What `accepted` is by the script if every path is accepted to its end."""
    chosen = [(NO_DRAFTS, *shapes)[index % (1 + len(shapes))] for index in scripted_shapes.SCRIPT]
    return mean(shape.depth for shape in chosen if shape.depth)


def test_a_draft_model_that_equals_the_target_is_accepted_after_rests(tiny_llama: Path) -> None:
    """It falls behind in steps without drafts, and reads what it has missed before it drafts.

    Prompts are read in chunks, more requests arrive than run at a time, and prefixes are cached.
    """
    case = Case(some_prompts(10, longest=300), GREEDY)
    again = Case([*case.prompts[5:], *case.prompts[:5]], GREEDY)
    plain, _ = SGLANG.run(tiny_llama, [case, again], running=4, chunk=64)
    drafted, _ = SGLANG.run(
        *(tiny_llama, [case, again], "rsd", {"tree": "auto"}, tiny_llama),
        running=4,
        chunk=64,
        environment=scripted_shapes.ENVIRONMENT,
    )
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert sum(each or 0 for each in drafted[1].cached) > 0
    for answer in drafted:
        assert answer.counters["drafted_steps"] < 0.5 * answer.counters["steps"]
        assert answer.counters["kv_rows_moved"] > 0
        assert accepted(answer) > 0.85 * mean_depth(BEAMS)


@pytest.mark.full
def test_shapes_that_are_chosen_by_their_costs(tiny_llama: Path, tmp_path: Path) -> None:
    """In a tiny model whatever is chosen costs little; answers are those of plain decoding."""
    case = Case(some_prompts(12), {**GREEDY, "max_tokens": 200})
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    (plain,), _ = SGLANG.run(tiny_llama, [case])
    (drafted,), _ = SGLANG.run(tiny_llama, [case], "rsd", {"tree": "auto"}, draft)
    assert drafted.tokens == plain.tokens
    assert 0 < drafted.counters["drafted_steps"] < drafted.counters["steps"]


@pytest.mark.full
def test_a_drafter_that_has_memorised_the_answers_is_accepted_after_rests(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """While nothing is drafted the layer reads several tokens at a time, and nothing is lost."""
    make_overfitted(tiny_llama, tmp_path)
    greedy = {**GREEDY, "max_tokens": LENGTH}
    cases = [Case(PROMPTS, greedy), Case(PROMPTS[::-1], greedy)]
    plain, _ = SGLANG.run(tiny_llama, cases, running=5)
    drafted, _ = SGLANG.run(
        *(tiny_llama, cases, "lyanna", {"nodes": "auto"}, tmp_path),
        running=5,
        environment=scripted_shapes.ENVIRONMENT,
    )
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    for answer in drafted:
        assert answer.counters["drafted_steps"] < 0.5 * answer.counters["steps"]
        assert accepted(answer) > 0.75 * mean_depth(LYANNA_SHAPES)
    assert drafted[-1].counters["kv_rows_moved"] > 0


@pytest.mark.full
@pytest.mark.parametrize("method", ["rsd", "lyanna"])
def test_shapes_that_change_leave_the_answers(
    tiny_llama: Path, tmp_path: Path, method: str
) -> None:
    """Prompts are read in chunks, and requests are retracted."""
    if method == "rsd":
        options, drafter = {"tree": "auto"}, make_first_layers(tiny_llama, tmp_path, 1)
    else:
        save(drafter_for(tiny_llama), tmp_path)
        options, drafter = {"nodes": "auto"}, tmp_path
    case = Case(some_prompts(8, longest=30), {**GREEDY, "max_tokens": 300})
    (plain,), _ = SGLANG.run(tiny_llama, [case])
    (drafted,), _ = SGLANG.run(
        *(tiny_llama, [case], method, options, drafter),
        chunk=32,
        # SGLang admits requests as if each would generate 16 tokens.
        environment=scripted_shapes.ENVIRONMENT | {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"},
        sglang={"max_total_tokens": 900, "schedule_conservativeness": 0.01},
    )
    assert drafted.tokens == plain.tokens
    assert drafted.preemptions > 0
    assert drafted.counters["accepted_tokens"] > 0
