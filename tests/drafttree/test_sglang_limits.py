"""Trees get the size that their method declares; larger ones are truncated, with one warning."""

from __future__ import annotations

import logging

import pytest
import torch

from drafttree.sglang.limits import limit_trees, whole_trees
from drafttree.tree import DraftTree


class WideDrafter:
    """A drafter that the warning names."""


class OtherDrafter:
    """A drafter without a warning."""


def chain(num_draft_tokens: int) -> DraftTree:
    columns = torch.arange(num_draft_tokens + 1, dtype=torch.int32)[None]
    return DraftTree(columns + 5, columns - 1, torch.tensor([num_draft_tokens + 1]).int())


def test_trees_of_the_declared_size_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    trees = chain(4)
    with caplog.at_level(logging.WARNING):
        assert limit_trees(trees, 4, OtherDrafter()) is trees
    assert not caplog.records


def test_larger_trees_are_truncated_and_the_drafter_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            trees = limit_trees(chain(100), 32, WideDrafter())
            trees.check(num_draft_tokens=32)
            assert trees.tokens.tolist() == [list(range(5, 38))]
    (record,) = caplog.records
    message = record.getMessage()
    assert "WideDrafter proposes 100 draft tokens" in message
    assert "32" in message
    assert record.name.startswith("sglang.")


def test_smaller_trees_are_padded_to_the_declared_size() -> None:
    trees = whole_trees(chain(2), 4)
    trees.check(num_draft_tokens=4)
    assert trees.tokens.tolist() == [[5, 6, 7, -1, -1]]
    assert trees.parents.tolist() == [[-1, 0, 1, -1, -1]]
    assert trees.tree_size.tolist() == [3]
    assert whole_trees(trees, 4) is trees
