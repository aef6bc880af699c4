"""LoRA adapters in vLLM: each tree is verified with the adapter of its request."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import scripted_shapes
from overfitted_drafter import LENGTH, PROMPTS
from random_prompts import some_prompts
from tiny_models import make_tiny_adapter
from v2_on_cpu import LIMITS, check_runner, for_runner
from vllm_runs import Answer, Case, run_vllm, together

NAMES = ["first", "second", None]

ENGINE: dict[str, Any] = {
    "enable_lora": True,
    "max_lora_rank": 8,
    # On a CPU vLLM computes requests without an adapter with the last place of adapters: empty.
    "max_loras": 3,
    "block_size": 32,
    "num_gpu_blocks_override": 100,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "token_recycling": {"nodes": 15},
    "rsd": {"tree": "beam:3x4"},
    "lyanna": {"nodes": 12},
}

EACH_METHOD = pytest.mark.parametrize(
    ("method", "runner"),
    [
        ("token_recycling", "v1"),
        pytest.param("rsd", "v1", marks=pytest.mark.full),
        ("lyanna", "v1"),
        pytest.param("token_recycling", "v2", marks=pytest.mark.full),
        pytest.param("lyanna", "v2", marks=pytest.mark.full),
    ],
)


@pytest.fixture(scope="module")
def adapters(first_adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters of different ranks; the second one adapts the embeddings and the head too."""
    second = make_tiny_adapter(tmp_path_factory.mktemp("second"), 4, 6, vocabulary=True)
    return {"first": str(first_adapter), "second": str(second)}


@pytest.fixture(scope="module")
def serve(tiny_llama: Path, request: pytest.FixtureRequest) -> Callable[..., list[Answer]]:
    """Serves cases with a method, or without one, on one of the model runners."""
    models = {"rsd": "merged", "lyanna": "memorised"}

    def run(
        cases: list[Case],
        runner: str,
        method: str | None = None,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> list[Answer]:
        speculative = method and {"method": method, **OPTIONS[method], **options}
        if speculative and method in models:
            speculative["model"] = str(request.getfixturevalue(models[method]))
        answers, log = run_vllm(
            tiny_llama,
            cases,
            speculative or None,
            for_runner(runner) | (environment or {}),
            **(LIMITS if runner == "v2" else {}) | ENGINE,
        )
        check_runner(runner, log)
        return answers

    return run


def settings(runner: str) -> dict[str, Any]:
    """Sampling parameters; V2 runs in Triton's interpreter, for which answers are shorter."""
    return {"temperature": 0.0, "max_tokens": {"v1": LENGTH, "v2": 16}[runner], "ignore_eos": True}


def mixed(adapters: dict[str, str], runner: str) -> list[Case]:
    """Each prompt with each adapter and with none, twice and with seeds; and the first alone.

    The blocks of a prompt are cached for each of them.
    """
    prompts = some_prompts({"v1": 4, "v2": 2}[runner], longest=100, shortest=80)
    rows = [prompt for prompt in prompts for _ in NAMES]
    names = NAMES * len(prompts)
    greedy = settings(runner)
    seeded = [greedy | {"temperature": 0.7, "seed": row} for row in range(len(rows))]
    known = PROMPTS[: len(prompts) * 3]
    return [
        Case(rows, greedy, adapters=names, loads={**adapters}),
        Case(rows, greedy, adapters=names),
        Case(rows, seeded, adapters=names),
        Case(known, greedy, adapters=["first"] * len(known)),
    ]


def late(adapters: dict[str, str], runner: str) -> list[Case]:
    """An adapter is loaded, another one takes its place and is unloaded, and the first is again."""
    count = {"v1": 8, "v2": 4}[runner]
    prompts = PROMPTS[:count] + some_prompts(count, longest=60, shortest=40)
    first, second = ({"late": adapters[name]} for name in ("first", "second"))
    greedy, names = settings(runner), ["late", None] * (len(prompts) // 2)
    return [
        Case(prompts, greedy),
        Case(prompts, greedy, adapters=names, loads={**first}),
        Case(prompts, greedy, adapters=names, loads={**second}),
        Case(prompts, greedy, loads={"late": None}),
        Case(prompts, greedy, adapters=names, loads={**first}),
    ]


@pytest.fixture(scope="module")
def plain(
    adapters: dict[str, str], serve: Callable[..., list[Answer]]
) -> Callable[[Callable[..., list[Case]], str], list[Answer]]:
    """The engine's own answers to `mixed` or `late`, by model runner."""

    @cache
    def answers(cases: Callable[..., list[Case]], runner: str) -> list[Answer]:
        return serve(cases(adapters, runner), runner)

    return answers


ACCEPTED = {"token_recycling": 1.0, "rsd": 3.5, "lyanna": 2.2}
"""Tokens of a step, at least, where the drafter knows what the first adapter does."""


@EACH_METHOD
def test_requests_with_two_adapters_and_with_none(
    method: str,
    runner: str,
    adapters: dict[str, str],
    plain: Callable[..., list[Answer]],
    serve: Callable[..., list[Answer]],
    proves_drafting: Callable[[Answer], None],
) -> None:
    """RSD's draft model and Lyanna's layer run without adapters.

    The draft model has the first adapter merged into it. The layer continues the adapted hidden
    states, else its drafts would not be accepted.
    """
    drafted = serve(mixed(adapters, runner), runner, method)
    equal = [
        with_trees.tokens == without.tokens
        for with_trees, without in zip(drafted, plain(mixed, runner), strict=True)
    ]
    # A seed gives other tokens with RSD.
    assert equal == [True, True, method != "rsd", True]
    for with_trees in drafted:
        assert with_trees.counters["draft_tokens"] > 0
    for row in range(0, len(drafted[0].tokens), len(NAMES)):
        answers = drafted[0].tokens[row : row + len(NAMES)]
        assert len({tuple(samples[0]) for samples in answers}) == len(NAMES)
    assert min(each or 0 for each in drafted[1].cached) > 0
    # Drafts of a model that knows an adapter are all first children.
    proves_drafting(together(drafted))
    known = drafted[-1].counters
    assert known["emitted"] / known["steps"] > ACCEPTED[method]


@pytest.mark.full
@EACH_METHOD
def test_adapters_that_are_loaded_while_serving(
    method: str,
    runner: str,
    adapters: dict[str, str],
    plain: Callable[..., list[Answer]],
    serve: Callable[..., list[Answer]],
    proves_drafting: Callable[[Answer], None],
) -> None:
    """What is known of the answers of one that is gone is of no use for those of another.

    Lyanna rests at times, and then its layer reads several tokens of different adapters at a time.
    """
    rests = {"nodes": "auto"} if (method, runner) == ("lyanna", "v1") else {}
    environment = scripted_shapes.ENVIRONMENT if rests else {}
    drafted = serve(late(adapters, runner), runner, method, environment, **rests)
    expected = plain(late, runner)
    assert [each.tokens for each in drafted] == [each.tokens for each in expected]
    for answer in drafted:
        assert answer.counters["draft_tokens"] > 0
    proves_drafting(together(drafted))
    none, first, second, without, again = (each.tokens for each in drafted)
    assert (without, again) == (none, first)
    for row, answers in enumerate(zip(none, first, second, strict=True)):
        assert len({tuple(samples[0]) for samples in answers}) == (1 if row % 2 else 3)
