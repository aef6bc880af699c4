"""Lyanna on the V2 model runner in the real vLLM, on a CPU with its kernels in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import draft_rows
import forbid_waiting
import pytest
from lyanna_parts import drafter_for
from lyanna_states import VARIABLE, check_states
from overfitted_drafter import LENGTH, make_overfitted
from overfitted_drafter import PROMPTS as LEARNED
from random_prompts import diverging_prompts, some_prompts
from tiny_models import add_byte_tokenizer, make_tiny_llama
from vllm_v2_runs import Answer, Case, run_v2

from lyanna_plugin.checkpoint import save

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 0.8, "seed": 7}
PROMPTS = some_prompts(4)
LONG = some_prompts(4, seed=8, longest=100, shortest=90)
CASES: dict[str, Case] = {
    "greedy": Case(PROMPTS, GREEDY, reset=True),
    "seeded": Case(
        PROMPTS,
        [SAMPLED, SAMPLED | {"top_p": 0.9}, GREEDY, SAMPLED | {"min_p": 0.05, "min_tokens": 4}],
        reset=True,
    ),
    "penalties beside trees": Case(
        PROMPTS, [GREEDY, GREEDY | {"repetition_penalty": 1.3}] * 2, reset=True
    ),
    "chunked prompts of more requests than seats": Case(
        some_prompts(7, seed=4, longest=140), GREEDY, reset=True
    ),
    "prefix hits": Case(
        [
            prompt + more
            for prompt, more in zip(
                some_prompts(7, seed=4, longest=140)[:4], some_prompts(4, seed=5), strict=True
            )
        ],
        GREEDY,
    ),
    "preemption": Case(LONG, GREEDY | {"max_tokens": 64}, reset=True),
    "the context's end": Case(
        some_prompts(2, seed=9, longest=230, shortest=225), GREEDY | {"max_tokens": 64}, reset=True
    ),
}
"""What the engine with trees must answer as the engine without."""


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> dict[str, Answer]:
    answers, _ = run_v2(tiny_llama, [*CASES.values()])
    return dict(zip(CASES, answers, strict=True))


@pytest.fixture(scope="module")
def drafter(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter, which affects speed alone."""
    folder = tmp_path_factory.mktemp("drafter")
    save(drafter_for(tiny_llama), folder)
    return folder


@pytest.fixture(scope="module")
def run(tiny_llama: Path, drafter: Path) -> tuple[list[Answer], str]:
    environment = forbid_waiting.ENVIRONMENT | draft_rows.ENVIRONMENT
    answers, log = run_v2(
        tiny_llama, [*CASES.values()], "lyanna", drafter, environment, nodes=12, head="whole"
    )
    assert f"{forbid_waiting.CHECKED} draft" in log
    return answers, log


@pytest.fixture(scope="module")
def drafted(run: tuple[list[Answer], str]) -> dict[str, Answer]:
    return dict(zip(CASES, run[0], strict=True))


FEW_DRAFTS = ("prefix hits", "the context's end")
"""Cases in which a random drafter's tokens may never be the next ones."""


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_plain_decoding(
    name: str, plain: dict[str, Answer], drafted: dict[str, Answer]
) -> None:
    assert drafted[name].tokens == plain[name].tokens
    assert drafted[name].reasons == plain[name].reasons
    assert drafted[name].counters["draft_tokens"] > 0
    assert drafted[name].counters["accepted_tokens"] > 0 or name in FEW_DRAFTS


def test_the_layer_drafts_from_one_row_of_each_request(run: tuple[list[Answer], str]) -> None:
    draft_rows.check_chains(run[1], 2)


@pytest.mark.full
def test_requests_are_preempted_and_find_prefixes(drafted: dict[str, Answer]) -> None:
    assert drafted["preemption"].preemptions > 0
    assert max(each or 0 for each in drafted["prefix hits"].cached) >= 32


