"""Traversal verification: a tree verified from its leaves to its root (arXiv 2505.12398)."""

from __future__ import annotations

from tree_kernels.traversal import trials

from scripts.experiments.rsd.rsd_expectation import Children, Distributions, NodePath, Stop


def traversal(children: Children, target: Distributions, draft: Distributions) -> list[Stop]:
    """How a step can end under traversal verification, by the rule that the engines use.

    What is tried next is certain, so the distribution of the step is one list.

    Args:
        children: The tree, with children in the order in which they were drawn.
        target: The target's distribution after a node; leaves are not asked for.
        draft: The draft model's distribution after a node.
    """
    paths: list[NodePath] = [()]
    tokens, parents = [0], [-1]
    for parent, path in enumerate(paths):  # grows meanwhile
        for token in children.get(path, ()):
            paths.append((*path, token))
            tokens.append(token)
            parents.append(parent)
    stops: list[Stop] = []
    reached = 1.0
    for trial in trials(
        tokens, parents, lambda node: target(paths[node]), lambda node: draft(paths[node])
    ):
        if reached * trial.weight > 0:
            stops.append(Stop(paths[trial.node], reached * trial.weight, trial.residual))
        reached *= 1.0 - trial.weight
    return stops
