"""RSD in both engines: the target's greedy tokens, and the draft model's KV."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import drafter_calls
import pytest
from engine_host.jobs import RunFailed
from hosts import Answer, Case, Host
from random_prompts import some_prompts
from rsd_bench import check_figures
from tiny_models import make_first_layers, make_tiny_llama

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
OFF = {**GREEDY, "extra_args": {"drafttree": False}}
FIRST = some_prompts(24)
SECOND = [prompt + more for prompt, more in zip(FIRST, some_prompts(24, seed=4), strict=True)]
CASES = {
    "three times the running requests": Case(FIRST, GREEDY, reset=True),
    "a second turn": Case(SECOND, GREEDY),
    "one at a time": Case(FIRST[:8], GREEDY, together=False, reset=True),
    "chunked prefill": Case(some_prompts(8, seed=5, longest=400), GREEDY),
    "repetition penalty": Case(FIRST, {**GREEDY, "repetition_penalty": 1.2}),
    "frequency penalty": Case(FIRST, {**GREEDY, "frequency_penalty": 0.4}),
    "logprobs": Case(FIRST[:8], {**GREEDY, "logprobs": 2}),
    "drafting turned off": Case(FIRST[:8], [GREEDY if row % 2 else OFF for row in range(8)]),
    "long": Case(FIRST[:4], {**GREEDY, "max_tokens": 500}),
    "greedy beside sampled": Case(
        FIRST[:12], [GREEDY if row % 2 else {**GREEDY, "temperature": 1.0} for row in range(12)]
    ),
}
CHUNKS = {"vllm": 200, "sglang": 32}


@pytest.fixture(scope="module")
def draft(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's first layer."""
    return make_first_layers(tiny_llama, tmp_path_factory.mktemp("draft"), 1)


@cache
def plain_answers(host: Host, model: Path) -> dict[str, Answer]:
    served, _ = host.run(
        model,
        list(CASES.values()),
        chunk=CHUNKS[host.name],
        # With overlapping scheduling plain SGLang's penalties lag by one token.
        sglang={"disable_overlap_schedule": True},
    )
    return dict(zip(CASES, served, strict=True))


@pytest.mark.parametrize(("tree", "compiled"), [("beam:3x4", False), ("branch:3-2-1", True)])
def test_greedy_tokens_equal_plain_decoding(
    host: Host,
    tiny_llama: Path,
    draft: Path,
    proves_drafting: Callable[[Answer], None],
    tmp_path: Path,
    tree: str,
    compiled: bool,
) -> None:
    """The second tree is tested with other engine settings: compiled, and pages of 16 tokens."""
    calls = tmp_path / "calls.json"
    environment = {drafter_calls.VARIABLE: str(calls)}
    if host.name == "vllm":
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if compiled else "0"
    served, _ = host.run(
        tiny_llama,
        list(CASES.values()),
        "rsd",
        {"tree": tree},
        draft,
        chunk=CHUNKS[host.name],
        environment=environment,
        vllm={"enforce_eager": not compiled},
        sglang={"page_size": 16 if compiled else 1},
    )
    plain = plain_answers(host, tiny_llama)
    for (name, without), drafted in zip(plain.items(), served, strict=True):
        greedy = slice(1, None, 2) if name == "greedy beside sampled" else slice(None)
        assert drafted.tokens[greedy] == without.tokens[greedy], name
        proves_drafting(drafted)
        assert [bool(each) for each in drafted.logprobs] == [
            bool(each) for each in without.logprobs
        ]
    expected = plain["logprobs"]
    found = dict(zip(CASES, served, strict=True))["logprobs"]
    assert [len(positions) for positions in expected.chosen] == [32] * 8
    for chosen, same in zip(found.chosen, expected.chosen, strict=True):
        assert chosen == pytest.approx(same, abs=1e-3)
    assert [len(positions) for positions in expected.logprobs] == [32] * 8
    for mine, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        for best, same_best in zip(mine, theirs, strict=True):
            assert best == pytest.approx(same_best, abs=1e-3)
    check_calls(calls, served, 1 + (12 if tree == "beam:3x4" else 3 + 6 + 6))


