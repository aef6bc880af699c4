"""Trees drawn at a position, and measured with every rule that suits them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from scripts.experiments.rsd.answers import Model
from scripts.experiments.rsd.positions import RULES, Position, measure
from scripts.experiments.rsd.rsd_expectation import NodePath
from scripts.experiments.rsd.shapes import shape

VOCAB = 40
SETTING = (0.7, 0.9)


class Table:
    """A model whose logits follow from the last token alone."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._logits = 2 * torch.randn(VOCAB, VOCAB, generator=generator)

    def read_nodes(self, root: int, paths: list[NodePath]) -> dict[NodePath, Any]:
        return {path: self._logits[path[-1] if path else root] for path in paths}


def measured(draft: int, target: int, max_nodes: int = 10) -> dict[str, float]:
    position = Position(cast(Model, Table(draft)), 3, SETTING, 11, max_nodes)
    return measure(position, cast(Model, Table(target)), 3, SETTING)


def test_every_method_is_measured_on_trees_of_the_same_shapes() -> None:
    tokens = measured(0, 1)
    methods = {method for rules in RULES.values() for method in rules}
    assert {name.split()[0] for name in tokens} == methods
    for name, expected in tokens.items():
        nodes, length = shape(name.split()[1])
        assert nodes <= 10
        assert 1.0 <= expected <= length + 1
    for kind in ("RSD-S", "Traversal-S", "Top-S", "Best", "Greedy-S", "SpecTr", "GBV"):
        assert f"{kind} 2x5" in tokens
    for kind in ("RSD-C", "Traversal-C", "Top-C", "Greedy-C"):
        assert f"{kind} 2-2-1" in tokens


def test_the_target_accepts_its_own_drafts() -> None:
    """In a beam, the accepted child may have no descendants."""
    for name, expected in measured(0, 0).items():
        method, notation = name.split()
        if method in ("SD", "Block", "RSD-C", "Traversal-C"):
            assert expected == pytest.approx(shape(notation)[1] + 1, rel=1e-3)
        elif method in ("RSD-S", "Traversal-S"):
            assert expected > 2 - 1e-3
