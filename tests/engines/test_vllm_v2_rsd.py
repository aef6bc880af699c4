"""RSD on the V2 model runner in the real vLLM, on a CPU with its kernels in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import draft_rows
import forbid_waiting
import hot_drafts
import pytest
import scripted_shapes
import small_chunks
import steady_steps
from joint_distribution import exact_joint, p_value
from random_prompts import some_prompts
from tiny_models import add_byte_tokenizer, make_first_layers, make_tiny_llama
from vllm_v2_runs import Answer, Case, run_v2

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 0.8, "seed": 7}
PROMPTS = some_prompts(4)
CHUNKED = some_prompts(7, seed=4, longest=140)
VERIFY = ("recursive", "traversal")
CASES: dict[str, Case] = {
    "greedy": Case(PROMPTS, GREEDY, reset=True),
    "greedy beside sampled": Case(
        PROMPTS, [GREEDY, SAMPLED, GREEDY, SAMPLED | {"min_p": 0.05, "top_p": 0.9}], reset=True
    ),
    "penalties beside trees": Case(
        PROMPTS, [GREEDY, GREEDY | {"repetition_penalty": 1.3}] * 2, reset=True
    ),
    "biases and logprobs": Case(
        PROMPTS, GREEDY | {"logit_bias": {7: 2.0, 9: -3.0}, "logprobs": 2}, reset=True
    ),
    "chunked prompts of more requests than seats": Case(CHUNKED, GREEDY, reset=True),
    "prefix hits": Case(
        [one + more for one, more in zip(CHUNKED[:4], some_prompts(4, seed=5), strict=True)],
        GREEDY,
    ),
    "preemption": Case(
        some_prompts(4, seed=8, longest=100, shortest=90), GREEDY | {"max_tokens": 64}, reset=True
    ),
    "the context's end": Case(
        some_prompts(2, seed=9, longest=230, shortest=225), GREEDY | {"max_tokens": 64}, reset=True
    ),
}
"""What the engine with trees must answer as the engine without, as far as it is greedy."""


@pytest.fixture(scope="module")
def draft(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's first layer."""
    return make_first_layers(tiny_llama, tmp_path_factory.mktemp("draft"), 1)


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> dict[str, Answer]:
    answers, _ = run_v2(tiny_llama, [*CASES.values()])
    return dict(zip(CASES, answers, strict=True))


@pytest.fixture(scope="module")
def run(tiny_llama: Path, draft: Path) -> tuple[list[Answer], str]:
    environment = forbid_waiting.ENVIRONMENT | small_chunks.ENVIRONMENT | draft_rows.ENVIRONMENT
    answers, log = run_v2(tiny_llama, [*CASES.values()], "rsd", draft, environment, tree="beam:3x4")
    assert f"{forbid_waiting.CHECKED} draft" in log
    return answers, log


