"""Prompts of random tokens for the tiny models, the same in every run."""

from __future__ import annotations

import random


def some_prompts(
    count: int, seed: int = 3, longest: int = 60, shortest: int = 4
) -> list[list[int]]:
    """Prompts of `shortest` to `longest` - 1 tokens out of 512."""
    draw = random.Random(seed)
    return [
        [draw.randrange(2, 512) for _ in range(draw.randrange(shortest, longest))]
        for _ in range(count)
    ]


def diverging_prompts(length: int, positions: list[int], seed: int = 6) -> list[list[int]]:
    """A prompt of `length` tokens, and others that diverge from it at `positions`."""
    draw = random.Random(seed)
    first = [draw.randrange(2, 512) for _ in range(length)]
    others = [
        first[:position]
        + [(first[position] + 1) % 512]
        + [draw.randrange(2, 512) for _ in range(length - position - 1)]
        for position in positions
    ]
    return [first, *others]
