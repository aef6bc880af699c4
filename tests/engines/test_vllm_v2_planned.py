"""RSD and Lyanna on the V2 model runner with shapes of trees that change from step to step.

What RSD then samples is tested in `test_vllm_v2_rsd.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forbid_waiting
import pytest
import scripted_shapes
import steady_steps
from overfitted_drafter import LENGTH, make_overfitted
from overfitted_drafter import PROMPTS as LEARNED
from random_prompts import some_prompts
from simulated_drafting import BEAMS
from vllm_v2_runs import Answer, Case, run_v2

from lyanna_plugin import LyannaOptions

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
SCRIPTED = scripted_shapes.ENVIRONMENT | steady_steps.environment(1e-6) | forbid_waiting.ENVIRONMENT
ROOMY = {"num_gpu_blocks_override": 60}
RSD_DEPTHS = {shape.nodes: shape.depth for shape in BEAMS}
LYANNA_DEPTHS = {
    shape.nodes: shape.depth for shape in LyannaOptions(model="any", nodes="auto").shapes
}


def check_acceptance(answer: Answer, depths: Mapping[int, int]) -> None:
    """Chains were accepted to their ends, and of wider trees most, as the path may leave a beam.

    Shapes of both kinds were used, and no drafts.
    """
    emitted = {row["num_draft_tokens"]: row["realised_tokens"] for row in answer.explained}
    assert 0 in emitted
    chains = [nodes for nodes in emitted if nodes == depths.get(nodes)]
    assert len(chains) > 1
    assert len(emitted) > 2 + len(chains)
    for nodes, tokens in emitted.items():
        share = 0.95 if nodes in chains else 0.6
        assert tokens >= 1 + share * depths.get(nodes, 0)


def test_a_draft_model_that_equals_the_target_is_accepted_after_rests(tiny_llama: Path) -> None:
    """It falls behind in steps without drafts, and reads what it has missed before it drafts.

    Prompts are read in chunks, also in rests; more requests arrive than run at a time, prefixes of
    prompts and of answers are cached, and one request runs alone.
    """
    case = Case(some_prompts(6, longest=140), GREEDY)
    again = Case([*case.prompts[3:], *case.prompts[:3]], GREEDY)
    alone = Case(case.prompts[:1], GREEDY, reset=True)
    plain, _ = run_v2(tiny_llama, [case, again, alone], engine=ROOMY)
    turns = [one + each[0] for one, each in zip(case.prompts, plain[0].tokens, strict=True)]
    second = Case([[*each, 5, 6] for each in turns[:4]], GREEDY)
    (of_second,), _ = run_v2(tiny_llama, [second], engine=ROOMY)
    drafted, log = run_v2(
        *(tiny_llama, [case, again, second, alone], "rsd", tiny_llama, SCRIPTED),
        engine=ROOMY,
        tree="auto",
    )
    assert f"{forbid_waiting.CHECKED} draft" in log
    expected = [*plain[:2], of_second, plain[2]]
    assert [each.tokens for each in drafted] == [each.tokens for each in expected]
    # Tokens of answers were found too.
    found = zip(drafted[2].cached, case.prompts[:4], strict=True)
    assert any((cached or 0) > len(prompt) for cached, prompt in found)
    for answer in drafted:
        assert 0 < answer.counters["drafted_steps"] < 0.6 * answer.counters["steps"]
        assert answer.counters["kv_rows_moved"] > 0
    check_acceptance(drafted[-1], RSD_DEPTHS)


@pytest.mark.full
def test_a_drafter_that_has_memorised_the_answers_is_accepted_after_rests(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """While nothing is drafted the layer reads several tokens at a time, and nothing is lost.

    Seeded requests beside greedy ones get plain decoding's tokens.
    """
    make_overfitted(tiny_llama, tmp_path)
    greedy = GREEDY | {"max_tokens": LENGTH}
    seeded = greedy | {"temperature": 0.8, "seed": 3}
    cases = [
        Case(LEARNED[:8], greedy),
        Case(LEARNED[:1], greedy),
        Case(LEARNED[:4], [greedy, seeded, seeded | {"top_p": 0.9}, greedy]),
    ]
    plain, _ = run_v2(tiny_llama, cases)
    drafted, log = run_v2(tiny_llama, cases, "lyanna", tmp_path, SCRIPTED, nodes="auto")
    assert f"{forbid_waiting.CHECKED} draft" in log
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert drafted[0].counters["kv_rows_moved"] > 0
    check_acceptance(drafted[1], LYANNA_DEPTHS)


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_shapes_that_change_leave_the_answers(tiny_llama: Path, asynchronous: bool) -> None:
    """Requests are preempted, reach the end of the context, and have penalties, as chains do."""
    cases = [
        Case(some_prompts(4, seed=8, longest=100, shortest=90), GREEDY | {"max_tokens": 64}),
        Case(some_prompts(2, seed=9, longest=230, shortest=225), GREEDY | {"max_tokens": 64}),
        Case(some_prompts(4), [GREEDY, GREEDY | {"repetition_penalty": 1.3}] * 2, reset=True),
    ]
    engine = {"async_scheduling": asynchronous}
    plain, _ = run_v2(tiny_llama, cases, engine=engine)
    environment = scripted_shapes.ENVIRONMENT | steady_steps.environment(1e-6)
    drafted, _ = run_v2(
        *(tiny_llama, cases, "rsd", tiny_llama, environment), engine=engine, tree="auto"
    )
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert [each.reasons for each in drafted] == [each.reasons for each in plain]
    assert drafted[-1].preemptions > 0
    for answer in drafted:
        assert answer.counters["accepted_tokens"] > 0


@pytest.mark.full
def test_shapes_that_are_chosen_by_their_costs(tiny_llama: Path) -> None:
    """Where rows are cheap, a draft model that is always accepted is asked for drafts."""
    case = Case(some_prompts(4), GREEDY | {"max_tokens": 120})
    (plain,), _ = run_v2(tiny_llama, [case])
    (drafted,), _ = run_v2(
        *(tiny_llama, [case], "rsd", tiny_llama, steady_steps.environment(1e-6)), tree="auto"
    )
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 0
    assert {row["reason"] for row in drafted.choices} <= {
        *("best", "limit", "rest", "explore", "trial")
    }
    assert max(row["num_draft_tokens"] for row in drafted.explained) > 0