@pytest.fixture(scope="module")
def drafted(run: tuple[list[Answer], str]) -> dict[str, Answer]:
    return dict(zip(CASES, run[0], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_plain_decoding(
    name: str, plain: dict[str, Answer], drafted: dict[str, Answer]
) -> None:
    greedy = slice(None, None, 2) if "sampled" in name else slice(None)
    assert drafted[name].tokens[greedy] == plain[name].tokens[greedy]
    assert drafted[name].reasons == plain[name].reasons
    assert drafted[name].counters["draft_tokens"] > 0
    assert drafted[name].counters["accepted_tokens"] > 0


def test_a_draft_model_reads_each_row_of_a_step_once(run: tuple[list[Answer], str]) -> None:
    draft_rows.check_levels(run[1], [3, 3, 3, 3])


@pytest.mark.full
def test_requests_are_preempted_and_find_prefixes(drafted: dict[str, Answer]) -> None:
    assert drafted["preemption"].preemptions > 0
    assert max(each or 0 for each in drafted["prefix hits"].cached) >= 32


def test_logprobs_are_those_of_plain_decoding(
    plain: dict[str, Answer], drafted: dict[str, Answer]
) -> None:
    found, expected = (each["biases and logprobs"].logprobs for each in (drafted, plain))
    for (mine,), (theirs,) in zip(found, expected, strict=True):
        assert len(mine) == 16
        for position, same in zip(mine, theirs, strict=True):
            assert position == pytest.approx(same, abs=1e-3)


@pytest.mark.full
def test_greedy_tokens_equal_plain_decoding_by_traversal(
    tiny_llama: Path, draft: Path, plain: dict[str, Answer]
) -> None:
    environment = forbid_waiting.ENVIRONMENT | small_chunks.ENVIRONMENT
    names = [*CASES][:4]
    answers, log = run_v2(
        *(tiny_llama, [CASES[name] for name in names], "rsd", draft, environment),
        tree="beam:3x4",
        verify="traversal",
    )
    assert f"{forbid_waiting.CHECKED} draft" in log
    for name, answer in zip(names, answers, strict=True):
        test_greedy_tokens_equal_plain_decoding(name, plain, {name: answer})


@pytest.mark.full
@pytest.mark.parametrize("verify", VERIFY)
def test_seeded_requests_depend_neither_on_the_batch_nor_on_scheduling(
    tiny_llama: Path, draft: Path, verify: str
) -> None:
    seeded = [SAMPLED | {"seed": seed} for seed in (7, 8, 7, 9)]
    cases = [Case(PROMPTS, seeded), Case(PROMPTS[::-1], seeded[::-1], together=False)]
    options = {"tree": "branch:3-2", "verify": verify}
    (together, alone), _ = run_v2(tiny_llama, cases, "rsd", draft, **options)
    assert together.tokens == alone.tokens[::-1]
    assert together.counters["accepted_tokens"] > 0
    synchronous = {"async_scheduling": False}
    (again,), _ = run_v2(tiny_llama, cases[:1], "rsd", draft, engine=synchronous, **options)
    assert again.tokens == together.tokens


ADJUSTED: dict[str, Any] = {"logit_bias": {7: 2.0, 9: -3.0}, "min_tokens": 30, "top_k": 40}


@pytest.mark.full
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 1.0])
def test_a_draft_model_that_is_the_target_is_always_accepted(
    tiny_llama: Path, temperature: float
) -> None:
    """They are if the draft model's KV is that of a fresh prefill, and its distributions are the
    target's; each step then emits five tokens."""
    settings = GREEDY | {"temperature": temperature, "max_tokens": 41}
    filtered = ADJUSTED if temperature else {"logit_bias": ADJUSTED["logit_bias"]}
    cases = [
        Case(CHUNKED[:4], settings),
        Case([[*prompt, 5, 6] for prompt in CHUNKED[:4]], settings),
        Case(PROMPTS, settings | filtered),
    ]
    answers, log = run_v2(
        *(tiny_llama, cases, "rsd", tiny_llama),
        forbid_waiting.ENVIRONMENT,
        engine={"num_gpu_blocks_override": 60},
        tree="branch:1-1-1-1",
    )
    for answer in answers:
        assert answer.counters["emitted"] == 5 * answer.counters["steps"] > 0
    assert f"{forbid_waiting.CHECKED} draft" in log


@pytest.mark.full
def test_chains_of_a_draft_model_that_is_the_target_are_always_accepted(tiny_llama: Path) -> None:
    """A penalty that changes no token cuts trees to chains, whose nodes the draft model has read in
    other columns."""
    tiny = GREEDY | {"presence_penalty": 1e-6, "max_tokens": 41}
    case, tree = Case(PROMPTS, tiny), "branch:2-2-1-1"
    (answer,), _ = run_v2(tiny_llama, [case], "rsd", tiny_llama, tree=tree)
    assert answer.counters["emitted"] == 5 * answer.counters["steps"] > 0


