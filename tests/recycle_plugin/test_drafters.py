"""Drafters propose the candidates from the target's most recent logits after each token."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from tree_kernels.copies import BUCKETS
from tree_kernels.source_stats import SourceStats

from drafttree.target import Target
from drafttree.tree import DraftTree, Verified
from drafttree.verify import verify_target
from recycle_plugin import (
    DynamicTreeDrafter,
    RecycleOptions,
    StaticTreeDrafter,
    dynamic,
    make_drafter,
)
from recycle_plugin.dynamic import untimed_draft_tokens
from recycle_plugin.priors import expected_priors
from recycle_plugin.sources import by_source

VOCAB = 37
LOGGER = logging.getLogger(__name__)
DRAFTERS: dict[str, dict[str, object]] = {
    "dynamic": {"nodes": 40},
    "static": {"tree": "static", "nodes": 40},
}


def logits_for(*best: int) -> torch.Tensor:
    """Logits whose most likely tokens are `best`, in this order."""
    logits = torch.zeros(VOCAB)
    for place, token in enumerate(best):
        logits[token] = 10.0 - place
    return logits


def make(**options: object) -> DynamicTreeDrafter | StaticTreeDrafter:
    parsed = RecycleOptions.model_validate({"prime": False, **options})
    target = Target("target", VOCAB, torch.device("cpu"), torch.float32, LOGGER)
    drafter = make_drafter(parsed, target)
    drafter.allocate(4, 64)
    return drafter


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def observe(drafter: DynamicTreeDrafter | StaticTreeDrafter, **rows: tuple[int, ...]) -> list[int]:
    """Observe rows: `t5` is a row of token 5, and `t4_5` one whose previous token is 4."""
    named = [[int(token) for token in name[1:].split("_")] for name in rows]
    return drafter.observe(
        torch.zeros(len(rows), dtype=torch.int64),
        ids(*(each[-1] for each in named)),
        ids(*(each[0] if len(each) > 1 else -1 for each in named)),
        torch.stack([logits_for(*best) for best in rows.values()]),
    ).tolist()


def paths(drafter: DynamicTreeDrafter | StaticTreeDrafter, slot: int, root: int) -> list[list[int]]:
    tree = drafter.propose(slots(slot), ids(root))
    return [tree.path(0, column) for column in range(1, int(tree.tree_size[0]))]


def test_a_static_tree_follows_the_matrix_level_by_level() -> None:
    drafter = make(tree="branch:2-1", k=2)
    assert observe(drafter, t5=(6, 7), t6=(8, 1), t7=(9, 2)) == [6, 8, 9]
    drafter.start(0, [5])
    tree = drafter.propose(slots(0), ids(5))
    assert tree.tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2]]
    assert tree.tree_size.tolist() == [5]


def test_a_static_tree_has_no_nodes_below_an_unknown_token() -> None:
    drafter = make(tree="branch:2-1", k=2)
    observe(drafter, t5=(6, 7), t7=(9, 2))
    tree = drafter.propose(slots(0, 1), ids(5, 11))
    assert tree.tree_size.tolist() == [4, 1]
    assert tree.tokens[0].tolist()[:4] == [5, 6, 7, 9]
    assert tree.parents[0].tolist()[:4] == [-1, 0, 0, 2]
    (names, _) = drafter.sources(slots(0, 1), 4)
    assert names[1:] == ["matrix rank 1", "matrix rank 2", "matrix rank 1"]


def test_a_static_tree_counts_each_nodes_acceptance() -> None:
    """For complete trees, without nodes that had no candidate, and truncated as by hosts."""
    drafter = make(tree="branch:2-2", k=2)
    nodes = [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]

    def counts() -> tuple[list[int], list[int]]:
        acceptance = json.loads(json.dumps(drafter.acceptance()))
        assert acceptance["paths"] == nodes
        return acceptance["tried"], acceptance["hit"]

    def step(roots: tuple[int, ...], after: dict[int, int], width: int = 7) -> None:
        """Requests in slots 3, 1 draft and are verified; `after` is the target."""
        requests = slots(3, 1)[: len(roots)]
        trees = drafter.propose(requests, ids(*roots))
        cut = DraftTree(
            trees.tokens[:, :width], trees.parents[:, :width], trees.tree_size.clamp(max=width)
        )
        target = torch.tensor(
            [[after.get(token, 0) for token in row] for row in cut.tokens.tolist()]
        )
        verified = verify_target(cut, target.int(), drafter.max_depth)
        drafter.on_verified(requests, cut, verified)

    # Below 5: 6 and 7; 6 has no row, so the columns are 5, 6, 7, 9, 2. Below 15: all six.
    observe(drafter, t5=(6, 7), t7=(9, 2), t15=(16, 17), t16=(18, 19), t17=(20, 21))
    step((5,), {5: 7, 7: 2})
    assert counts() == ([1, 1, 0, 0, 1, 1], [0, 1, 0, 0, 0, 1])
    step((15, 5), {15: 16, 16: 19, 5: 6})
    assert counts() == ([3, 3, 1, 1, 1, 1], [2, 1, 0, 1, 0, 1])
    # Cut after 18, the fourth column; 19 would have been accepted.
    step((15,), {15: 16, 16: 19}, width=4)
    assert counts() == ([4, 4, 2, 1, 1, 1], [3, 1, 0, 1, 0, 1])
    # A tree of only a root counts nothing.
    step((15,), {15: 16}, width=1)
    assert counts() == ([4, 4, 2, 1, 1, 1], [3, 1, 0, 1, 0, 1])
    drafter.reset()
    assert counts() == ([0] * 6, [0] * 6)


def test_a_dynamic_tree_follows_rows_and_goes_deep_where_that_is_more_likely() -> None:
    drafter = make(nodes=3)
    observe(drafter, t5=(6, 7), t6=(8,), t8=(9,))
    drafter.start(0, [1, 5])
    # The prior of rank 0 is 0.3, and of rank 1 0.083.
    assert paths(drafter, 0, 5) == [[6], [7], [6, 8]]
    assert [6, 8, 9] in paths(make_known(nodes=8), 0, 5)


def make_known(**options: object) -> DynamicTreeDrafter | StaticTreeDrafter:
    drafter = make(**options)
    observe(drafter, t5=(6, 7), t6=(8,), t8=(9,))
    drafter.start(0, [1, 5])
    return drafter


def test_bigram_candidates_come_before_matrix_candidates() -> None:
    drafter = make(nodes=1)
    observe(drafter, t4_5=(6,), t3_5=(7,))
    for slot, text, expected in ((0, [4, 5], 6), (1, [3, 5], 7), (2, [2, 5], 7)):
        drafter.start(slot, text)
        assert paths(drafter, slot, 5) == [[expected]]


def test_a_repeated_text_is_continued_by_its_n_gram_match() -> None:
    drafter = make(nodes=4)
    drafter.start(0, [20, 21, 22, 23, 24, 25, 1, 20, 21])
    assert paths(drafter, 0, 21) == [[22], [22, 23], [22, 23, 24], [22, 23, 24, 25]]
    # Requests do not match n-grams in each other's texts.
    drafter.start(1, [20, 21])
    assert paths(drafter, 1, 21) == []


def test_emitted_tokens_are_appended_to_the_text() -> None:
    drafter = make(nodes=4)
    drafter.start(0, [20, 21, 22, 23])
    drafter.extend(slots(0), ids(20)[None])
    assert drafter.previous_tokens(slots(0)).tolist() == [23]
    trees = drafter.propose(slots(0), ids(20))
    assert trees.tokens[0, 1:4].tolist() == [21, 22, 23]
    target = torch.where(trees.tokens == 20, 21, torch.where(trees.tokens == 21, 30, 0))
    drafter.on_verified(slots(0), trees, verify_target(trees, target.int(), drafter.max_depth))
    assert drafter.previous_tokens(slots(0)).tolist() == [21]
    drafter.extend(slots(0), ids(-1)[None])
    assert drafter.previous_tokens(slots(0)).tolist() == [21]
    drafter.start(0, [9])
    assert drafter.previous_tokens(slots(0)).tolist() == [-1]


def test_requests_with_a_grammar_get_more_candidates() -> None:
    """The best ones first; the trees of the other requests are those that `propose` gives."""

    def prepared() -> DynamicTreeDrafter:
        drafter = make(nodes=4)
        assert isinstance(drafter, DynamicTreeDrafter)
        observe(drafter, t5=(6, 7, 8), t6=(9, 10), t9=(11,))
        drafter.start(0, [1, 5])
        drafter.start(1, [2, 6])
        return drafter

    alone = prepared().propose(slots(0, 1), ids(5, 6))
    drafter = prepared()
    trees, verified = drafter.propose_candidates(slots(0, 1), ids(5, 6), slots(1))
    assert verified.tolist() == [4]
    assert trees.tokens[0, :5].tolist() == alone.tokens[0].tolist()
    assert trees.tree_size.tolist() == [5, 17]
    few = [alone.path(1, column) for column in range(5)]
    many = [trees.path(1, column) for column in range(17)]
    assert sorted(many[:5]) == sorted(few)
    assert all(path[:-1] in many[:place] for place, path in enumerate(many) if path)
    # Acceptance is counted by the candidates' sources, for those beyond the verified ones too.
    target = torch.full_like(trees.tokens, many[16][0])
    drafter.on_verified(slots(0, 1), trees, verify_target(trees, target, drafter.max_depth))
    counted = drafter.acceptance()["sources"]
    assert sum(row["tried"] for row in counted) > 4
    whole, verified = prepared().propose_candidates(slots(0, 1), ids(5, 6), slots(0, 1))
    assert verified.tolist() == [4, 4]
    assert whole.tokens[1].tolist() == trees.tokens[1].tolist()
    fixed = make(tree="branch:2-1", k=2)
    observe(fixed, t5=(6, 7), t6=(8, 1), t7=(9, 2))
    trees, verified = fixed.propose_candidates(slots(0), ids(5), slots(0))
    assert trees.tree_size.tolist() == [5]
    assert verified.tolist() == [4]


def test_acceptance_statistics_change_the_ranking() -> None:
    """If the second candidate of a row is always accepted, it is eventually drafted first."""
    drafter = make(nodes=1)
    observe(drafter, t5=(6, 7))
    drafter.start(0, [1, 5])
    seen = []
    for _ in range(100):
        trees = drafter.propose(slots(0), ids(5))
        seen += trees.tokens[0, 1:].tolist()
        target = torch.full_like(trees.tokens, 7)
        drafter.on_verified(slots(0), trees, verify_target(trees, target, drafter.max_depth))
        drafter.start(0, [1, 5])
    assert seen[0] == 6
    assert seen[-1] == 7
    assert seen == sorted(seen)
    drafter.reset()
    assert drafter.propose(slots(0), ids(5)).tree_size.tolist() == [1]


def test_dynamic_trees_count_acceptance_by_source() -> None:
    drafter = make(nodes=3)
    observe(drafter, t5=(6, 7), t4_5=(8,))
    drafter.start(0, [4, 5])
    assert drafter.acceptance() == {"sources": []}
    trees = drafter.propose(slots(0), ids(5))
    assert trees.tokens.tolist() == [[5, 8, 0, 1]]
    names = [f"bigram rank {rank}" for rank in (1, 2, 3)]
    assert drafter.sources(slots(0), 4) == [["", *names]]
    target = torch.full_like(trees.tokens, 8)
    drafter.on_verified(slots(0), trees, verify_target(trees, target, drafter.max_depth))
    assert json.loads(json.dumps(drafter.acceptance()))["sources"] == [
        {"source": "bigram rank 1", "tried": 1, "hit": 1, "share": 1.0},
        {"source": "bigram rank 2", "tried": 1, "hit": 0, "share": 0.0},
        {"source": "bigram rank 3", "tried": 1, "hit": 0, "share": 0.0},
    ]
    drafter.reset()
    assert drafter.acceptance() == {"sources": []}


def test_each_candidate_has_one_source() -> None:
    source_stats = SourceStats.of(expected_priors())
    states = {
        (3, 1, 1): "n-gram match of 3",  # also proposed by the tables
        (6, 0, 0): "n-gram match of 6",
        (BUCKETS + 11, 9, 0): "memory match of 37 or more",
        (2 * BUCKETS + 4, 1, 0): "shorter n-gram match",
        (3 * BUCKETS + 7, 9, 0): "shorter memory match",
        (0, 2, 1): "bigram rank 2",
        (4 * BUCKETS + 9, 2, 0): "bigram rank 2",  # another candidate is the match
        (0, 0, 4): "matrix rank 4",
        (5 * BUCKETS + 5, 9, 4): "matrix rank 4",  # the bigram is not known
    }
    for number, (copy, bigram, row) in enumerate(states):
        source = (copy * 10 + bigram) * 9 + row
        source_stats.tried[source] = 10
        source_stats.hit[source] = number
    assert by_source(source_stats) == [
        {"source": "n-gram match of 3", "tried": 10, "hit": 0, "share": 0.0},
        {"source": "n-gram match of 6", "tried": 10, "hit": 1, "share": 0.1},
        {"source": "memory match of 37 or more", "tried": 10, "hit": 2, "share": 0.2},
        {"source": "shorter n-gram match", "tried": 10, "hit": 3, "share": 0.3},
        {"source": "shorter memory match", "tried": 10, "hit": 4, "share": 0.4},
        {"source": "bigram rank 2", "tried": 20, "hit": 11, "share": 0.55},
        {"source": "matrix rank 4", "tried": 20, "hit": 15, "share": 0.75},
    ]


def test_priors_are_probabilities_and_higher_for_candidates_of_two_tables() -> None:
    priors = expected_priors().view(-1, 10, 9)
    assert float(priors.min()) >= 0
    assert float(priors.max()) < 1
    assert priors[0, 1, 1] > priors[0, 1, 0] > priors[0, 0, 1]
    longest, shorter, other = 3, 2 * BUCKETS + 3, 4 * BUCKETS + 3
    assert priors[longest, 1, 1] > priors[longest, 0, 0] > priors[other, 1, 1]
    assert priors[longest, 0, 0] > priors[shorter, 0, 0] > priors[other, 0, 0]
    # A longer match is worth more, and one in the memory as much as one in the text.
    ladder = priors[1 : 2 * BUCKETS + 1, 0, 0].view(2, BUCKETS)
    assert torch.equal(ladder[0], ladder[1])
    assert (ladder.diff() > 0).all()


@pytest.mark.parametrize("options", DRAFTERS.values(), ids=DRAFTERS)
def test_the_last_duplicate_wins_and_skipped_rows_write_nothing(
    options: dict[str, object],
) -> None:
    drafter = make(**options)
    drafter.observe(
        slots(0, 0, 1),
        ids(5, 5, -1),
        ids(-1, -1, 4),
        torch.stack([logits_for(6), logits_for(7), logits_for(8)]),
    )
    drafter.start(0, [5])
    assert paths(drafter, 0, 5)[0] == [7]
    assert int((drafter.tables.matrix[:, 0] >= 0).sum()) == 1
    assert int((drafter.tables.bigrams[:, 0] >= 0).sum()) == 0


@pytest.mark.parametrize("options", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("hot", [True, False])
def test_a_hot_start_keeps_the_tables_and_a_cold_one_empties_them(
    options: dict[str, object], hot: bool
) -> None:
    drafter = make(**options, hot_start=hot)
    drafter.start(0, [5])
    observe(drafter, t5=(6,))
    drafter.start(1, [5])
    assert paths(drafter, 1, 5)
    drafter.release([0, 1])
    drafter.start(0, [5])
    assert bool(paths(drafter, 0, 5)) == hot


def test_private_tables_serve_only_their_request_and_are_cleared_after_it() -> None:
    drafter = make(nodes=2, sharing="request")
    drafter.tables.matrix[5] = torch.tensor([9, 8, 7, 6, 4, 3, 2, 1])
    for slot in (0, 1):
        drafter.start(slot, [1, 5])
    observe(drafter, t1_5=(22, 23))
    assert paths(drafter, 0, 5) == [[22], [23]]
    assert paths(drafter, 1, 5) == [[9], [8]]
    drafter.start(0, [2, 5])
    assert paths(drafter, 0, 5) == [[9], [8]]
    assert int(drafter.tables.source_stats.tried.sum()) == 0


def test_auto_sizes_trees_by_the_measured_forwards() -> None:
    """Cheap forwards give more draft tokens than without a profile, expensive ones none."""

    def drafted(cost_of_a_token: float | None) -> int:
        drafter = make(nodes="auto", max_nodes=15)
        observe(drafter, t5=(6, 7, 8, 9, 10, 11, 12, 13), t6=(14, 15, 16, 17, 18, 19, 20, 21))
        drafter.start(0, [1, 5])
        if cost_of_a_token is not None:
            drafter.profile(lambda tokens: 1.0 + cost_of_a_token * (tokens - 1), 16)
        return int(drafter.propose(slots(0), ids(5)).tree_size[0]) - 1

    assert drafted(None) == 7
    assert drafted(1e-6) > 7
    assert drafted(10.0) == 0


def test_auto_limits_the_nodes_of_a_step_on_a_gpu_that_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [untimed_draft_tokens(requests, "cuda") for requests in (1, 4, 32, 256, 512)] == [
        *(511, 127, 15, 1),
        0,
    ]

    def on_gpu(requests: int, device_type: str) -> int:
        assert device_type == "cpu"
        return untimed_draft_tokens(requests, "cuda")

    monkeypatch.setattr(dynamic, "untimed_draft_tokens", on_gpu)
    monkeypatch.setattr(dynamic, "_UNTIMED_NODES", 16)
    drafter = make(nodes="auto", max_nodes=15)
    observe(drafter, t5=(6, 7, 8, 9, 10, 11, 12, 13), t6=(14, 15, 16, 17, 18, 19, 20, 21))
    for slot in range(4):
        drafter.start(slot, [1, 5])
    sizes = {}
    for requests in (1, 2, 4):
        which = slots(*range(requests))
        sizes[requests] = drafter.propose(which, ids(*[5] * requests)).tree_size.tolist()
    assert sizes == {1: [16], 2: [8, 8], 4: [4] * 4}
    monkeypatch.setattr(dynamic, "_UNTIMED_NODES", 7)
    assert not drafter.propose(slots(0, 1, 2, 3), ids(5, 5, 5, 5)).drafted


def test_steps_between_which_something_else_was_done_are_not_measured() -> None:
    """A host says where a prompt begins, and passes what follows each of its parts."""

    def measured(*, reads: bool = False, resets: bool = False) -> int:
        drafter = make(nodes="auto", max_nodes=7)
        drafter.profile(lambda _: 1e-9, 8)
        drafter.start(0, [5, 6, 5])
        for _ in range(4):
            trees = drafter.propose(slots(0), ids(5))
            path, one = torch.zeros(1, 1, dtype=torch.int32), ids(1)
            drafter.on_verified(slots(0), trees, Verified(path, path + 5, one))
            if reads:
                drafter.extend(slots(1), ids(-1)[None])
            if resets:
                drafter.reset()
        return sum(int(row["steps"]) for row in drafter.explain())

    assert measured() == 3
    assert not measured(reads=True)
    assert not measured(resets=True)