def check_calls(calls: Path, served: list[Answer], tree_size: int) -> None:
    """The drafter could measure forwards of several trees, and every token was reported to it."""
    seconds, emitted = drafter_calls.recorded(calls)
    assert max(seconds) == 8 * tree_size, "as many requests run at once"
    assert min(seconds.values()) > 0
    answered = sum(len(tokens) for answer in served for tokens in answer.tokens)
    # An engine drops what a step accepts beyond the end of a text.
    assert answered <= sum(emitted.values()) < 1.5 * answered
    assert len(emitted) > 1


ADJUSTED: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "logit_bias": {7: 2.0, 9: -3.0},
}


def always_accepted(
    host: Host, model: Path, cases: list[Case], verify: str = "recursive", **settings: Any
) -> list[Answer]:
    """Serve with the target as its own draft model, and check that all drafts are accepted.

    They are if the draft model's KV is that of a fresh prefill; each step then emits five tokens.
    """
    options = {"tree": "branch:1-1-1-1", "verify": verify}
    served, _ = host.run(model, cases, "rsd", options, model, **settings)
    for case, answer in zip(cases, served, strict=True):
        assert isinstance(case.sampling, dict)
        steps = ceil((case.sampling["max_tokens"] - 1) / 5)
        assert 0 < answer.counters["steps"] <= steps * len(case.prompts)
    return served


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_the_target_is_always_accepted(
    host: Host, tiny_llama: Path, temperature: float
) -> None:
    """The cases have over 500 tokens, ends inside a tree, chunked prefill, prefix hits, prompts
    that diverge right after a page or a block of 128 tokens, and penalties and biases."""
    settings = {**GREEDY, "temperature": temperature, "max_tokens": 503}
    short = {**settings, "max_tokens": 41}
    long = [[*prompt, *range(2, 400)][:400] for prompt in some_prompts(4, seed=6, longest=400)]
    diverging = [[*range(2, 50), row, 5, 6] for row in range(60, 66)]
    served = always_accepted(
        host,
        tiny_llama,
        [
            Case(long, settings),
            Case(long, {**short, **ADJUSTED}),
            Case([[*prompt, 5, 6, 7] for prompt in long], short),
            Case([[*prompt[:256], row, 5, 6] for row, prompt in enumerate(long, 9)], short),
            Case([[*long[0][:256], row] for row in range(20, 26)], short),
            Case(FIRST[:4], settings),
            Case(FIRST[:4], {**short, **ADJUSTED}),
            Case(SECOND[:4], short),
            Case(SECOND[:4], short, together=False),
            Case(diverging[:1], short),
            Case(diverging[1:], short),
        ],
        chunk={"vllm": 300, "sglang": 32}[host.name],
        sglang={"page_size": 16},
    )
    if host.name == "sglang":  # vLLM's blocks are longer than these prompts
        assert sum(cached or 0 for cached in served[8].cached) > 0
        assert served[10].cached == [48] * 5


