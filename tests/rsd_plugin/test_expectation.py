"""The exact expected tokens per step, compared with the mean over many sampled steps."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from drafttree.tree import DraftTree
from drafttree.verify import verify_sampled
from rsd_plugin import RsdDrafter, RsdOptions
from scripts.experiments.rsd.acceptance import k_sequential, recursive_rejection
from scripts.experiments.rsd.rsd_expectation import NodePath, expected_tokens, walk

VOCAB = 5
STEPS = 4_000


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Next-token distributions by the last token, of a target and of a draft model."""
    generator = torch.Generator().manual_seed(3)
    target, draft = (1.5 * torch.randn(2, VOCAB, VOCAB, generator=generator)).softmax(-1)
    return target, draft


def children_of(trees: DraftTree, row: int) -> dict[NodePath, list[int]]:
    tokens, parents = trees.tokens[row].tolist(), trees.parents[row].tolist()
    paths: list[NodePath] = [()]
    children: dict[NodePath, list[int]] = {}
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
        if token >= 0:
            children.setdefault(paths[parent], []).append(token)
    return children


@pytest.mark.parametrize("tree", ["beam:1x3", "beam:3x3", "branch:3-2-1"])
def test_the_expectation_is_the_mean_of_sampled_steps(tree: str) -> None:
    target, draft = tables()
    drafter = RsdDrafter(RsdOptions(model="", tree=tree), VOCAB)

    def forward(trees: DraftTree, first: int) -> torch.Tensor:
        return draft[trees.tokens[:, first:].clamp(min=0).long()]

    trees, drawn = drafter.propose(
        torch.arange(STEPS),
        torch.zeros(STEPS, dtype=torch.int32),
        *(torch.arange(STEPS), torch.arange(STEPS), torch.ones(STEPS, dtype=torch.bool)),
        forward,
    )
    rule = drafter.acceptance_rule(trees, drawn)

    def draw(nodes: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        tokens = trees.tokens.gather(1, nodes.long()[:, None])[:, 0]
        return rule(target[tokens.clamp(min=0).long()], nodes)

    emitted = verify_sampled(trees, draw, drafter.max_depth).num_emitted.double()

    def after(table: torch.Tensor, path: NodePath) -> torch.Tensor:
        return table[path[-1] if path else 0]

    expected = torch.tensor(
        [
            expected_tokens(
                walk(
                    children_of(trees, row),
                    lambda path: after(target, path),
                    lambda path: after(draft, path),
                    recursive_rejection,
                )
            )
            for row in range(STEPS)
        ],
        dtype=torch.float64,
    )
    difference = emitted - expected
    assert difference.mean().abs() < 4 * difference.std() / STEPS**0.5
    # The check would be trivial if every tree had the same expectation.
    assert expected.std() > 0.1


def test_one_child_is_speculative_sampling() -> None:
    target, draft = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.5, 0.25, 0.25])
    for token, accepted in enumerate((0.4, 1.0, 1.0)):
        for rule in (recursive_rejection, k_sequential):
            assert rule(target, draft, [token])[0] == pytest.approx([accepted])


def test_one_of_two_tokens_drawn_without_replacement_is_always_accepted() -> None:
    target, draft = torch.tensor([0.9, 0.1]), torch.tensor([0.2, 0.8])
    accepted, _ = recursive_rejection(target, draft, [1, 0])
    assert sum(accepted) == pytest.approx(1.0)


@pytest.mark.parametrize("count", [2, 3])
def test_k_sequential_accepts_no_token_more_often_than_its_target_probability(count: int) -> None:
    """Otherwise no residual could correct it. For one token the bound is tight."""
    target, draft = (table[0].double() for table in tables())
    accepted = torch.zeros(VOCAB, dtype=torch.float64)
    for children in product(range(VOCAB), repeat=count):
        drawn = draft[list(children)].prod()
        probabilities, _ = k_sequential(target, draft, children)
        for token, probability in zip(children, probabilities, strict=True):
            accepted[token] += drawn * probability
    assert (accepted <= target + 1e-9).all()
    assert (target - accepted).min() < 1e-6
    assert accepted.sum() > torch.minimum(target, draft).sum() + 0.01
