"""The shapes of the draft trees that are compared."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

BEAMS = (
    *("2x2", "3x2", "3x3", "4x3", "5x3", "5x4", "7x4", "6x5", "12x5", "2x5", "3x5"),
    *("2x3", "5x2", "2x7", "7x2", "3x7", "7x3", "5x6"),
)
"""The paper's trees of RSD-S (appendix D.3): lengths 2 to 5 and sizes 6 to 30, and three more."""

BRANCHES = (
    *("2-2", "2-1", "3-1", "2-2-2", "3-1-1", "4-1-1", "3-2-1", "2-1-1", "2-2-1", "5-1", "7-1"),
    *("2-2-2-2", "5-1-1-1", "7-1-1-1", "2-1-1-1-1", "2-2-1-1-1", "2-2-2-2-2"),
    *("6-1-1-1-1", "12-1-1-1-1", "2-1-1-1-1-1-1", "3-1-1-1-1-1-1", "3-2-2", "7-1-1"),
    "5-1-1-1-1-1",
)
"""The paper's trees of RSD-C for the same lengths and sizes."""

CHAINS = ("2", "3", "4", "5", "6", "10", "14", "21", "30")
"""Lengths of ordinary speculative sampling."""

LENGTHS = {
    2: (("2x2", "3x2"), ("2-2", "2-1", "3-1")),
    3: (("3x3", "4x3"), ("2-2-2", "3-1-1", "4-1-1")),
    4: (("5x4", "7x4"), ("2-2-2-2", "5-1-1-1", "7-1-1-1")),
    5: (("6x5", "12x5"), ("2-2-2-2-2", "6-1-1-1-1", "12-1-1-1-1")),
}
"""The paper's trees of equal length (appendix D.3.1): beams, and branching factors."""

BUDGETS = {
    6: (("2x3", "3x2"), ("2-1-1", "2-2", "3-1")),
    10: (("2x5", "5x2"), ("2-1-1-1-1", "2-2-1", "5-1")),
    14: (("2x7", "7x2"), ("2-1-1-1-1-1-1", "2-2-2", "7-1")),
    21: (("3x7", "7x3"), ("3-1-1-1-1-1-1", "3-2-2", "7-1-1")),
    30: (("5x6", "6x5"), ("2-2-2-2", "5-1-1-1-1-1", "6-1-1-1-1")),
}
"""The paper's trees of equal size (appendix D.3.2); the chains of SD have the same size."""


def shape(notation: str) -> tuple[int, int]:
    """The number of draft tokens and the length of a tree."""
    if "x" in notation:
        width, length = map(int, notation.split("x"))
        return width * length, length
    if "-" in notation:
        factors = [int(factor) for factor in notation.split("-")]
        return sum(accumulate(factors, mul)), len(factors)
    return int(notation), int(notation)
