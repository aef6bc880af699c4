"""The exact law of the tokens that a step emits, summed over everything that may be drawn."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from scripts.experiments.rsd.drawing import Draw, Drawing
from scripts.experiments.rsd.positions import Rule
from scripts.experiments.rsd.rsd_expectation import Children, Distributions, NodePath, Stop

Law = Iterator[tuple[float, Children]]
"""Trees with their probabilities."""

CASES = ("random", "zeros", "ties", "disjoint", "equal", "certain", "nearly disjoint")


def model(case: str, vocab: int, seed: int, draft: bool) -> Distributions:
    """Distributions after each node, float64 `[V]`, of a target or of its draft model."""
    known: dict[NodePath, Tensor] = {}

    def after(path: NodePath) -> Tensor:
        if path not in known:
            # Where the case is "equal", target and draft model are the same.
            of_draft = draft and case != "equal"
            number = zlib.crc32(repr((seed, path, of_draft)).encode())
            generator = torch.Generator().manual_seed(number)
            logits = 1.5 * torch.randn(vocab, generator=generator, dtype=torch.float64)
            places = torch.arange(vocab)
            if case == "zeros":
                logits[torch.randperm(vocab, generator=generator)[: vocab // 2]] = -torch.inf
            elif case == "ties":
                logits = logits.round().clamp(0, 1)
            elif case in ("disjoint", "nearly disjoint"):
                away = -torch.inf if case == "disjoint" else -6.0
                logits[(places < (vocab + 1) // 2) == draft] = away
            elif case == "certain":
                logits[places != int(logits.argmax())] = -torch.inf
            known[path] = logits.softmax(0)
        return known[path]

    return after


class Replay:
    """Draws that are fixed at first, and then the first token with weight.

    Args:
        fixed: The first draws.

    Attributes:
        probability: The probability of the draws made.
        others: The sequences of draws that branch off from these after the fixed ones.
    """

    def __init__(self, fixed: list[int]) -> None:
        self._fixed = fixed
        self._taken: list[int] = []
        self.probability = 1.0
        self.others: list[list[int]] = []

    def __call__(self, weights: Tensor, path: NodePath, index: int) -> int:
        choices = weights.nonzero()[:, 0].tolist()
        if len(self._taken) < len(self._fixed):
            token = self._fixed[len(self._taken)]
        else:
            token = choices[0]
            self.others += [[*self._taken, other] for other in choices[1:]]
        self._taken.append(token)
        self.probability *= float(weights[token] / weights.sum())
        return token


def every_drawing(start: Callable[[Draw], Drawing]) -> Law:
    """All trees that a drawing can return, by running it again for every sequence of draws."""
    pending: list[list[int]] = [[]]
    while pending:
        replay = Replay(pending.pop())
        drawing = start(replay)
        try:
            while True:
                next(drawing)
        except StopIteration as done:
            yield replay.probability, done.value
        pending += replay.others


def every_branching(draft: Distributions, factors: Sequence[int]) -> Law:
    """All trees of RSD-C: each node's children are drawn without replacement."""

    def below(level: list[NodePath], depth: int) -> Law:
        if depth == len(factors):
            yield 1.0, {}
            return
        families = [list(_orders(draft(path), factors[depth])) for path in level]
        for chosen in product(*families):
            here = {path: tokens for path, (_, tokens) in zip(level, chosen, strict=True)}
            probability = 1.0
            for each, _ in chosen:
                probability *= each
            nodes = [(*path, token) for path in level for token in here[path]]
            for rest, children in below(nodes, depth + 1):
                yield probability * rest, here | children

    yield from below([()], 0)


