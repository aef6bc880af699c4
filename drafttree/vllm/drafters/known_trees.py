"""Trees that are drafted before their step, without the drafter's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from drafttree.transfer import on_device
from drafttree.tree import NO_TOKEN, DraftTree


@dataclass(frozen=True)
class KnownTrees:
    """The trees of a batch, which may have changed when the step comes.

    Attributes:
        names: The requests, in the order of the trees.
        trees: Their trees.
    """

    names: Sequence[str]
    trees: DraftTree

    def of_batch(self, names: Sequence[str], roots: torch.Tensor) -> DraftTree:
        """The trees of the batch of a step; roots alone for requests that have none.

        Args:
            names: The requests of the step.
            roots: Their last tokens, `int32 [B]`.
        """
        trees = self.trees
        if names != self.names:
            row_of = {name: row for row, name in enumerate(self.names)}
            rows = np.array([row_of.get(name, -1) for name in names], np.int64)
            places = on_device(rows, roots.device)
            absent = (places < 0)[:, None]
            tokens, parents = (
                each[places].masked_fill(absent, NO_TOKEN) for each in (trees.tokens, trees.parents)
            )
            trees = DraftTree(tokens, parents, trees.tree_size[places])
        return trees.rooted(roots)
