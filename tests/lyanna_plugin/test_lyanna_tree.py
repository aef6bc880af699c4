"""Token-info sampling, the second tree after a rejection, and the union of both."""

from __future__ import annotations

from itertools import groupby, product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttree.tree import DraftTree
from drafttree.verify import verify_target
from lyanna_plugin.tree import TokenTable, merge, resample_logits, sample_tree

VOCAB, WIDTH, LENGTH = 12, 3, 3
Path = tuple[int, ...]


def table_of(rows: torch.Tensor) -> TokenTable:
    """A token-info table in which every token is hot."""
    every = torch.arange(len(rows), dtype=torch.int32)
    return TokenTable(rows, every, every)


def random_parts(seed: int, requests: int) -> tuple[torch.Tensor, torch.Tensor, TokenTable]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(requests, LENGTH, VOCAB, generator=generator)
    roots = torch.randint(VOCAB, (requests,), generator=generator, dtype=torch.int32)
    return logits, roots, table_of(2 * torch.randn(VOCAB, VOCAB, generator=generator))


def paths_of(tree: DraftTree, row: int) -> list[Path]:
    """The path of every node; also checks the tree, and that its padding is at the end."""
    tree.check()
    count = int(tree.tree_size[row])
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    assert parents[0] == -1
    assert tokens[count:] == parents[count:] == [-1] * (len(tokens) - count)
    paths: list[Path] = [()]
    for column in range(1, count):
        assert 0 <= parents[column] < column
        paths.append((*paths[parents[column]], tokens[column]))
    assert [len(path) for path in paths] == sorted(len(path) for path in paths)
    assert len(set(paths)) == len(paths)
    return paths


def full(logits: torch.Tensor) -> torch.Tensor:
    return torch.full((len(logits),), logits.shape[1])


def by_hand(
    logits: torch.Tensor, root: int, info: TokenTable, steps: int, budget: int
) -> set[Path]:
    """Algorithm 1, in plain Python."""
    live: dict[Path, float] = {(): 0.0}
    pool: dict[Path, float] = {}
    for step in range(steps):
        found: dict[Path, float] = {}
        for path, score in live.items():
            added = info.table[path[-1] if path else root]
            log_probs = (logits[step] + added).log_softmax(0)
            for token in log_probs.argsort(descending=True)[:WIDTH].tolist():
                found[(*path, token)] = score + float(log_probs[token])
        pool |= found
        live = dict(sorted(found.items(), key=lambda item: -item[1])[:WIDTH])
    return set(sorted(pool, key=lambda path: -pool[path])[:budget])


def test_joint_probabilities_decide_as_in_the_papers_example() -> None:
    """At the root two children, 0.6 and 0.4; below them 0.7 and 0.3: 0.6 x 0.7 = 0.42 beats the
    second child's 0.4 x 0.9 = 0.36, and 0.6 x 0.3 = 0.18 comes last."""
    a, b, c, d, e, f = range(6)
    never = -60.0
    logits = torch.zeros(1, 2, 6)
    added = torch.full((6, 6), never)
    added[f, [a, b]] = torch.tensor([0.6, 0.4]).log()
    added[a, [c, d]] = torch.tensor([0.7, 0.3]).log()
    added[b, [d, e]] = torch.tensor([0.9, 0.1]).log()
    roots = torch.tensor([f], dtype=torch.int32)
    expected = [(a,), (a, c), (b,), (b, d), (a, d), (b, e)]
    for budget in range(1, 7):
        tree = sample_tree(logits, full(logits), roots, table_of(added), 2, budget)
        assert set(paths_of(tree, 0)[1:]) == set(expected[:budget])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), budget=st.integers(1, 25))