@pytest.fixture(scope="module")
def overfitted(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overfitted") / "drafter"
    assert make_overfitted(tiny_llama, folder).mean_accepted_tokens > 3.8
    return folder


@pytest.mark.full
def test_a_drafter_that_has_memorised_the_answers_is_accepted(
    tiny_llama: Path, overfitted: Path
) -> None:
    """That proves the layer's KV correct, for single requests and batches, and the copy of the
    head: all tokens are hot. No part waits."""
    settings = GREEDY | {"max_tokens": LENGTH}
    cases = [Case(LEARNED[:4], settings), Case(LEARNED[:2], settings, together=False)]
    plainly, _ = run_v2(tiny_llama, cases)
    answers, log = run_v2(
        *(tiny_llama, cases, "lyanna", overfitted, forbid_waiting.ENVIRONMENT),
        nodes=12,
        resample=False,
    )
    for without, with_trees in zip(plainly, answers, strict=True):
        assert with_trees.tokens == without.tokens
        assert with_trees.counters["emitted"] / with_trees.counters["steps"] > 3.3
    assert f"{forbid_waiting.CHECKED} draft" in log


@pytest.mark.full
def test_a_second_tree_is_verified_alone(tiny_llama: Path, overfitted: Path) -> None:
    settings = [SAMPLED, GREEDY, SAMPLED | {"seed": 3, "temperature": 1.2}, GREEDY]
    case = Case(LEARNED[:4], [each | {"max_tokens": 32} for each in settings])
    (plainly,), _ = run_v2(tiny_llama, [case])
    (answer,), _ = run_v2(
        *(tiny_llama, [case], "lyanna", overfitted),
        forbid_waiting.ENVIRONMENT,
        nodes=12,
        fusion=False,
        table="float8",
    )
    assert answer.tokens == plainly.tokens
    assert answer.counters["accepted_tokens"] > 0


@pytest.mark.full
def test_structured_output_and_opting_out(tmp_path: Path) -> None:
    """Requests that follow a grammar are drafted for, and those that ask for it are not."""
    model = add_byte_tokenizer(make_tiny_llama(tmp_path))
    save(drafter_for(model), tmp_path / "drafter")
    grammar = {"choice": ["green", "yellow ochre"]}
    chosen = {"temperature": 0.0, "max_tokens": 24, "structured": grammar}
    off = GREEDY | {"extra_args": {"drafttree": False}}
    cases = [
        Case(PROMPTS, [chosen, GREEDY, chosen, off]),
        Case(PROMPTS[:2], off),
        Case(PROMPTS, chosen),
    ]
    plainly, _ = run_v2(model, cases)
    answers, log = run_v2(model, cases, "lyanna", tmp_path / "drafter", nodes=12)
    for without, with_trees in zip(plainly, answers, strict=True):
        assert with_trees.tokens == without.tokens
    assert answers[0].counters["draft_tokens"] > 0
    assert answers[1].counters["draft_tokens"] == 0
    assert answers[2].counters["draft_tokens"] > 0
    assert "served without drafts" not in log


@pytest.mark.full
def test_the_layers_states_are_those_of_pytorch(
    tiny_llama: Path, drafter: Path, tmp_path: Path
) -> None:
    """Prompts are read in chunks, and prefix hits end before and after a block's end."""
    prompts = diverging_prompts(180, [63, 64, 65, 179])
    case = Case(prompts, GREEDY | {"max_tokens": 20}, together=False)
    recorded = {VARIABLE: str(tmp_path / "states")}
    (answer,), _ = run_v2(
        *(tiny_llama, [case], "lyanna", drafter, recorded),
        engine={"num_gpu_blocks_override": 60},
        nodes=12,
        head="whole",
    )
    # The last block of a hit is computed again, because the token after it may differ.
    assert answer.cached == [0, 0, 32, 32, 128]
    check_states(
        tiny_llama, drafter, prompts, [each[0] for each in answer.tokens], tmp_path / "states"
    )


@pytest.mark.full
def test_a_wrong_mask_is_found(tiny_llama: Path, overfitted: Path) -> None:
    """Negative control: nodes that see the root and themselves alone give other tokens."""
    case = Case(LEARNED[:4], GREEDY | {"max_tokens": LENGTH})
    (plainly,), _ = run_v2(tiny_llama, [case])
    (answer,), _ = run_v2(
        *(tiny_llama, [case], "lyanna", overfitted), planted_fault="root's mask", nodes=12
    )
    assert answer.counters["accepted_tokens"] > 0
    assert answer.tokens != plainly.tokens
