"""The union of two drafters' trees, compared with plain Python, and the worth of its nodes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttree.tree import DraftTree, Verified
from drafttree.tree_union import (
    CERTAIN,
    Candidates,
    TreeUnion,
    best_of_union,
    find_nodes,
    scores_of,
    unite,
)
from drafttree.tree_worth import BUCKETS, MOST_TRIED, STATES, TreeWorth, proposed_by

Path = tuple[int, ...]
DEPTH, VOCAB, BATCH = 4, 4, 3
ROOTS = torch.tensor([1, 0, 3], dtype=torch.int32)


def random_candidates(seed: int, columns: int) -> Candidates:
    """Trees in which some columns hold no node, and siblings have different tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    tokens = torch.full((BATCH, columns), -1, dtype=torch.int32)
    parents = torch.full_like(tokens, -1)
    tokens[:, 0] = ROOTS
    for row in range(BATCH):
        depth, children = {0: 0}, set()
        for column in range(1, columns):
            parent, token = list(depth)[draw(len(depth))], draw(VOCAB)
            if depth[parent] < DEPTH and (parent, token) not in children and draw(4):
                children.add((parent, token))
                depth[column] = depth[parent] + 1
                tokens[row, column], parents[row, column] = token, parent
    chances = torch.rand(BATCH, columns, generator=generator).masked_fill(parents < 0, 0)
    return Candidates(tokens, parents, chances)


def paths_of(trees: Candidates | TreeUnion, row: int) -> Iterator[tuple[int, Path]]:
    """The column and the path of each node, the root's first."""
    paths: dict[int, Path] = {0: ()}
    yield 0, ()
    for column in range(1, trees.tokens.shape[1]):
        token, parent = int(trees.tokens[row, column]), int(trees.parents[row, column])
        if token >= 0:
            paths[column] = (*paths[parent], token)
            yield column, paths[column]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9999), st.integers(1, 14), st.integers(1, 14))
def test_the_union_has_each_path_once(seed: int, columns: int, further: int) -> None:
    first, second = random_candidates(seed, columns), random_candidates(seed + 1, further)
    union = unite(first, second, DEPTH)
    found = find_nodes(first, second, DEPTH)
    for row in range(BATCH):
        of_union = list(paths_of(union, row))
        paths = [path for _, path in of_union]
        ours = {path: column for column, path in paths_of(first, row)}
        theirs = {path: column for column, path in paths_of(second, row)}
        assert len(set(paths)) == len(paths)
        assert {*paths} == {*ours, *theirs}
        assert [len(path) for path in paths] == sorted(len(path) for path in paths)
        assert [column for column, _ in of_union] == [*range(len(of_union))]
        for column, path in of_union:
            assert union.levels[row, column] == len(path)
            at = [int(columns[row, column]) for columns in union.columns]
            assert at == [ours.get(path, -1), theirs.get(path, -1)]
        assert (union.tokens[row, len(paths) :] == -1).all()
        for path, column in theirs.items():
            assert found[row, column] == ours.get(path, -1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 9999),
    st.integers(1, 14),
    st.lists(st.integers(0, 30), min_size=BATCH, max_size=BATCH),
)
def test_the_best_nodes_are_kept(seed: int, columns: int, most: list[int]) -> None:
    """Compared with the best paths by plain products; with a wrong one left out it would fail."""
    union = unite(random_candidates(seed, columns), random_candidates(seed + 1, 20), DEPTH)
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(union.tokens.shape, generator=generator)
    chances[:, ::5] = 1  # a certain child must not outrank its parent
    limit = min(max(most), union.tokens.shape[1] - 1)
    scores = scores_of(union, chances, DEPTH)
    trees, columns_of = best_of_union(union, scores, torch.tensor(most), limit)
    trees.check(limit)
    for row in range(BATCH):
        worth: dict[Path, float] = {(): 1.0}
        for column, path in paths_of(union, row):
            if path:
                worth[path] = worth[path[:-1]] * min(float(chances[row, column]), CERTAIN)
        kept = [tuple(trees.path(row, column)) for column in range(int(trees.tree_size[row]))]
        drafts = {path for path in kept if path}
        assert len(drafts) == len(kept) - 1 == min(most[row], limit, len(worth) - 1)
        assert all(path[:-1] in kept for path in drafts)
        left = [worth[path] for path in worth if path not in kept]
        assert not left or min(map(worth.__getitem__, kept)) >= max(left) - 1e-6
        where = dict(paths_of(union, row))
        for column, path in enumerate(kept):
            assert where[int(columns_of[row, column])] == path


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9999), st.integers(1, 12))
def test_no_tree_is_worse_than_either_drafters_own(seed: int, most: int) -> None:
    """Where the worth of a node is what both would say, the union's best are worth no less."""
    generator = torch.Generator().manual_seed(seed)
    chance_of = torch.rand(VOCAB, VOCAB, generator=generator).clamp(max=CERTAIN)

    def with_chances(trees: Candidates) -> Candidates:
        above = trees.tokens.gather(1, trees.parents.clamp(min=0).long()).clamp(min=0).long()
        chances = chance_of[above, trees.tokens.clamp(min=0).long()]
        return Candidates(trees.tokens, trees.parents, chances.masked_fill(trees.parents < 0, 0))

    first = with_chances(random_candidates(seed, 14))
    second = with_chances(random_candidates(seed + 1, 14))

    def expected(one: Candidates, other: Candidates) -> torch.Tensor:
        """The tokens that the best nodes are expected to add."""
        union = unite(one, other, DEPTH)
        at, elsewhere = union.columns
        chances = torch.maximum(
            one.chances.gather(1, at.clamp(min=0)).masked_fill(at < 0, 0),
            other.chances.gather(1, elsewhere.clamp(min=0)).masked_fill(elsewhere < 0, 0),
        )
        scores = scores_of(union, chances, DEPTH)
        _, columns = best_of_union(union, scores, torch.full((BATCH,), most), most)
        return scores.gather(1, columns).sum(1) - (columns == 0).sum(1)

    none = Candidates(
        torch.nn.functional.pad(ROOTS[:, None], (0, most), value=-1),
        torch.full((BATCH, 1 + most), -1, dtype=torch.int32),
        torch.zeros(BATCH, 1 + most),
    )
    both = expected(first, second)
    for alone in (first, second):
        assert (both >= expected(alone, none) - 1e-5).all()


