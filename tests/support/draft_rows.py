"""Counts the rows that a draft model reads in each step of vLLM's V1 model runner."""

from __future__ import annotations

import json
from typing import Any

VARIABLE = "TESTS_DRAFT_ROWS"

ENVIRONMENT = {VARIABLE: "1"}

_LINE = "rows of a step and of its draft forwards: "


def enable() -> None:
    """Print the rows of each step, and those of each forward of the draft model in it."""
    from drafttree.vllm.drafters import draft_model

    load, draft = draft_model.load_draft_model, draft_model.DraftModelRunner._draft
    forwards: list[int] = []

    def load_and_count(*args: Any) -> Any:
        model = load(*args)

        def count(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
            forwards.append(len(kwargs["input_ids"]))

        model.register_forward_pre_hook(count, with_kwargs=True)
        return model

    def draft_and_print(self: Any, step: Any, roots: Any) -> Any:
        forwards.clear()
        drafts = draft(self, step, roots)
        rows = int(self.query_start_loc.np[self.input_batch.num_reqs])
        print(_LINE + json.dumps([rows, forwards]), flush=True)
        return drafts

    draft_model.load_draft_model = load_and_count
    draft_model.DraftModelRunner._draft = draft_and_print  # type: ignore[method-assign]


def counted(log: str) -> list[tuple[int, list[int]]]:
    """For each step its rows, and the rows of each forward of the draft model."""
    lines = [line for line in log.splitlines() if line.startswith(_LINE)]
    return [tuple(json.loads(line.removeprefix(_LINE))) for line in lines]
