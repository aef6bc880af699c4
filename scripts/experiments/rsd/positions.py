"""Draw trees at a position in an answer, and measure them with every rule that suits them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rsd_plugin import RsdDrafter, RsdOptions
from scripts.experiments.rsd.acceptance import (
    greedy_drafting,
    k_sequential,
    recursive_rejection,
    target_draw,
)
from scripts.experiments.rsd.answers import Model, distribution
from scripts.experiments.rsd.blocks import verify_best_chain, verify_block
from scripts.experiments.rsd.drawing import (
    Drawing,
    best_tree,
    chains_of,
    greedy_beam,
    greedy_branches,
    independent_chains,
)
from scripts.experiments.rsd.rsd_expectation import (
    Acceptance,
    Children,
    Distributions,
    NodePath,
    Stop,
    expected_tokens,
    walk,
)
from scripts.experiments.rsd.shapes import BEAMS, BRANCHES, CHAINS, shape
from scripts.experiments.rsd.traversal import traversal

Rule = Callable[[Children, Distributions, Distributions], list[Stop]]
"""`(tree, target, draft) -> stops`: how a step can end."""


def walked(accept: Acceptance) -> Rule:
    """A rule that accepts one of the children of each node."""
    return lambda children, target, draft: walk(children, target, draft, accept)


def block(children: Children, target: Distributions, draft: Distributions) -> list[Stop]:
    """Block verification of a chain."""
    return verify_block(*chains_of(children), target, draft)


def best_chain(children: Children, target: Distributions, draft: Distributions) -> list[Stop]:
    """Block verification of the best of several chains."""
    return verify_best_chain(chains_of(children), target, draft)


RULES: dict[str, dict[str, Rule]] = {
    "SD": {"SD": walked(recursive_rejection), "Block": block},
    "RSD-S": {"RSD-S": walked(recursive_rejection), "Traversal-S": traversal},
    "RSD-C": {"RSD-C": walked(recursive_rejection), "Traversal-C": traversal},
    "SpecTr": {"SpecTr": walked(k_sequential), "GBV": best_chain},
    "Top-S": {"Top-S": walked(target_draw)},
    "Top-C": {"Top-C": walked(target_draw)},
    "Best": {"Best": walked(target_draw)},
    "Greedy-S": {"Greedy-S": walked(greedy_drafting)},
    "Greedy-C": {"Greedy-C": walked(greedy_drafting)},
}
"""The methods by the way in which their trees are drawn."""


class Position:
    """A position in an answer, with the draft model's distributions after the sampled nodes.

    Args:
        draft: The draft model; it has read the text before the root.
        root: The root's token.
        setting: Temperature and top-p.
        seed: Seed of the draws.
        max_nodes: Largest number of draft tokens of a tree.
    """

    def __init__(
        self, draft: Model, root: int, setting: tuple[float, float], seed: int, max_nodes: int
    ) -> None:
        self._draft = draft
        self._root = root
        self._setting = setting
        self._seed = seed
        self._max_nodes = max_nodes
        self.probs: dict[NodePath, Tensor] = {}
        self._read([()])

    def trees(self) -> dict[tuple[str, str], dict[NodePath, list[int]]]:
        """All trees by the way in which they are drawn, and by shape.

        The draft model evaluates one level of all of them at once.
        """
        drawings = {
            (kind, notation): drawing
            for notation in (*CHAINS, *BEAMS, *BRANCHES)
            if shape(notation)[0] <= self._max_nodes
            for kind, drawing in self._drawings(notation)
        }
        trees: dict[tuple[str, str], dict[NodePath, list[int]]] = {}
        while drawings:
            wanted: list[NodePath] = []
            for name, drawing in list(drawings.items()):
                try:
                    wanted += next(drawing)
                except StopIteration as done:
                    trees[name] = done.value
                    del drawings[name]
            self._read([path for path in dict.fromkeys(wanted) if path not in self.probs])
        return trees

    def _drawings(self, notation: str) -> Iterator[tuple[str, Drawing]]:
        """All ways to draw a tree of one shape."""
        probs = self.probs.__getitem__
        if notation in CHAINS:
            yield "SD", self._rsd(f"beam:1x{notation}", True)
        elif notation in BEAMS:
            width, length = map(int, notation.split("x"))
            yield "RSD-S", self._rsd(f"beam:{notation}", True)
            yield "SpecTr", independent_chains(probs, width, length, self._draw)
            yield "Top-S", self._rsd(f"beam:{notation}", False)
            yield "Best", best_tree(probs, width, length)
            yield "Greedy-S", greedy_beam(probs, width, length, self._draw)
        else:
            factors = [int(factor) for factor in notation.split("-")]
            yield "RSD-C", self._rsd(f"branch:{notation}", True)
            yield "Top-C", self._rsd(f"branch:{notation}", False)
            yield "Greedy-C", greedy_branches(probs, factors, self._draw)

    def _rsd(self, notation: str, sampled: bool) -> Drawing:
        """A tree as RSD's own drafter samples it, or chooses it without sampling."""
        options = RsdOptions(model="", tree=notation)
        nothing = torch.zeros_like(self.probs[()])
        drafter = RsdDrafter(options, len(nothing))
        root, zero = torch.tensor([self._root], dtype=torch.int32), torch.tensor([0])
        seed = torch.tensor([self._seed])
        levels = drafter.levels(zero, root, seed, zero, torch.tensor([sampled]))
        children: dict[NodePath, list[int]] = {}
        paths: list[NodePath] = [()]
        trees, first = next(levels)
        while trees.tokens.shape[1] <= options.num_draft_tokens:
            here = [path for path in paths[first:] if -1 not in path]
            yield here
            probs = torch.stack([self.probs.get(path, nothing) for path in paths[first:]])
            trees, first = levels.send(probs[None])
            tokens, parents = trees.tokens[0, first:].tolist(), trees.parents[0, first:].tolist()
            for token, parent in zip(tokens, parents, strict=True):
                paths.append((*paths[parent], token))
                if token >= 0:
                    children.setdefault(paths[parent], []).append(token)
        return children

    def _draw(self, weights: Tensor, path: NodePath, index: int) -> int:
        """A draw that all trees share, so that differences between them are more certain."""
        seed = zlib.crc32(f"{self._seed} {path} {index}".encode())
        generator = torch.Generator().manual_seed(seed)
        return int((weights / torch.empty_like(weights).exponential_(generator=generator)).argmax())

    def _read(self, paths: list[NodePath]) -> None:
        if paths:
            for path, logits in self._draft.read_nodes(self._root, paths).items():
                self.probs[path] = distribution(logits, *self._setting)


def measure(
    position: Position, target: Model, root: int, setting: tuple[float, float]
) -> dict[str, float]:
    """The expected tokens per step of every method and tree at one position."""
    trees = position.trees()
    # The leaves need no logits: exactly one token follows an accepted leaf.
    nodes = {path for children in trees.values() for path in children}
    logits = target.read_nodes(root, sorted(nodes, key=len))
    probs: dict[NodePath, Tensor] = {}

    def of_target(path: NodePath) -> Tensor:
        if path not in probs:
            probs[path] = distribution(logits[path], *setting)
        return probs[path]

    return {
        f"{method} {notation}": expected_tokens(
            rule(children, of_target, position.probs.__getitem__)
        )
        for (kind, notation), children in trees.items()
        for method, rule in RULES[kind].items()
    }
