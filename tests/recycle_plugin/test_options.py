"""The options of Token Recycling, the trees that they select, and their error messages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from drafttree import deprecation
from recycle_plugin import METHOD, RecycleOptions


def test_trees_are_dynamic_unless_a_static_one_is_given() -> None:
    assert RecycleOptions().is_dynamic
    assert RecycleOptions().num_draft_tokens == 80
    assert RecycleOptions(nodes=7).num_draft_tokens == 7
    assert not RecycleOptions(tree="static").is_dynamic
    assert not RecycleOptions(tree="branch:2-1").is_dynamic
    assert RecycleOptions(tree="branch:2-1").num_draft_tokens == 4


def test_a_static_tree_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text('{"paths": [[0], [1], [0, 0]]}')
    assert RecycleOptions(tree=str(file)).topology.paths == ((0,), (1,), (0, 0))


@pytest.mark.parametrize(
    ("former", "tree"),
    [
        ({"drafting": "grown"}, "dynamic"),
        ({"drafting": "paper"}, "static"),
        ({"drafting": "paper", "tree": "branch:2-1"}, "branch:2-1"),
    ],
)
def test_the_former_option_drafting_still_works(
    former: dict[str, object],
    tree: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deprecation, "_WARNED", set())
    for _ in range(2):
        options = METHOD.parse(former)
        assert isinstance(options, RecycleOptions)
        assert options.tree == tree
    (warning,) = caplog.messages
    assert f"drafting={former['drafting']} of Token Recycling is deprecated" in warning


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_nodes": 31}),
        ({"nodes": 15}, {"nodes": 15}),
        ({"tree": "static"}, {"nodes": 31, "tree": "static"}),
        ({"tree": "static", "nodes": 15}, {"nodes": 15, "tree": "static"}),
        ({"drafting": "paper"}, {"nodes": 31, "tree": "static"}),
        ({"tree": "branch:2-1"}, {"tree": "branch:2-1"}),
    ],
)
def test_the_hosts_count_of_draft_tokens_is_applied(
    given: dict[str, object], expected: dict[str, object]
) -> None:
    assert RecycleOptions.apply_num_draft_tokens(given, 31) == expected


def test_the_papers_tree() -> None:
    options = RecycleOptions(tree="static")
    tree = options.topology
    assert (options.num_draft_tokens, options.depth) == (80, 6)
    assert tree.num_draft_tokens == 80
    levels = Counter(len(path) for path in tree.paths)
    assert [levels[depth] for depth in range(1, 7)] == [8, 21, 25, 15, 8, 3]


def test_smaller_trees_are_not_prefixes_of_the_papers_tree() -> None:
    """The first 15 nodes of the paper's tree have depth 2 or less."""
    tree = RecycleOptions(tree="static", nodes=15).topology
    assert tree.num_draft_tokens == 15
    assert tree.depth > 2


def test_fewer_candidates_make_a_narrower_tree() -> None:
    tree = RecycleOptions(tree="static", k=3).topology
    assert tree.num_draft_tokens == 80
    assert tree.width <= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 256}, "nodes=256"),
        ({"hot_strat": True}, "no option 'hot_strat'.*hot_start"),
        ({"tree": "branch:"}, "branching factors"),
        ({"tree": "branch:2", "drafting": "grown"}, "tree='branch:2' is static"),
        ({"k": 3}, "k=3.*tree='static'"),
        ({"drafting": "magic"}, "drafting='magic'"),
        ({"tree": "missing.json"}, "missing.json"),
        ({"tree": "branch:2", "nodes": 3}, "nodes=3 but tree='branch:2' has 2"),
        ({"tree": "branch:4", "k": 3}, "tree='branch:4' takes candidate rank 3 but k=3"),
        ({"tree": "static", "max_nodes": 3}, "max_nodes=3"),
        ({"nodes": 3, "max_nodes": 3}, "max_nodes=3"),
        ({"tree": "static", "sharing": "request"}, "sharing='request'"),
        ({"hot_start": False, "sharing": "request"}, "sharing='request'"),
    ],
)
def test_errors_name_the_option_and_its_value(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        METHOD.parse(options)


def test_hosts_may_choose_the_greatest_size_unless_the_user_has() -> None:
    assert not METHOD.parse({}).is_limited
    for given in ({"max_nodes": 80}, {"nodes": 15}, {"tree": "branch:3-2"}):
        assert METHOD.parse(given).is_limited
    counted = METHOD.options.apply_num_draft_tokens({}, 15)
    assert METHOD.parse(counted).is_limited
