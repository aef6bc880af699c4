"""Figures by wave, for runs that ask all prompts several times in one repetition.

Within a repetition the engines keep their state from wave to wave, so a later wave shows what a
method has remembered of the earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from drafttree.bench.report import Repetition, Verdict, figures, figures_by_category


def wave_figures(
    repetitions: Sequence[Repetition],
    verdicts: Sequence[Verdict],
    categories: Sequence[str],
    counters: Sequence[Mapping[str, int]],
) -> list[dict[str, Any]]:
    """The figures of each wave.

    Args:
        repetitions: All repetitions, each with the answers of all waves in order.
        verdicts: For each prompt of all waves, how the two sides' answers compare.
        categories: For each prompt of one wave, its category.
        counters: The method's counters at the end of each wave of the first repetition; empty for a
            method that drafts no trees.

    Returns:
        For each wave, the figures of its prompts, and under `per_category` those of the prompts of
        each category; with counters also `drafts_per_step`, the draft tokens of a request in a step
        with drafts, and `drafted_share`, the share of such steps.
    """
    size = len(categories)
    found = []
    for first in range(0, len(verdicts), size):
        chosen = range(first, first + size)
        kinds = dict(zip(chosen, categories, strict=True))
        found.append(
            {
                **figures(repetitions, verdicts, chosen),
                "per_category": figures_by_category(repetitions, verdicts, kinds),
            }
        )
    for each, (before, after) in zip(found, pairwise([{}, *counters]), strict=bool(counters)):
        grown = {name: count - before.get(name, 0) for name, count in after.items()}
        each["drafts_per_step"] = grown["draft_tokens"] / max(grown["drafted_steps"], 1)
        each["drafted_share"] = grown["drafted_steps"] / max(grown["steps"], 1)
    return found
