"""Counts the rows that a drafter's own layers read while they draft in vLLM's steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

VARIABLE = "TESTS_DRAFT_ROWS"

ENVIRONMENT = {VARIABLE: "1"}

_LINE = "rows of a step, its requests, and rows of its draft forwards: "


def enable() -> None:
    """Print the rows of each step, and those of each forward that drafts in it."""
    from drafttree.vllm.drafters import draft_model, hidden_state
    from drafttree.vllm.drafters.draft_layer import DraftLayer
    from drafttree.vllm.v2 import draft_model as draft_model_v2
    from drafttree.vllm.v2 import hidden_state as hidden_state_v2

    forwards: list[int] = []
    load, attend = draft_model.load_draft_model, DraftLayer.attend

    def load_and_count(*args: Any) -> Any:
        model = load(*args)

        def count(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
            forwards.append(len(kwargs["input_ids"]))

        model.register_forward_pre_hook(count, with_kwargs=True)
        return model

    def attend_and_count(self: Any, q: Any, *args: Any) -> Any:
        forwards.append(len(q))
        return attend(self, q, *args)

    def printing(draft: Callable[..., Any], counts: Callable[[Any, Any], list[int]]) -> Any:
        def draft_and_print(self: Any, step: Any, given: Any) -> Any:
            forwards.clear()
            drafted = draft(self, step, given)
            print(_LINE + json.dumps([*counts(self, step), forwards]), flush=True)
            return drafted

        return draft_and_print

    def of_v1(runner: Any, _: Any) -> list[int]:
        requests = runner.input_batch.num_reqs
        return [int(runner.query_start_loc.np[requests]), requests]

    def of_v2(_: Any, batch: Any) -> list[int]:
        return [batch.num_tokens, batch.num_reqs]

    DraftLayer.attend = attend_and_count  # type: ignore[method-assign]
    for module in (draft_model, draft_model_v2):
        module.load_draft_model = load_and_count
    for runner in (draft_model.DraftModelRunner, hidden_state.HiddenStateRunner):
        runner._draft = printing(runner._draft, of_v1)  # type: ignore[method-assign]
    for runner_v2 in (draft_model_v2.DraftModelRunnerV2, hidden_state_v2.HiddenStateRunnerV2):
        runner_v2.draft = printing(runner_v2.draft, of_v2)  # type: ignore[method-assign]


def counted(log: str) -> list[tuple[int, int, list[int]]]:
    """For each step its rows, the number of its requests, and the rows of each forward."""
    lines = [line for line in log.splitlines() if line.startswith(_LINE)]
    return [tuple(json.loads(line.removeprefix(_LINE))) for line in lines]


def check_levels(log: str, widths: list[int]) -> None:
    """Check that a draft model read each row of a step once, prompts beside trees included.

    Args:
        log: The log of an engine.
        widths: Number of nodes at each level of a tree below its root.
    """
    steps = counted(log)
    assert steps
    for rows, _, forwards in steps:
        assert sum(forwards) == rows
    # One whole tree beside a prompt with more tokens.
    beside = [(rows, requests) for rows, requests, forwards in steps if forwards[1:] == widths]
    assert any(requests > 1 and rows > 3 * sum(widths) for rows, requests in beside)


def check_chains(log: str, steps_ahead: int) -> None:
    """Check that a drafter's layer read one row of each request in each step ahead.

    Args:
        log: The log of an engine.
        steps_ahead: Greatest number of steps that the layer takes to draft.
    """
    drafted = [each for each in counted(log) if each[2]]
    for _, requests, forwards in drafted:
        assert {*forwards} == {requests}
    # Trees beside a prompt.
    assert any(rows > 60 and len(forwards) == steps_ahead for rows, _, forwards in drafted)
