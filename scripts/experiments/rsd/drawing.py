"""Trees other than RSD's, drawn or chosen level by level.

Each is a generator. It yields the nodes whose distributions it needs next, in the draft model's
`probs`, and returns the children of the inner nodes in the order that the acceptance rules expect.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from scripts.experiments.rsd.rsd_expectation import Children, Distributions, NodePath

Drawing = Generator[list[NodePath], None, dict[NodePath, list[int]]]

Draw = Callable[[Tensor, NodePath, int], int]
"""`(weights, node, index) -> token`: a draw from weights `float [V]` for the child `index` of a
node."""


def independent_chains(probs: Distributions, width: int, length: int, draw: Draw) -> Drawing:
    """Chains drawn independently, as in SpecTr; equal prefixes share their nodes."""
    chains: list[NodePath] = [()] * width
    children: dict[NodePath, list[int]] = {}
    for _ in range(length):
        yield chains
        for i, path in enumerate(chains):
            token = draw(probs(path), path, i)
            children.setdefault(path, []).append(token)
            chains[i] = (*path, token)
    return children


def chains_of(children: Children) -> list[NodePath]:
    """The chains of a tree of `independent_chains`, as many times as they were drawn."""
    chains: list[NodePath] = [()] * len(children[()])
    used: dict[NodePath, int] = {}
    # A node's children are in the order of the chains that they belong to.
    while chains[0] in children:
        longer = []
        for path in chains:
            used[path] = used.get(path, -1) + 1
            longer.append((*path, children[path][used[path]]))
        chains = longer
    return chains


def greedy_branches(probs: Distributions, factors: Sequence[int], draw: Draw) -> Drawing:
    """Greedy draft sampling with a fixed number of children per level (arXiv 2502.18779)."""
    level: list[NodePath] = [()]
    children: dict[NodePath, list[int]] = {}
    for factor in factors:
        yield level
        for path in level:
            children[path] = greedy_children(probs(path), factor, draw, path)
        level = [(*path, token) for path in level for token in children[path]]
    return children


def greedy_beam(probs: Distributions, width: int, length: int, draw: Draw) -> Drawing:
    """Greedy draft sampling with `width` nodes per level.

    How many children a node gets follows from the most likely continuations of the level, before
    any is drawn, so the rule for greedy drafting stays lossless. A chosen child is worth its
    probability; a drawn one is worth the mass of all tokens that it was drawn from.
    """
    level: dict[NodePath, float] = {(): 1.0}
    children: dict[NodePath, list[int]] = {}
    for _ in range(length):
        yield list(level)
        below: dict[NodePath, float] = {}
        for path, count in _kept(probs, level, width).items():
            p = probs(path)
            children[path] = greedy_children(p, count, draw, path)
            *chosen, drawn = children[path]
            masses = p[chosen].tolist()
            below |= {
                (*path, token): level[path] * mass
                for token, mass in zip(chosen, masses, strict=True)
            }
            below[(*path, drawn)] = level[path] * max(0.0, 1.0 - sum(masses))
        level = below
    return children


def greedy_children(p: Tensor, count: int, draw: Draw, path: NodePath) -> list[int]:
    """The `count - 1` most likely tokens, and one drawn from the others."""
    count = min(count, int((p > 0).sum()))
    chosen: list[int] = p.topk(count - 1).indices.tolist()
    rest = p.clone()
    rest[chosen] = 0.0
    return [*chosen, draw(rest, path, 0)]


def best_tree(probs: Distributions, width: int, length: int) -> Drawing:
    """The `width * length` most likely nodes among the children of each level's `width` best.

    This is how EAGLE-2 chooses its tree (arXiv 2406.16858, section 4).
    """
    level: dict[NodePath, float] = {(): 1.0}
    ranked: list[tuple[float, int, NodePath]] = []
    for depth in range(length):
        yield list(level)
        below: dict[NodePath, float] = {}
        for path, likelihood in level.items():
            p = probs(path)
            top = p.topk(min(width * length, len(p)))
            below |= {
                (*path, token): likelihood * min(1.0, probability)
                for token, probability in zip(
                    top.indices.tolist(), top.values.tolist(), strict=True
                )
                if probability > 0
            }
        # A child is never more likely than its parent, and comes after it if it is as likely.
        ranked += [(-likelihood, depth, path) for path, likelihood in below.items()]
        best = sorted(below, key=below.__getitem__, reverse=True)[:width]
        level = {path: below[path] for path in best}
    children: dict[NodePath, list[int]] = {}
    for _, _, path in sorted(ranked)[: width * length]:
        children.setdefault(path[:-1], []).append(path[-1])
    return children


def _kept(probs: Distributions, level: dict[NodePath, float], width: int) -> dict[NodePath, int]:
    """The number of each node's children among the `width` most likely of a level."""
    pairs = []
    for path, worth in level.items():
        top = probs(path).topk(min(width, len(probs(path)))).values.tolist()
        pairs += [(worth * probability, path) for probability in top if probability > 0]
    counts: dict[NodePath, int] = {}
    for _, path in sorted(pairs, key=lambda pair: pair[0], reverse=True)[:width]:
        counts[path] = counts.get(path, 0) + 1
    return counts
