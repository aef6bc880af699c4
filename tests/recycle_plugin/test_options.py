"""The options of Token Recycling pick the tree that the paper or the user means."""

from __future__ import annotations

from collections import Counter

import pytest

from recycle_plugin import METHOD, RecycleOptions


def test_trees_are_grown_unless_the_paper_or_a_tree_is_asked_for() -> None:
    assert RecycleOptions().drafting == "grown"
    assert RecycleOptions().num_nodes == 80
    assert RecycleOptions.model_validate({"tree": "branch:2-1"}).drafting == "paper"
    assert RecycleOptions(nodes=7).num_nodes == 7


def test_the_papers_tree() -> None:
    options = RecycleOptions(drafting="paper")
    tree = options.topology
    assert (options.num_nodes, options.depth) == (80, 6)
    assert tree.nodes == 80
    levels = Counter(len(path) for path in tree.paths)
    assert [levels[depth] for depth in range(1, 7)] == [8, 21, 25, 15, 8, 3]


def test_smaller_trees_are_no_prefix_of_the_papers() -> None:
    """Its first 15 nodes would have depth 2."""
    tree = RecycleOptions(drafting="paper", nodes=15).topology
    assert tree.nodes == 15
    assert tree.depth > 2


def test_fewer_candidates_make_a_narrower_tree() -> None:
    tree = RecycleOptions(drafting="paper", k=3).topology
    assert tree.nodes == 80
    assert tree.width <= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 256}, "nodes=256"),
        ({"hot_strat": True}, "no option 'hot_strat'.*hot_start"),
        ({"tree": "branch:"}, "branching factors"),
        ({"tree": "branch:2", "drafting": "grown"}, "tree='branch:2' is static"),
        ({"k": 3}, "k=3.*drafting='paper'"),
        ({"drafting": "magic"}, "drafting='magic'"),
    ],
)
def test_errors_name_the_option_and_its_value(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        METHOD.parse(options)