def every_beam(draft: Distributions, vocab: int, widths: Sequence[int]) -> Law:
    """All trees of RSD-S with these numbers of nodes at each level.

    Stochastic beam search keeps at each level the prefixes that appear first when whole sequences
    are drawn one after another without replacement (Kool et al., arXiv 1903.06059), among those
    whose parents were kept.
    """
    weights, length = {}, len(widths)
    for sequence in product(range(vocab), repeat=length):
        weight = 1.0
        for depth in range(length):
            weight *= float(draft(sequence[:depth])[sequence[depth]])
        if weight > 0:
            weights[sequence] = weight

    def added(children: Children, sequence: NodePath) -> Children:
        """The tree after one more sequence is drawn; unchanged if that adds no prefix."""
        for depth in range(length):
            parent, token = sequence[:depth], sequence[depth]
            if token in children.get(parent, ()):
                continue
            there = sum(len(tokens) for path, tokens in children.items() if len(path) == depth)
            if there < widths[depth]:
                children = {**children, parent: [*children.get(parent, ()), token]}
            else:
                break
        return children

    def drawn(children: Children) -> Law:
        # Draws that change nothing are left out: they do not change the odds of the others.
        outcomes: dict[str, tuple[float, Children]] = {}
        for sequence, weight in weights.items():
            after = added(children, sequence)
            if after != children:
                key = repr(sorted(after.items()))
                outcomes[key] = (outcomes.get(key, (0.0,))[0] + weight, after)
        if not outcomes:
            yield 1.0, children
        total = sum(weight for weight, _ in outcomes.values())
        for weight, after in outcomes.values():
            for probability, tree in drawn(after):
                yield weight / total * probability, tree

    yield from drawn({})


def _orders(p: Tensor, count: int) -> Iterator[tuple[float, list[int]]]:
    """All ordered draws of tokens without replacement, with their probabilities."""
    if count == 0 or float(p.sum()) <= 0:
        yield 1.0, []
        return
    for token in p.nonzero()[:, 0].tolist():
        rest = p.clone()
        rest[token] = 0.0
        for probability, tokens in _orders(rest, count - 1):
            yield float(p[token] / p.sum()) * probability, [token, *tokens]


def depth_of(children: Children) -> int:
    """The number of levels below the root."""
    return 1 + max(map(len, children))


def autoregressive(target: Distributions, vocab: int, length: int, after: NodePath = ()) -> Tensor:
    """The law of the target's next tokens after a node, float64 `[V] * length`."""
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    following = [
        autoregressive(target, vocab, length - 1, (*after, token)) for token in range(vocab)
    ]
    return torch.stack([p * law for p, law in zip(target(after), following, strict=True)])


def emitted(
    law: Law,
    verify: Callable[[Children], list[Stop]],
    target: Distributions,
    vocab: int,
    length: int,
) -> Tensor:
    """The law of the next tokens if a step emits the first of them, and the target the rest.

    Args:
        law: The trees, with their probabilities.
        verify: How a step can end for a tree.
        target: The target's distribution after a node.
        vocab: Number of tokens.
        length: Number of tokens, more than a tree has levels.

    Returns:
        Float64 `[V] * length`.
    """
    total = torch.zeros([vocab] * length, dtype=torch.float64)
    known: dict[NodePath, Tensor] = {}
    for drawn, children in law:
        for stop in verify(children):
            share = drawn * stop.probability
            if share == 0:
                continue
            residual = target(stop.path) if stop.residual is None else stop.residual
            if float(residual.sum()) == 0:
                # The stop is impossible, but for rounding.
                assert share < 1e-12
                continue
            for token, weight in enumerate((residual / residual.sum()).tolist()):
                path = (*stop.path, token)
                if path not in known:
                    known[path] = autoregressive(target, vocab, length - len(path), path)
                total[path] += share * weight * known[path]
    return total


def error(case: str, law: Callable[[Distributions], Law], verify: Rule, vocab: int) -> float:
    """The largest difference between the law of the emitted tokens and the target's.

    Args:
        case: One of `CASES`.
        law: How trees are drawn from the draft model.
        verify: How they are verified.
        vocab: Number of tokens.
    """
    target = model(case, vocab, 0, draft=False)
    draft = model(case, vocab, 0, draft=True)
    trees = list(law(draft))
    assert sum(probability for probability, _ in trees) == pytest.approx(1.0, abs=1e-12)
    length = 1 + max(depth_of(children) for _, children in trees)
    found = emitted(trees, lambda children: verify(children, target, draft), target, vocab, length)
    wanted = autoregressive(target, vocab, length)
    return float((found - wanted).abs().max())
