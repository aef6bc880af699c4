"""The results file of the replay: one run per line, found again by its conditions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.experiments.common import Replayed, figures, resampled_sums
from scripts.experiments.token_recycling.recycling_variants import current_name

CONDITIONS = (
    *("setting", "nodes", "model", "dtype", "prompts", "limit", "max_new_tokens", "start"),
    *("primed", "kind", "wave", "batch", "foreign"),
)
"""The keys that identify a run in a results file; the other keys are results."""

# Runs from before there were other workloads do not have these keys.
_DEFAULTS = {"kind": "prompts", "wave": 1, "batch": 1, "foreign": 0}


Run = dict[str, Any]


def read_runs(file: Path) -> list[Run]:
    """The runs of a results file, with the present names of settings and all conditions."""
    runs: list[Run] = json.loads(file.read_text())
    return [{**_DEFAULTS, **run, "setting": current_name(run["setting"])} for run in runs]


def with_errors(counts: Mapping[int, Sequence[Replayed]], categories: Sequence[str]) -> Run:
    """The figures of the chats that were replayed so far.

    Args:
        counts: The counts of each chat's requests, by the chat's index.
        categories: The category of each chat.
    """
    chats = {number: _sum(counts[number]) for number in sorted(counts)}
    by_category: dict[str, list[Replayed]] = {}
    for number, count in chats.items():
        by_category.setdefault(categories[number], []).append(count)
    return {
        **figures(list(chats.values())),
        "prompts_done": len(chats),
        "tokens": sum(each.tokens for each in chats.values()),
        "categories": {
            name: round(sum(each.tokens for each in some) / sum(each.steps for each in some), 4)
            for name, some in by_category.items()
        },
        "by_prompt": [[each.steps, each.tokens] for each in chats.values()],
    }


def _sum(counts: Sequence[Replayed]) -> Replayed:
    return Replayed(
        steps=sum(each.steps for each in counts),
        tokens=sum(each.tokens for each in counts),
        draft_tokens=sum(each.draft_tokens for each in counts),
    )


def gain(run: Run, base: Run) -> tuple[float, float]:
    """The gain in tokens per step over a baseline run, and its standard error by a paired bootstrap
    over the prompts."""
    counts = torch.tensor([run["by_prompt"], base["by_prompt"]]).double()
    sums = resampled_sums(counts.transpose(0, 1))
    rates = sums[..., 1] / sums[..., 0]
    difference = run["mean_accepted_tokens"] - base["mean_accepted_tokens"]
    return difference, float((rates[:, 0] - rates[:, 1]).std())


class Results:
    """The runs of a results file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        runs = read_runs(file) if file.exists() else []
        self._runs = {tuple(run[name] for name in CONDITIONS): run for run in runs}

    def prompts_done(self, conditions: dict[str, Any]) -> int:
        """Number of prompts that the run under these conditions has finished."""
        found = self._runs.get(tuple(conditions[name] for name in CONDITIONS), {})
        return int(found.get("prompts_done", 0))

    def put(self, conditions: dict[str, Any], found: dict[str, Any]) -> None:
        """Add or update a run."""
        self._runs[tuple(conditions[name] for name in CONDITIONS)] = {**conditions, **found}

    def write(self) -> None:
        """Write the file atomically, with one run per line."""
        part = self._file.with_suffix(".part")
        lines = ",\n".join(json.dumps(run) for run in self._runs.values())
        part.write_text(f"[\n{lines}\n]\n")
        part.replace(self._file)