@pytest.mark.full
def test_structured_output_and_opting_out(tmp_path: Path) -> None:
    """Requests that follow a grammar are drafted for, and those that ask for it are not.

    The tokenizer tells which tokens are drafted.
    """
    model = add_byte_tokenizer(make_tiny_llama(tmp_path / "target"))
    draft = make_first_layers(model, tmp_path / "draft", 1)
    grammar = {"choice": ["green", "yellow ochre"]}
    chosen = {"temperature": 0.0, "max_tokens": 24, "structured": grammar}
    off = GREEDY | {"extra_args": {"drafttree": False}}
    cases = [
        Case(PROMPTS, [chosen, GREEDY, chosen, off]),
        Case(PROMPTS[:2], off),
        Case(PROMPTS, chosen),
    ]
    plainly, _ = run_v2(model, cases)
    answers, log = run_v2(model, cases, "rsd", draft, hot_drafts.ENVIRONMENT, head=400)
    assert "RSD drafts the 400 most frequent of 512 tokens" in log
    hot_drafts.check_drafts(log)
    for without, with_trees in zip(plainly, answers, strict=True):
        assert with_trees.tokens == without.tokens
    assert answers[0].counters["draft_tokens"] > 0
    assert answers[1].counters["draft_tokens"] == 0
    assert answers[2].counters["draft_tokens"] > 0
    assert "served without drafts" not in log


def of_sampled_tokens(answer: Answer) -> list[float]:
    """The logprobs of an answer's tokens, of one request after another."""
    return [next(iter(each.values())) for (row,) in answer.logprobs for each in row]


@pytest.mark.full
def test_a_wrong_mask_is_found(tiny_llama: Path, draft: Path) -> None:
    """Negative control: nodes that see the root and themselves alone have other logits."""
    case = Case(PROMPTS, GREEDY | {"max_tokens": 40, "logprobs": 0})
    (plainly,), _ = run_v2(tiny_llama, [case])
    for fault in None, "root's mask":
        (answer,), _ = run_v2(
            tiny_llama, [case], "rsd", draft, planted_fault=fault, tree="beam:3x4"
        )
        assert answer.counters["accepted_tokens"] > 0
        is_plain = of_sampled_tokens(answer) == pytest.approx(of_sampled_tokens(plainly), abs=1e-3)
        assert is_plain == (fault is None)


VOCAB = 10
CHANGING = scripted_shapes.ENVIRONMENT | steady_steps.environment(1e-6)
"""Shapes of `tree=auto` that change from step to step, and rests."""


@pytest.mark.full
@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize(
    ("tree", "environment", "least"),
    [("beam:3x3", {}, 0.3), ("auto", CHANGING, 0.1)],
    ids=["fixed", "changing"],
)
def test_sampled_tokens_follow_the_targets_distribution(
    tmp_path: Path, tree: str, environment: dict[str, str], least: float, verify: str
) -> None:
    """They do not follow that of another temperature."""
    target = make_tiny_llama(tmp_path / "target", vocab_size=VOCAB, sharpness=3.0)
    draft = make_first_layers(target, tmp_path / "draft", 1)
    prompt, sampling = [3, 7, 4], {"temperature": 1.3, "top_k": 8, "max_tokens": 4}
    (answer,), _ = run_v2(
        target,
        [Case([prompt] * 2_000, sampling | {"ignore_eos": True})],
        *("rsd", draft, environment),
        engine={
            "max_num_seqs": 32,
            "max_num_batched_tokens": 1024,
            "num_gpu_blocks_override": 100,
        },
        tree=tree,
        verify=verify,
    )
    assert answer.counters["accepted_tokens"] > least * answer.counters["steps"]
    assert answer.counters["non_first_child_accepted"] > 0
    assert answer.counters["kv_rows_moved"] > 0
    tokens = [each for (each,) in answer.tokens]
    assert p_value(tokens, exact_joint(target, prompt, VOCAB, 1.3, 8)) > 0.001
    assert p_value(tokens, exact_joint(target, prompt, VOCAB, 0.7, 8)) < 1e-6
