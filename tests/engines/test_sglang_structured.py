"""In SGLang too, requests with structured output are drafted for, with plain decoding's answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structured_answers
from random_prompts import some_prompts
from scipy.stats import chi2_contingency
from sglang_runs import Answer, Case, RunFailed, run_sglang
from structured_answers import (
    check_form,
    make_drafter,
    make_model,
    text_of,
)
from tiny_models import make_first_layers

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 90}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 90}
GRAMMARS = structured_answers.GRAMMARS["sglang"]
SERVER: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "grammar_backend": "xgrammar",
    "constrained_json_disable_any_whitespace": True,
    "max_running_requests": 6,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bytes"))


def bound_case(settings: list[dict[str, Any]], **case: Any) -> Case:
    """One request for each grammar and setting, and one without a grammar."""
    sampling = [setting | grammar for grammar in [*GRAMMARS.values(), {}] for setting in settings]
    return Case(some_prompts(len(sampling), 3, 40), sampling, **case)


def check_forms(case: Case, answer: Answer) -> int:
    """Check the answers of `bound_case` that have ended by themselves; returns how many have."""
    each = len(case.prompts) // (1 + len(GRAMMARS))
    ended = 0
    for row, kind in enumerate(kind for kind in GRAMMARS for _ in range(each)):
        if answer.reasons[row] == "stop":
            check_form(kind, text_of(answer.tokens[row]))
            ended += 1
    return ended


IN_TIME = {"disable_overlap_schedule": True}
"""For plain decoding: else SGLang applies penalties to requests with a grammar one token late."""

CASES = [bound_case([GREEDY, GREEDY | {"repetition_penalty": 1.2}]), bound_case([GREEDY], rounds=2)]
"""SGLang has no seeds on a CPU."""


@pytest.fixture(scope="module")
def plain(model: Path) -> list[Answer]:
    answers, _ = run_sglang(model, CASES, drafted=False, **SERVER, **IN_TIME)
    return answers


@pytest.mark.parametrize(
    "overlap", [False, pytest.param(True, marks=pytest.mark.full)], ids="overlap={}".format
)
def test_answers_equal_plain_decoding(
    overlap: bool, model: Path, plain: list[Answer], proves_drafting: Callable[[Answer], None]
) -> None:
    """All kinds of grammar beside requests without one."""
    cases = [*CASES, bound_case([SAMPLED], rounds=2)]
    drafted, log = run_sglang(
        model, cases, {"nodes": 15}, **SERVER, disable_overlap_schedule=not overlap
    )
    for without, with_trees in zip(plain, drafted[:2], strict=True):
        assert with_trees.tokens == without.tokens
        assert with_trees.reasons == without.reasons
    for case, answer in zip(cases, drafted, strict=True):
        proves_drafting(answer)
        assert check_forms(case, answer) >= 4
    assert "served without drafts" not in log


@pytest.mark.full
@pytest.mark.parametrize("method", ["rsd", "lyanna"])
def test_trees_that_are_verified_as_they_are(
    method: str, model: Path, plain: list[Answer], tmp_path: Path
) -> None:
    drafter, options = make_drafter(method, model, tmp_path)
    drafted, log = run_sglang(model, CASES, options, method=method, draft_model=drafter, **SERVER)
    for case, without, with_trees in zip(CASES, plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        assert check_forms(case, with_trees) >= 4
        assert with_trees.counters["accepted_tokens"] > 0
    assert "served without drafts" not in log


@pytest.mark.full
def test_llguidance(model: Path) -> None:
    kinds = ["a schema", "a regex", "choices"]
    settings = (GREEDY, GREEDY | {"repetition_penalty": 1.2})
    sampling = [setting | GRAMMARS[kind] for kind in kinds for setting in settings]
    case = Case(some_prompts(len(sampling), 3, 40), sampling, rounds=2)
    server = SERVER | {"grammar_backend": "llguidance"}
    (without,), _ = run_sglang(model, [case], drafted=False, **server, **IN_TIME)
    (with_trees,), log = run_sglang(model, [case], {"nodes": 15, "memory": 0}, **server)
    assert with_trees.tokens == without.tokens
    assert with_trees.counters["accepted_tokens"] > with_trees.counters["steps"] / 2
    assert "served without drafts" not in log


@pytest.mark.full
def test_the_masks_of_roots_are_not_enough(model: Path) -> None:
    """Negative control: each node gets the mask of its root, and SGLang finds a forbidden token."""
    with pytest.raises(RunFailed, match="Grammar accept_token failed"):
        run_sglang(model, CASES, {"nodes": 15}, planted_fault="root's grammar", **SERVER)


LETTERS = {"temperature": 1.5, "max_new_tokens": 8, "regex": "[A-Za-z]{2}(yes|no)"}


@pytest.mark.full
@pytest.mark.parametrize("method", ["token-recycling", "rsd"])
def test_samples_follow_the_distribution(method: str, model: Path, tmp_path: Path) -> None:
    """That of plain decoding, of the answers that a grammar allows."""
    case = Case([[5, 9, 30]] * 4000, LETTERS)
    server = SERVER | {"max_running_requests": 64, "log_level": "error"}
    (without,), _ = run_sglang(model, [case], drafted=False, **server)
    rsd = method == "rsd"
    (with_trees,), _ = run_sglang(
        model,
        [case],
        {"tree": "branch:2-2"} if rsd else {"nodes": 40, "memory": 0},
        method=method,
        draft_model=make_first_layers(model, tmp_path / "draft", 1) if rsd else None,
        **server,
    )
    assert with_trees.counters["accepted_tokens"] > 0
    assert with_trees.counters["non_first_child_accepted"] > 0
    # The second letter, which is sampled after a draft or a root, and the third.
    counts = [Counter(tuple(each[1:3]) for each in run.tokens) for run in (without, with_trees)]
    both = counts[0] + counts[1]
    common = [letters for letters, count in both.items() if count >= 20]
    assert len(common) > 20
    table = [[each[letters] for letters in common] for each in counts]
    assert chi2_contingency(table).pvalue > 0.001
