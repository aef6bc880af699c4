"""What was accepted lately, by level and rank, and what trees are expected to emit by it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttree.budget.draft_times import DraftTimes
from drafttree.budget.level_acceptance import NO_DRAFTS, LevelAcceptance
from drafttree.tree import DraftTree, StaticTree, Verified
from drafttree.tree_shape import TreeShape

WIDE = StaticTree.from_branching((3, 1))
SHAPE = TreeShape(2, 3, 6)


def outcome(tree: StaticTree, *paths: list[int]) -> tuple[DraftTree, Verified]:
    parents = torch.tensor(tree.parents, dtype=torch.int32).expand(len(paths), -1)
    sizes = torch.full((len(paths),), tree.tree_size, dtype=torch.int32)
    trees = DraftTree(torch.ones_like(parents), parents, sizes)
    path = torch.tensor(paths, dtype=torch.int32)
    return trees, Verified(path, path, (path >= 0).sum(1).int())


def test_probabilities_are_those_of_levels_and_ranks() -> None:
    acceptance = LevelAcceptance(2, 3)
    # Columns 1 to 3 are the root's children, 4 to 6 theirs.
    steps = [[0, 1, 4], [0, 1, -1], [0, 3, 6], [0, -1, -1]]
    for _ in range(300):
        acceptance.add(SHAPE, *outcome(WIDE, *steps))
        acceptance.pass_step()
    first, second = acceptance.chances()
    np.testing.assert_allclose(first, [0.5, 0, 0.25], atol=0.01)
    np.testing.assert_allclose(second, [2 / 3, 0, 0], atol=0.01)
    expected = acceptance.expected_tokens([NO_DRAFTS, TreeShape(1, 1, 1), SHAPE])
    np.testing.assert_allclose(expected, [1, 1.5, 1 + 0.75 + 0.75 * 2 / 3], atol=0.02)


def test_levels_that_a_tree_does_not_have_count_for_nothing() -> None:
    acceptance = LevelAcceptance(2, 3)
    before = acceptance.chances()[1].copy()
    cut = StaticTree.from_branching((3,))
    acceptance.add(SHAPE, *outcome(cut, [0, -1, -1], [0, 1, -1]))
    first, second = acceptance.chances()
    assert first[0] < before[0]
    assert acceptance.evidence == pytest.approx(2.0)
    # The second level knows no outcome, so it is the level above.
    np.testing.assert_allclose(second, first)


def test_evidence_is_forgotten_while_nothing_is_drafted() -> None:
    acceptance = LevelAcceptance(2, 3)
    prior = acceptance.chances()
    for _ in range(50):
        acceptance.add(SHAPE, *outcome(WIDE, [0, -1, -1]))
        acceptance.pass_step()
    known = acceptance.chances()
    assert known[0, 0] < 0.1
    for _ in range(2500):
        acceptance.pass_step()
    np.testing.assert_allclose(acceptance.chances(), prior, atol=0.01)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_larger_shapes_are_never_expected_to_emit_less(data: st.DataObject) -> None:
    acceptance = LevelAcceptance(2, 3)
    for _ in range(data.draw(st.integers(0, 5))):
        paths = data.draw(
            st.lists(
                st.sampled_from([[0, 1, 4], [0, 2, 5], [0, 3, -1], [0, -1, -1]]),
                min_size=1,
                max_size=4,
            )
        )
        acceptance.add(SHAPE, *outcome(WIDE, *paths))
        acceptance.pass_step()
    shapes = [NO_DRAFTS, TreeShape(1, 1, 1), TreeShape(2, 1, 2), TreeShape(2, 2, 4), SHAPE]
    expected = acceptance.expected_tokens(shapes)
    hopeful = acceptance.expected_tokens(shapes, optimism=1.0)
    assert expected[0] == hopeful[0] == 1
    assert (np.diff(expected) >= 0).all()
    assert (hopeful >= expected).all()
    assert expected[-1] <= 3


def test_a_shape_with_drafts_has_levels() -> None:
    with pytest.raises(ValueError, match="all must be 1 or more"):
        TreeShape(0, 1, 3)


def test_draft_times_follow_levels_and_forget_a_slow_start() -> None:
    times = DraftTimes()
    assert times.usual(1, 4) == 0
    assert not times.warm(4)
    assert times.add(1, 4, 300.0, 1.0) == 300
    assert times.warm(4)
    assert times.usual(1, 4) == 0
    # A delay of the first draft that is measured counts as four plain steps.
    assert times.add(1, 4, 30.0, 1.0) == times.usual(1, 4) == 4
    for _ in range(16):
        assert times.add(1, 4, 0.4, 1.0) == 0.4
    assert times.usual(1, 4) == pytest.approx(0.4, rel=0.1)
    assert times.usual(1, 2) == pytest.approx(0.2, rel=0.1)
    assert times.usual(16, 2) == pytest.approx(0.2, rel=0.1)
    times.add(16, 2, 9.0, 1.0)
    times.add(16, 2, 0.9, 1.0)
    assert times.add(16, 2, 90.0, 1.0) == pytest.approx(3.6)
    times.add(16, 2, 0.9, 1.0)
    assert times.usual(8, 2) == pytest.approx(0.9, rel=0.2)
    assert times.usual(1, 0) == 0