def outcome(trees: DraftTree, path: list[int]) -> Verified:
    """The same accepted columns in each tree."""
    accepted = torch.tensor([path], dtype=torch.int32).expand(len(trees.tokens), -1)
    counts = torch.full((len(trees.tokens),), len(path), dtype=torch.int32)
    return Verified(accepted, torch.zeros_like(accepted), counts)


def two_nodes(chance: float, other: float) -> tuple[Candidates, Candidates]:
    """The first drafter proposes tokens 1 and 2, the second tokens 2 and 3."""

    def trees(tokens: list[int], chances: list[float]) -> Candidates:
        return Candidates(
            torch.tensor([[0, *tokens]], dtype=torch.int32),
            torch.tensor([[-1, 0, 0]], dtype=torch.int32),
            torch.tensor([[0, *chances]]),
        )

    return trees([1, 2], [chance, 0.2]), trees([2, 3], [other, 0.1])


def test_worth_is_learnt_by_what_both_drafters_say() -> None:
    worth = TreeWorth(torch.device("cpu"), 0.7)
    first, second = two_nodes(0.6, 0.6)
    union = unite(first, second, 1)
    assert union.tokens.tolist() == [[0, 1, 2, 3, -1]]
    classes = worth.classes(union, first, second)
    ours, theirs = proposed_by(classes)
    assert ours[0, 1:4].tolist() == [True, True, False]
    assert theirs[0, 1:4].tolist() == [False, True, True]
    # Each passed over one of the other's nodes.
    assert classes[0, 1] % STATES == BUCKETS + 1
    assert classes[0, 3] // STATES == BUCKETS + 1
    before = worth.chances(classes)[0]
    trees = DraftTree(union.tokens, union.parents, torch.tensor([4], dtype=torch.int32))
    for _ in range(200):
        worth.learn(classes, torch.tensor([0]), trees, outcome(trees, [0, 2]))
    after = worth.chances(classes)[0]
    assert after[2] > max(0.8, before[2])
    assert after[1] < min(0.1, before[1])
    assert after[3] < min(0.1, before[3])
    worth.reset()
    assert torch.equal(worth.chances(classes)[0], before)


def test_old_outcomes_are_forgotten() -> None:
    worth = TreeWorth(torch.device("cpu"), 0.7)
    first, second = two_nodes(0.6, 0.6)
    union = unite(first, second, 1)
    classes = worth.classes(union, first, second)
    trees = DraftTree(union.tokens, union.parents, torch.tensor([4], dtype=torch.int32))
    node = classes[0, 1].long()
    for _ in range(3 * MOST_TRIED):
        worth.learn(classes, torch.tensor([0]), trees, outcome(trees, [0, 1]))
    assert MOST_TRIED // 2 <= worth.stats.tried[node] <= MOST_TRIED + 1
    assert worth.chances(classes)[0, 1] > 0.95
    for _ in range(2 * MOST_TRIED):
        worth.learn(classes, torch.tensor([0]), trees, outcome(trees, [0, 2]))
    assert worth.chances(classes)[0, 1] < 0.3
    # But all of them are told: of the nodes 1 to 3, which the first, both and the second propose.
    outcomes = 5 * MOST_TRIED
    assert worth.by_proposers.tried.tolist() == [0, outcomes, outcomes, outcomes]
    assert worth.by_proposers.hit.tolist() == [0, 3 * MOST_TRIED, 0, 2 * MOST_TRIED]
    worth.reset()
    assert not worth.by_proposers.tried.any()
