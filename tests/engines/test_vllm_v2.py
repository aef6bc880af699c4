"""The V2 model runner in the real vLLM, on a CPU with its kernels in Triton's interpreter.

Plain decoding there and draft trees there give the same tokens, whatever is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flash_stand_in
import forbid_waiting
import pytest
import small_chunks
import steady_steps
import triton_on_cpu
from random_prompts import some_prompts
from tiny_models import add_byte_tokenizer, make_tiny_llama
from v2_on_cpu import LIMITS
from vllm_runs import run_vllm
from vllm_v2_runs import Answer, Case, run_v2

NODES = 15
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 0.8, "seed": 7}
PROMPTS = some_prompts(4)
LONG = some_prompts(4, seed=8, longest=100, shortest=90)

CASES: dict[str, Case] = {
    "greedy": Case(PROMPTS, GREEDY, reset=True, rounds=2),
    "seeded": Case(PROMPTS, SAMPLED, reset=True, rounds=2),
    "a mixed batch": Case(
        PROMPTS,
        [
            SAMPLED | {"top_p": 0.9},
            GREEDY,
            SAMPLED | {"top_k": 20, "temperature": 1.0},
            SAMPLED | {"min_p": 0.05, "logit_bias": {7: 2.0}, "min_tokens": 4},
        ],
        reset=True,
        rounds=2,
    ),
    "logprobs": Case(
        PROMPTS, SAMPLED | {"logprobs": 3, "prompt_logprobs": 1}, reset=True, rounds=2
    ),
    "chunked prompts of more requests than seats": Case(
        some_prompts(7, seed=4, longest=140), GREEDY, reset=True, rounds=2
    ),
    "preemption": Case(LONG, GREEDY | {"max_tokens": 64}, reset=True),
}
"""What the engine with trees must answer as the engine without."""

CHAINED = {
    "penalties": Case(PROMPTS, GREEDY | {"repetition_penalty": 1.3}, reset=True, rounds=2),
    "penalties beside trees": Case(
        PROMPTS,
        [GREEDY, SAMPLED | {"frequency_penalty": 0.4, "presence_penalty": 0.3}] * 2,
        reset=True,
        rounds=2,
    ),
}
"""The same, for requests that are drafted for in chains."""

EVERYTHING = CASES | CHAINED

run_with_trees = partial(run_v2, method="token_recycling", nodes=NODES, memory=0)
"""Copies of the first answers would take the place of branches, so none are kept."""


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> dict[str, Answer]:
    answers, _ = run_v2(tiny_llama, [*EVERYTHING.values()])
    return dict(zip(EVERYTHING, answers, strict=True))


@pytest.fixture(scope="module")
def served(tiny_llama: Path) -> tuple[dict[str, Answer], str]:
    answers, log = run_with_trees(
        tiny_llama, [*EVERYTHING.values()], environment=forbid_waiting.ENVIRONMENT
    )
    return dict(zip(EVERYTHING, answers, strict=True)), log


@pytest.fixture(scope="module")
def drafted(served: tuple[dict[str, Answer], str]) -> dict[str, Answer]:
    return served[0]


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_plain_decoding(
    name: str,
    plain: dict[str, Answer],
    drafted: dict[str, Answer],
    proves_drafting: Callable[[Answer], None],
) -> None:
    assert drafted[name].tokens == plain[name].tokens
    assert drafted[name].reasons == plain[name].reasons
    proves_drafting(drafted[name])


@pytest.mark.parametrize("name", CHAINED)
def test_logits_that_depend_on_the_text_are_drafted_for_in_chains(
    name: str, plain: dict[str, Answer], drafted: dict[str, Answer]
) -> None:
    assert drafted[name].tokens == plain[name].tokens
    assert drafted[name].counters["accepted_tokens"] > 0
    if name == "penalties":
        assert drafted[name].counters["kv_rows_moved"] == 0


def test_logprobs_are_those_of_plain_decoding(
    plain: dict[str, Answer], drafted: dict[str, Answer]
) -> None:
    mine, theirs = drafted["logprobs"], plain["logprobs"]
    for ours, others in ((mine.logprobs, theirs.logprobs),):
        for request, other in zip(ours, others, strict=True):
            for position, expected in zip(request[0], other[0], strict=True):
                assert position == pytest.approx(expected, abs=1e-3)
    for prompt, expected_prompt in zip(mine.prompt_logprobs, theirs.prompt_logprobs, strict=True):
        for position, expected in zip(prompt[1:], expected_prompt[1:], strict=True):
            assert position == pytest.approx(expected, abs=1e-3)


@pytest.mark.full
def test_requests_are_preempted(plain: dict[str, Answer], drafted: dict[str, Answer]) -> None:
    assert drafted["preemption"].preemptions > plain["preemption"].preemptions - 1
    assert drafted["preemption"].preemptions > 0


def test_the_host_never_waits(served: tuple[dict[str, Answer], str]) -> None:
    for name in ("prepare_attn", "sample", "propose"):
        assert f"{forbid_waiting.CHECKED} {name}" in served[1]


def test_greedy_tokens_equal_those_of_v1(tiny_llama: Path, plain: dict[str, Answer]) -> None:
    (answer,), log = run_vllm(tiny_llama, [CASES["greedy"]], **LIMITS)
    assert "Using V2 Model Runner" not in log
    assert answer.tokens == plain["greedy"].tokens


@pytest.mark.full
def test_synchronous_scheduling_and_a_static_tree_sampled_in_chunks(
    tiny_llama: Path,
    plain: dict[str, Answer],
    proves_drafting: Callable[[Answer], None],
) -> None:
    names = "greedy", "seeded", "logprobs"
    answers, _ = run_v2(
        tiny_llama,
        [EVERYTHING[name] for name in names],
        "token_recycling",
        environment=small_chunks.ENVIRONMENT,
        engine={"async_scheduling": False},
        nodes=NODES,
        tree="static",
    )
    for name, answer in zip(names, answers, strict=True):
        assert answer.tokens == plain[name].tokens
        proves_drafting(answer)


def test_a_wrong_mask_is_found(tiny_llama: Path, plain: dict[str, Answer]) -> None:
    """Negative control: each node sees the root and itself alone."""
    (answer,), _ = run_with_trees(tiny_llama, [CASES["greedy"]], planted_fault="root's mask")
    assert answer.tokens != plain["greedy"].tokens


@pytest.mark.full
def test_penalised_trees_would_differ(
    tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """Negative control: without chains, other branches count as text. Their tokens are often the
    next ones if there are few tokens."""
    few = make_tiny_llama(tmp_path, vocab_size=32)
    prompts = [[2 + token % 30 for token in prompt] for prompt in PROMPTS]
    penalised = GREEDY | {"max_tokens": 40, "repetition_penalty": 1.2, "frequency_penalty": 0.5}
    cases = [Case(prompts, penalised, rounds=2)]
    (plainly,), _ = run_v2(few, cases)
    (chains,), _ = run_with_trees(few, cases)
    (trees,), _ = run_with_trees(few, cases, planted_fault="no chains")
    assert chains.tokens == plainly.tokens
    assert chains.counters["accepted_tokens"] > 0
    proves_drafting(trees)
    assert trees.tokens != plainly.tokens


@pytest.mark.full
@pytest.mark.parametrize("flash", [None, 3])
def test_the_kernels_of_gpus(
    flash: int | None, tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """With flash attention, it reads what comes before a step."""
    on_cpu = triton_on_cpu.ENVIRONMENT if flash is None else flash_stand_in.environment(flash)
    case = Case(PROMPTS[:3], GREEDY | {"max_tokens": 16}, rounds=2)
    (plainly,), _ = run_v2(tiny_llama, [case])
    (answer,), log = run_with_trees(tiny_llama, [case], environment=on_cpu)
    assert triton_on_cpu.SERVED in log
    assert (flash_stand_in.SERVED in log) == (flash is not None)
    assert answer.tokens == plainly.tokens
    proves_drafting(answer)


@pytest.mark.full
def test_prefix_hits_and_a_memory_of_answers(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """Cached prefixes hold KV rows that were moved; a second wave copies the first's answers."""
    first = Case(PROMPTS[:3], GREEDY | {"max_tokens": 48})
    (answer,), _ = run_vllm(tiny_llama, [first], **LIMITS)
    longer = [
        prompt + tokens[0][:-1] for prompt, tokens in zip(first.prompts, answer.tokens, strict=True)
    ]
    cases = [first, Case(first.prompts, first.sampling), Case(longer, GREEDY)]
    plainly, _ = run_v2(tiny_llama, cases)
    answers, log = run_v2(
        tiny_llama,
        cases,
        "token_recycling",
        environment=steady_steps.environment(1e-6),
        nodes="auto",
        max_nodes=23,
        prime=True,
    )
    assert "23 for 1 to 4" in log
    assert "Token Recycling is primed f" in log  # for some tokens, or from a file
    assert "primed no further" not in log
    for without, with_trees in zip(plainly, answers, strict=True):
        assert with_trees.tokens == without.tokens
    proves_drafting(answers[0])
    waves = [each.counters["emitted"] / each.counters["steps"] for each in answers[:2]]
    assert waves[1] > 2 * waves[0]
    assert max(each or 0 for each in answers[2].cached) >= 32


