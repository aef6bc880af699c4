"""Sampling parameters, and other settings of requests, give the same tokens with draft trees.

With a seed they are equal token for token: each emitted token takes one draw of its request's
generator. Plain SGLang is run without overlapping scheduling here, with which its penalties lag by
one token.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hosts import SGLANG, VLLM, VLLM_V2, Answer, Case, Host
from random_prompts import some_prompts

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.6, "seed": 17}
PROMPTS = some_prompts(12, seed=5, longest=40)

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "presence and frequency penalties": {
        **GREEDY,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "repetition penalty": {**GREEDY, "repetition_penalty": 1.1},
    "logit bias": {**GREEDY, "logit_bias": {7: 4.0, 11: -8.0}},
    "stop tokens": {**GREEDY, "stop_token_ids": list(range(300, 330))},
    "sampled from the best alone": {**GREEDY, "temperature": 0.8, "top_k": 1},
}
# SGLang supports seeds in its deterministic mode only, which it refuses on a CPU.
SEEDED_SETTINGS: dict[str, dict[str, Any]] = {
    "seeded": SEEDED,
    "top-k": {**SEEDED, "temperature": 0.9, "top_k": 20},
    "top-p": {**SEEDED, "top_p": 0.8},
    "min-p": {**SEEDED, "min_p": 0.05},
    "seeded with a repetition penalty": {**SEEDED, "repetition_penalty": 1.2},
    "seeded with presence and frequency penalties": {
        **SEEDED,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "allowed tokens": {**SEEDED, "allowed_token_ids": list(range(2, 512, 3))},
    "seeded with a logit bias": {**SEEDED, "logit_bias": {7: 4.0, 11: -8.0}},
    "seeded with stop tokens": {
        "temperature": 0.6,
        "seed": 3,
        "max_tokens": 40,
        "stop_token_ids": list(range(300, 330)),
    },
    "min tokens": {
        "temperature": 0.6,
        "seed": 3,
        "max_tokens": 40,
        "min_tokens": 19,
        # V2 takes at most 128, the end of the text among them.
        "stop_token_ids": list(range(2, 400, 4)),
    },
    "several samples": {**SEEDED, "n": 3},
}
LOGPROBS = {
    "vllm": ("logprobs", "logprobs and a penalty", "seeded with logprobs"),
    "sglang": ("logprobs", "logprobs and a penalty"),
}


def cases(host: Host) -> dict[str, Case]:
    """All cases of an engine."""
    made = {name: Case(PROMPTS, setting) for name, setting in SETTINGS.items()}
    made["all in one batch"] = Case(PROMPTS, [*SETTINGS.values()] * 2)
    made["logprobs"] = Case(PROMPTS, {**GREEDY, "logprobs": 4})
    made["logprobs and a penalty"] = Case(
        PROMPTS, {**SETTINGS["presence and frequency penalties"], "logprobs": 4}
    )
    made["sampled beside greedy"] = Case(
        PROMPTS, [GREEDY if row % 2 else {**GREEDY, "temperature": 1.0} for row in range(12)]
    )
    made["drafting turned off"] = Case(PROMPTS, {**GREEDY, "extra_args": {"drafttree": False}})
    return made | (_vllm_cases() if host.name == "vllm" else _sglang_cases())


def _vllm_cases() -> dict[str, Case]:
    made = {name: Case(PROMPTS, setting) for name, setting in SEEDED_SETTINGS.items()}
    all_seeded = [{**setting, "n": 1} for setting in SEEDED_SETTINGS.values()]
    made["all seeded settings and a greedy one in one batch"] = Case(
        PROMPTS, [*all_seeded, SETTINGS["repetition penalty"]]
    )
    made["seeded with logprobs"] = Case(PROMPTS, {**SEEDED, "logprobs": 4, "prompt_logprobs": 2})
    return made


def _sglang_cases() -> dict[str, Case]:
    draw = random.Random(6)
    long = [[draw.randrange(2, 512) for _ in range(1000)] for _ in range(3)]
    return {
        "the context's end": Case(long, {**GREEDY, "max_tokens": 23}, rounds=2),
        "streamed": Case(some_prompts(8), {**GREEDY, "max_tokens": 64}, sglang={"stream": True}),
        "a custom processor": Case(PROMPTS, GREEDY, sglang={"processor": "NoEvenTokens"}),
        "a request that is aborted": Case(PROMPTS, GREEDY, sglang={"abort_after": {1: 5, 6: 11}}),
    }


UNEQUAL = (
    "sampled beside greedy",
    "drafting turned off",
    "a custom processor",
    "a request that is aborted",
)
"""Cases with a test of their own."""


def plain_answers(host: Host, model: Path) -> dict[str, Answer]:
    return answers(host, model, drafted=False, overlap=False)


SIZES: dict[str, dict[str, Any]] = {"v1": {}, "v2": {"nodes": 15}}
"""Options by vLLM's model runner: trees of 80 are large for Triton's interpreter."""


# Arguments have no defaults, because the cache tells apart calls that give and that omit one.
@cache
def answers(host: Host, model: Path, *, drafted: bool, overlap: bool) -> dict[str, Answer]:
    served, _ = host.run(
        model,
        list(cases(host).values()),
        "token-recycling" if drafted else None,
        # Cases share prompts: copies of finished answers would take the place of branches.
        {"memory": 0, **SIZES[host.runner]} if drafted else {},
        sglang={"disable_overlap_schedule": not overlap, "enable_custom_logit_processor": True},
    )
    return dict(zip(cases(host), served, strict=True))


ENGINES = [(VLLM, False), (SGLANG, False), (SGLANG, True)]
"""Each engine, and whether SGLang schedules a step while the previous one runs."""

CHAINED = (
    "presence and frequency penalties",
    "repetition penalty",
    "logprobs and a penalty",
    "seeded with a repetition penalty",
    "seeded with presence and frequency penalties",
)
"""Cases in which V2 drafts chains."""


def for_each(names: Callable[[Host], Iterable[str]]) -> pytest.MarkDecorator:
    """Parametrises a test by the engines and by some of their cases."""
    return pytest.mark.parametrize(
        ("host", "overlap", "name"),
        [
            *((host, overlap, name) for host, overlap in ENGINES for name in names(host)),
            *(
                pytest.param(VLLM_V2, False, name, marks=pytest.mark.full)
                for name in names(VLLM_V2)
            ),
        ],
        indirect=["host"],
        ids=str,
    )


engines = pytest.mark.parametrize(("host", "overlap"), ENGINES, indirect=["host"], ids=str)
sglang_alone = pytest.mark.parametrize(("host", "overlap"), ENGINES[1:], indirect=["host"], ids=str)


@for_each(lambda host: [name for name in cases(host) if name not in UNEQUAL])
def test_tokens_equal_plain_decoding(
    host: Host,
    tiny_llama: Path,
    proves_drafting: Callable[[Answer], None],
    overlap: bool,
    name: str,
) -> None:
    plain = plain_answers(host, tiny_llama)[name]
    drafted = answers(host, tiny_llama, drafted=True, overlap=overlap)[name]
    assert drafted.samples == plain.samples
    assert drafted.reasons == plain.reasons
    if host.runner == "v2" and name in CHAINED:
        assert drafted.counters["accepted_tokens"] > 0
    else:
        proves_drafting(drafted)


@for_each(lambda host: LOGPROBS[host.name])
def test_logprobs_equal_plain_decoding(
    host: Host, tiny_llama: Path, overlap: bool, name: str
) -> None:
    plain = plain_answers(host, tiny_llama)[name]
    drafted = answers(host, tiny_llama, drafted=True, overlap=overlap)[name]
    assert [len(positions) for positions in plain.chosen] == [40] * 12
    assert [len(positions) for positions in plain.logprobs] == [40] * 12
    if name == "seeded with logprobs":
        assert [len(positions) for positions in plain.prompt_logprobs] == [*map(len, PROMPTS)]
    for mine, theirs in zip(drafted.chosen, plain.chosen, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)
    for field in ("logprobs", "prompt_logprobs"):
        for mine, theirs in zip(getattr(drafted, field), getattr(plain, field), strict=True):
            for best, expected in zip(mine, theirs, strict=True):
                assert best == pytest.approx(expected, abs=1e-3)


@engines
def test_greedy_requests_beside_sampled_ones(
    host: Host, tiny_llama: Path, proves_drafting: Callable[[Answer], None], overlap: bool
) -> None:
    plain = plain_answers(host, tiny_llama)["sampled beside greedy"]
    drafted = answers(host, tiny_llama, drafted=True, overlap=overlap)["sampled beside greedy"]
    assert drafted.tokens[1::2] == plain.tokens[1::2]
    assert [len(tokens) for tokens in drafted.tokens] == [40] * 12
    proves_drafting(drafted)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        (VLLM, "drafting turned off"),
        (SGLANG, "drafting turned off"),
        (SGLANG, "a custom processor"),
    ],
    indirect=["host"],
    ids=str,
)
def test_undrafted_requests_equal_plain_decoding(host: Host, tiny_llama: Path, name: str) -> None:
    drafted = answers(host, tiny_llama, drafted=True, overlap=False)[name]
    assert drafted.tokens == plain_answers(host, tiny_llama)[name].tokens
    assert drafted.counters["draft_tokens"] == 0
    assert drafted.counters["drafted_steps"] == 0
    assert drafted.counters["steps"] == 12 * 39
    if name == "a custom processor":
        assert all(token % 2 for tokens in drafted.tokens for token in tokens)


@pytest.mark.parametrize("host", [VLLM], indirect=True, ids=str)
def test_min_tokens_hold_inside_an_accepted_path(host: Host, tiny_llama: Path) -> None:
    """Requests would end much earlier without the minimum of 19 tokens."""
    lengths = [
        len(tokens)
        for tokens in answers(host, tiny_llama, drafted=True, overlap=False)["min tokens"].tokens
    ]
    assert min(lengths) >= 19
    assert min(lengths) < 40


@sglang_alone
def test_an_abort_touches_no_other_request(host: Host, tiny_llama: Path, overlap: bool) -> None:
    name = "a request that is aborted"
    plain = plain_answers(host, tiny_llama)["greedy"].tokens
    drafted = answers(host, tiny_llama, drafted=True, overlap=overlap)[name]
    for row, tokens in enumerate(drafted.tokens):
        if row in cases(host)[name].sglang["abort_after"]:
            assert 0 < len(tokens) < 40
            assert tokens == plain[row][: len(tokens)]
        else:
            assert tokens == plain[row]


@sglang_alone
def test_no_running_request_waits_because_others_draft(
    host: Host, tiny_llama: Path, overlap: bool
) -> None:
    """Every step serves all requests: between two pieces of one come only a few of another."""
    pieces = answers(host, tiny_llama, drafted=True, overlap=overlap)["streamed"].pieces
    last = {row: len(pieces) - pieces[::-1].index(row) for row in range(8)}
    since: dict[int, Counter[int]] = {}
    for place, row in enumerate(pieces):
        for waiting, others in since.items():
            if waiting != row and place < last[waiting]:
                others[row] += 1
                assert others[row] <= 3, f"{row} had {others[row]} pieces while {waiting} waited"
        since[row] = Counter()
    assert len(since) == 8