def test_trees_are_those_of_algorithm_1(seed: int, budget: int) -> None:
    logits, roots, info = random_parts(seed, 3)
    steps = torch.tensor([LENGTH, 1, 0])
    tree = sample_tree(logits, steps, roots, info, WIDTH, budget)
    for row in range(3):
        paths = paths_of(tree, row)
        expected = by_hand(logits[row], int(roots[row]), info, int(steps[row]), budget)
        assert set(paths[1:]) == expected


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 999), st.sampled_from([5, 7, 8, 11]))
def test_no_child_is_kept_without_its_parent_if_a_token_is_certain(seed: int, budget: int) -> None:
    logits, roots, _ = random_parts(seed, requests=4)
    logits[:, 1:] *= 0.1
    logits[:, 1:, 5] = 40
    nothing = table_of(torch.zeros(VOCAB, VOCAB))
    tree = sample_tree(logits, full(logits), roots, nothing, 4, budget)
    for row in range(4):
        paths = paths_of(tree, row)
        assert len(paths) == 1 + budget
        assert all(path[:-1] in paths for path in paths if path)


def test_the_second_tree_does_not_depend_on_rejected_tokens() -> None:
    logits, roots, info = random_parts(1, 2)
    for accepted in range(LENGTH + 1):
        used = torch.full((2,), accepted)
        remaining, steps = resample_logits(logits, full(logits), used)
        assert steps.tolist() == [max(LENGTH - 1 - accepted, 0)] * 2
        changed = logits.clone()
        # The steps of the accepted tokens and of the rejection.
        changed[:, : accepted + 1] = torch.randn_like(changed[:, : accepted + 1])
        other, _ = resample_logits(changed, full(logits), used)
        trees = [sample_tree(each, steps, roots, info, WIDTH, 6) for each in (remaining, other)]
        assert torch.equal(trees[0].tokens, trees[1].tokens)
        depth = max(len(path) for path in paths_of(trees[0], 0))
        assert depth == int(steps[0])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_merged_trees_are_the_union(seed: int, sizes: tuple[int, int]) -> None:
    logits, roots, info = random_parts(seed, 3)
    first = sample_tree(logits, torch.tensor([3, 2, 0]), roots, info, WIDTH, sizes[0])
    near = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
    second = sample_tree(near, torch.tensor([2, 3, 1]), roots, info, WIDTH, sizes[1])
    merged = merge(first, second, LENGTH)
    for row in range(3):
        mine, theirs = paths_of(first, row), paths_of(second, row)
        both = paths_of(merged, row)
        assert set(both) == {*mine, *theirs}
        # The children of a node are adjacent, the first tree's before the second's.
        parents = [path[:-1] for path in both[1:]]
        families = [parent for parent, _ in groupby(parents)]
        assert len(set(families)) == len(families)
        for parent in set(parents):
            children = [path for path in both if path and path[:-1] == parent]
            own = [path in mine for path in children]
            assert own == sorted(own, reverse=True)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_merged_trees_accept_what_either_does(seed: int) -> None:
    logits, roots, info = random_parts(seed, 4)
    first = sample_tree(logits, full(logits), roots, info, WIDTH, 5)
    second = sample_tree(logits.roll(1, 1), full(logits), roots, info, WIDTH, 5)
    merged = merge(first, second, LENGTH)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(VOCAB, (VOCAB,) * (LENGTH + 1), generator=generator, dtype=torch.int32)
    # Make the target follow one of the trees' paths sometimes.
    for tree, row in product((first, second), range(4)):
        path = max(paths_of(tree, row), key=len)
        place = (int(roots[row]),)
        for token in path:
            table[(*place, *[slice(None)] * (LENGTH + 1 - len(place)))] = token
            place = (*place, token)

    def emitted(tree: DraftTree) -> list[int]:
        target = torch.full_like(tree.tokens, -1)
        for row in range(4):
            for column, path in enumerate(paths_of(tree, row)):
                place = (int(roots[row]), *path)
                target[row, column] = table[place].flatten()[0]
        return verify_target(tree, target, LENGTH).num_emitted.tolist()

    for whole, *parts in zip(emitted(merged), emitted(first), emitted(second), strict=True):
        assert whole >= max(parts)