@pytest.mark.full
def test_no_running_request_waits_because_others_draft(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """With 64 requests and a budget of 1,024 tokens, every decode step schedules all requests."""
    case = Case(some_prompts(64, 4, 13), GREEDY | {"max_tokens": 12})
    engine = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "num_gpu_blocks_override": 400}
    (plainly,), _ = run_v2(tiny_llama, [case], engine=engine)
    (answer,), log = run_with_trees(tiny_llama, [case], engine=engine)
    assert "15 for 64 to 64" in log
    assert answer.tokens == plainly.tokens
    proves_drafting(answer)
    assert answer.iterations <= plainly.iterations


def test_structured_output_opting_out_and_bad_words(tmp_path: Path) -> None:
    """Requests that ask for it are served without drafts, and those with bad words with chains."""
    model = add_byte_tokenizer(make_tiny_llama(tmp_path))
    grammar = {"choice": ["green", "yellow ochre"]}
    chosen = {"temperature": 0.0, "max_tokens": 24, "structured": grammar}
    off = GREEDY | {"extra_args": {"drafttree": False}}
    cases = [
        Case(PROMPTS, [chosen, GREEDY, chosen, off]),
        Case(PROMPTS[:2], chosen),
        Case(PROMPTS[:2], off),
        Case(PROMPTS, GREEDY | {"bad_words": ["a", "bc", "e", "o"]}, rounds=2),
    ]
    plainly, _ = run_v2(model, cases)
    answers, log = run_v2(model, cases, "token_recycling", nodes=7)
    for without, with_trees in zip(plainly, answers, strict=True):
        assert with_trees.tokens == without.tokens
    assert answers[0].counters["accepted_tokens"] > 0
    assert answers[1].counters["draft_tokens"] > 0
    assert answers[2].counters["draft_tokens"] == 0
    assert answers[2].counters["steps"] > 0
    # Bad words depend on the text, so those requests have chains.
    assert answers[3].counters["accepted_tokens"] > 0
    assert answers[3].counters["non_first_child_accepted"] == 0
    assert "served without drafts" not in log


@pytest.mark.full
def test_custom_logits_processors_get_chains(tiny_llama: Path) -> None:
    engine = {"logits_processors": ["vllm_processors_v2:NoneOfTheLastFour"]}
    cases = [Case(PROMPTS, GREEDY, rounds=2)]
    (plainly,), _ = run_v2(tiny_llama, cases, engine=engine)
    (answer,), _ = run_with_trees(tiny_llama, cases, engine=engine)
    assert answer.tokens == plainly.tokens
    assert answer.counters["accepted_tokens"] > 0
    assert answer.counters["kv_rows_moved"] == 0
    for tokens in answer.tokens:
        assert all(len({*tokens[0][at : at + 5]}) == 5 for at in range(len(tokens[0]) - 4))
