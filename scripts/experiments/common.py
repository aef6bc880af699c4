"""Shared by the experiments: counts of replayed decoding, their figures, and Markdown tables.

Experiments run from the root of the repository: `python -m scripts.experiments.METHOD.SCRIPT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import typer


@dataclass(frozen=True)
class Replayed:
    """The step and token counts of one decoded text.

    Attributes:
        steps: Number of decode steps, without the prompt's forward.
        tokens: Number of tokens that these steps emitted.
        draft_tokens: Number of draft tokens that were verified.
    """

    steps: int
    tokens: int
    draft_tokens: int


def figures(replayed: Sequence[Replayed]) -> dict[str, float]:
    """Mean tokens per step with its standard error, and mean draft tokens per step."""
    counts = torch.tensor([(each.tokens, each.steps) for each in replayed]).double()
    sums = resampled_sums(counts)
    steps = int(counts[:, 1].sum())
    return {
        "mean_accepted_tokens": float(counts[:, 0].sum()) / steps,
        "standard_error": float((sums[:, 0] / sums[:, 1]).std()),
        "nodes_a_step": sum(each.draft_tokens for each in replayed) / steps,
        "steps": steps,
    }


def resampled_sums(counts: torch.Tensor) -> torch.Tensor:
    """Sums of `counts [P, ...]` over prompts drawn with replacement, `[1000, ...]` (bootstrap)."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(counts), (1000, len(counts)), generator=generator)
    return counts[draws].sum(1)


def row(*cells: str) -> None:
    """Print a row of a Markdown table."""
    typer.echo(f"| {' | '.join(cells)} |")


def heading(*cells: str) -> None:
    """Print the first two rows of a Markdown table, after an empty line."""
    typer.echo("")
    row(*cells)
    row(*["---"] * len(cells))
