"""The distribution of one step's outcomes for a given draft tree, as an exact sum.

It compares trees and acceptance rules without an engine. Distributions over the vocabulary are
`float [V]`, after all filters; q stands for the target's and p for the draft model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

NodePath = tuple[int, ...]
"""A node, given by the tokens on the path to it, without the root."""

Children = Mapping[NodePath, Sequence[int]]
"""The tokens of each inner node's children, in the order in which they were drawn."""

Distributions = Callable[[NodePath], Tensor]
"""The distribution after a node, `float [V]`; it sums to 1."""

Acceptance = Callable[[Tensor, Tensor, Sequence[int]], tuple[list[float], Tensor]]
"""`(target, draft, children) -> (probabilities, residual)`.

The probability that each child is accepted, and weights `float [V]` of the token that follows if
none is.
"""


@dataclass(frozen=True)
class Stop:
    """One way for a step to end: a path is accepted and one more token follows it.

    Attributes:
        path: The accepted draft tokens.
        probability: The probability that exactly this path is accepted.
        residual: Weights `float [V]` of the token that follows; None if it is drawn from the
            target's own distribution.
    """

    path: NodePath
    probability: float
    residual: Tensor | None


def expected_tokens(stops: Iterable[Stop]) -> float:
    """The expected number of tokens of one step, including the bonus token."""
    return sum(stop.probability * (len(stop.path) + 1) for stop in stops)


def walk(
    children: Children, target: Distributions, draft: Distributions, accept: Acceptance
) -> list[Stop]:
    """How a step can end if the tree is verified from its root, one node's children at a time.

    Args:
        children: The tree. A token may occur more than once among the children of a node; its
            nodes then share their descendants.
        target: The target's distribution after a node; leaves are not asked for.
        draft: The draft model's distribution after a node.
        accept: The acceptance rule.
    """
    stops: list[Stop] = []

    def below(path: NodePath, reached: float) -> None:
        tokens = children.get(path)
        if not tokens:
            stops.append(Stop(path, reached, None))
            return
        accepted, residual = accept(target(path), draft(path), tokens)
        taken: dict[int, float] = {}
        for token, probability in zip(tokens, accepted, strict=True):
            taken[token] = taken.get(token, 0.0) + probability
        rejected = 1.0 - sum(taken.values())
        if rejected > 0:
            stops.append(Stop(path, reached * rejected, residual))
        for token, probability in taken.items():
            if probability > 0:
                below((*path, token), reached * probability)

    below((), 1.0)
    return stops