@pytest.mark.full
def test_traversal_reads_the_targets_distribution_after_each_node(
    host: Host, tiny_llama: Path, draft: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """With penalties and biases along its path: then all of the target's own drafts are accepted.
    Greedy requests beside them, some with logprobs, get plain decoding's tokens."""
    sampled = {**GREEDY, "temperature": 1.0, "max_tokens": 41}
    cases = [Case(FIRST[:4], {**sampled, **extra}) for extra in ({}, ADJUSTED, {"seed": 3})]
    always_accepted(host, tiny_llama, cases, "traversal")
    options = {"tree": "beam:3x4", "verify": "traversal"}
    # SGLang needs a tokenizer for min_new_tokens.
    least = {"vllm": {"min_tokens": 20}, "sglang": {}}[host.name]
    greedy = [
        Case(FIRST[:8], [{**GREEDY, **extra}, {**sampled, **extra}] * 4)
        for extra in (
            {},
            {"repetition_penalty": 1.3, "logprobs": 2},
            {"logprobs": 2},
            {**least, "logit_bias": {7: 2.0}},
        )
    ]
    plain, _ = host.run(tiny_llama, greedy, sglang={"disable_overlap_schedule": True})
    drafted, _ = host.run(tiny_llama, greedy, "rsd", options, draft)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens[::2] == without.tokens[::2]
        assert [len(each) for each in with_trees.logprobs] == [
            len(each) for each in without.logprobs
        ]
        proves_drafting(with_trees)
    for chosen, same in zip(drafted[1].chosen[::2], plain[1].chosen[::2], strict=True):
        assert chosen == pytest.approx(same, abs=1e-3)


@pytest.mark.full
def test_preemption_does_not_change_tokens(
    host: Host, tiny_llama: Path, draft: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """The draft model's KV is computed again with the target's."""
    count = {"vllm": 6, "sglang": 8}[host.name]
    case = Case(some_prompts(count, longest=30), {**GREEDY, "max_tokens": 300})
    (plain,), _ = host.run(tiny_llama, [case])
    cramped: dict[str, Any] = {
        "vllm": {"num_gpu_blocks_override": 11},
        "sglang": {"max_total_tokens": 900, "schedule_conservativeness": 0.01},
    }
    if host.name == "sglang":
        cramped["chunk"] = 32
        # SGLang then admits requests as if each would generate 16 tokens.
        cramped["environment"] = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}
    (drafted,), _ = host.run(tiny_llama, [case], "rsd", {"tree": "beam:3x3"}, draft, **cramped)
    (own,) = always_accepted(host, tiny_llama, [case], **cramped)
    for answer in (drafted, own):
        assert answer.preemptions > 0
        assert answer.tokens == plain.tokens
    proves_drafting(drafted)


def test_numbers_of_heads_that_cannot_be_served_together_are_refused(
    host: Host, tiny_llama: Path, tmp_path: Path
) -> None:
    if host.name == "sglang":
        pytest.skip("SGLang keeps the draft model's KV in a pool of its own")
    draft = make_tiny_llama(tmp_path, heads=2)
    with pytest.raises(RunFailed, match=r"2 KV heads of size 32 but \[2, 4\] query heads"):
        host.run(tiny_llama, [], "rsd", draft_model=draft)


@pytest.mark.full
def test_bench_gives_its_figures(host: Host, smollm2: Path, tmp_path: Path) -> None:
    check_figures(host.name, smollm2, tmp_path)


@pytest.mark.full
def test_engines_with_other_seeds_draw_other_numbers(
    host: Host, tiny_llama: Path, draft: Path
) -> None:
    """And a request's seed gives the same tokens again in vLLM. In SGLang it counts in the
    deterministic mode alone, so that the samples of one request differ."""
    sampled = {**GREEDY, "temperature": 1.0}
    cases = [Case(FIRST[:4], sampled), Case([FIRST[0]] * 3, {**sampled, "seed": 3})]
    found = [
        host.run(
            *(tiny_llama, cases, "rsd", {"tree": "beam:3x4"}, draft),
            vllm={"seed": seed},
            sglang={"random_seed": seed},
        )[0]
        for seed in (0, 0, 1)
    ]
    (first, seeded), (again, seeded_again), (other, _) = [
        [answer.tokens for answer in answers] for answers in found
    ]
    assert first == again
    assert seeded == seeded_again
    assert all(one != two for one, two in zip(first, other, strict=True))
    assert len({*map(tuple, seeded)}) == {"vllm": 1, "sglang": 3}[host.name]
    assert found[0][0].counters["accepted_tokens"] > 0
