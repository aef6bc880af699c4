"""Rules of verification, proved lossless by enumeration, and planted faults that this finds.

Everything that may be drawn for a tree is enumerated on a small vocabulary. The law of the tokens
that a step emits must then be the target's own, to the precision of float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import enumerated_steps
import pytest
import torch
from enumerated_steps import CASES, Law, error, every_beam, every_branching, every_drawing

from scripts.experiments.rsd import blocks
from scripts.experiments.rsd.acceptance import (
    greedy_drafting,
    k_sequential,
    recursive_rejection,
    target_draw,
)
from scripts.experiments.rsd.drawing import (
    best_tree,
    greedy_beam,
    greedy_branches,
    independent_chains,
)
from scripts.experiments.rsd.positions import Rule, best_chain, block, walked
from scripts.experiments.rsd.rsd_expectation import (
    Children,
    Distributions,
    NodePath,
    Stop,
    expected_tokens,
)
from scripts.experiments.rsd.traversal import traversal

LENGTH = 2


def chains(width: int, length: int = LENGTH) -> Callable[[Distributions], Law]:
    return lambda draft: every_drawing(lambda draw: independent_chains(draft, width, length, draw))


def branching(*factors: int) -> Callable[[Distributions], Law]:
    return lambda draft: every_branching(draft, factors)


def beam(*widths: int) -> Callable[[Distributions], Law]:
    return lambda draft: every_beam(draft, len(draft(())), widths)


def greedy(*factors: int) -> Callable[[Distributions], Law]:
    return lambda draft: every_drawing(lambda draw: greedy_branches(draft, factors, draw))


def greedily_beamed(width: int) -> Callable[[Distributions], Law]:
    return lambda draft: every_drawing(lambda draw: greedy_beam(draft, width, LENGTH, draw))


def best(width: int) -> Callable[[Distributions], Law]:
    return lambda draft: every_drawing(lambda draw: best_tree(draft, width, LENGTH))


def first_children(law: Callable[[Distributions], Law]) -> Callable[[Distributions], Law]:
    """The paths of first children of trees, to which vLLM's V2 model runner cuts some."""

    def of(draft: Distributions) -> Law:
        for probability, children in law(draft):
            path: NodePath = ()
            kept: dict[NodePath, list[int]] = {}
            while tokens := children.get(path):
                kept[path] = [tokens[0]]
                path = (*path, tokens[0])
            yield probability, kept

    return of


RULES: dict[str, tuple[Callable[[Distributions], Law], Rule, int]] = {
    "recursive rejection, chain": (branching(1, 1), walked(recursive_rejection), 3),
    "recursive rejection, branching": (branching(2, 2), walked(recursive_rejection), 3),
    "recursive rejection, beam": (beam(2, 2), walked(recursive_rejection), 3),
    "recursive rejection, long beam": (beam(3, 3, 3), walked(recursive_rejection), 2),
    "recursive rejection, cut beam": (beam(3, 3, 2), walked(recursive_rejection), 2),
    "K-SEQ": (chains(2), walked(k_sequential), 3),
    "block": (branching(1, 1), block, 3),
    "longer block": (branching(1, 1, 1), block, 3),
    "traversal, chain": (branching(1, 1, 1), traversal, 3),
    "traversal, 2-1": (branching(2, 1), traversal, 3),
    "traversal, 2-2": (branching(2, 2), traversal, 3),
    "traversal, 3-1": (branching(3, 1), traversal, 3),
    "traversal, 1-3": (branching(1, 3), traversal, 3),
    "traversal, 2-1-1": (branching(2, 1, 1), traversal, 3),
    "traversal, beam": (beam(2, 2), traversal, 3),
    "traversal, wide beam": (beam(3, 3), traversal, 3),
    "traversal, long beam": (beam(3, 3, 3), traversal, 2),
    "traversal, cut beam": (beam(3, 1), traversal, 3),
    "traversal, cut long beam": (beam(3, 3, 2), traversal, 2),
    "traversal, first children of beams": (first_children(beam(2, 2)), traversal, 3),
    "best of 2 chains": (chains(2), best_chain, 3),
    "best of 3 chains": (chains(3), best_chain, 2),
    "best of 2 longer chains": (chains(2, 3), best_chain, 2),
    "greedy drafting, 1-1": (greedy(1, 1), walked(greedy_drafting), 3),
    "greedy drafting, 2-1": (greedy(2, 1), walked(greedy_drafting), 3),
    "greedy drafting, 2-2": (greedy(2, 2), walked(greedy_drafting), 4),
    "greedy drafting, 3-2": (greedy(3, 2), walked(greedy_drafting), 4),
    "greedy drafting, beam": (greedily_beamed(2), walked(greedy_drafting), 4),
    "greedy drafting, wide beam": (greedily_beamed(4), walked(greedy_drafting), 4),
    "greedy drafting, first child drawn too": (branching(2, 1), walked(greedy_drafting), 3),
    "target's draw, best tree": (best(2), walked(target_draw), 3),
    "target's draw, branching": (branching(2, 1), walked(target_draw), 3),
    "target's draw, beam": (beam(2, 2), walked(target_draw), 3),
}
"""How trees are drawn, how they are verified, and the size of the vocabulary."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", RULES)
def test_a_step_emits_the_target(name: str, case: str) -> None:
    assert error(case, *RULES[name]) < 1e-12


def from_the_target(verify: Rule) -> Rule:
    """A fault: after a rejection, the next token is drawn from the target's own distribution."""
    return lambda children, target, draft: [
        replace(stop, residual=None) for stop in verify(children, target, draft)
    ]


@pytest.mark.parametrize("name", RULES)
def test_a_lost_residual_is_found(name: str) -> None:
    law, verify, vocab = RULES[name]
    assert error("random", law, from_the_target(verify), vocab) > 1e-3


def pruned(draft: Distributions) -> Law:
    """A fault: the second child of the root is dropped if it is the least likely token."""
    for probability, children in every_branching(draft, [2, 1]):
        first, second = children[()]
        if second == int(draft(()).argmin()):
            children = {(): [first], (first,): children[(first,)]}
        yield probability, children


def as_the_only_chain(
    children: Children, target: Distributions, draft: Distributions
) -> list[Stop]:
    """A fault: the winner of several chains is verified as if it were the only one."""
    winner = max(best_chain(children, target, draft), key=lambda stop: len(stop.path)).path
    return blocks.verify_block(winner, target, draft)


FAULTS: dict[str, tuple[Callable[[Distributions], Law], Rule]] = {
    "a chosen tree verified as if it were drawn": (best(2), walked(recursive_rejection)),
    "a greedily drawn one verified as if all were drawn": (
        greedy(2, 1),
        walked(recursive_rejection),
    ),
    "a beam verified as if only the last were drawn": (beam(3, 3), walked(greedy_drafting)),
    "a pruned tree, recursive rejection": (pruned, walked(recursive_rejection)),
    "a pruned tree, traversal": (pruned, traversal),
    "the best of two chains verified as if it were the only one": (
        chains(2),
        as_the_only_chain,
    ),
    "a greedily drawn tree, traversal": (greedy(2, 1), traversal),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_rule_for_other_trees_is_found(name: str) -> None:
    assert error("random", *FAULTS[name], 3) > 1e-3


def cut(law: Callable[[Distributions], Law], size: int) -> Callable[[Distributions], Law]:
    """A fault: of a level that is cut, one parent's children are kept before another's."""

    def of(draft: Distributions) -> Law:
        for probability, children in law(draft):
            paths: list[NodePath] = [()]
            kept: dict[NodePath, list[int]] = {}
            for path in paths:  # grows meanwhile
                for token in children.get(path, ())[: size + 1 - len(paths)]:
                    paths.append((*path, token))
                    kept.setdefault(path, []).append(token)
            yield probability, kept

    return of


@pytest.mark.parametrize("verify", [walked(recursive_rejection), traversal])
def test_a_level_cut_in_another_order_than_drawn_is_found(verify: Rule) -> None:
    assert error("random", beam(3, 3, 2), verify, 2) < 1e-12
    assert error("random", cut(beam(3, 3, 3), 7), verify, 2) > 1e-3


def mean_tokens(case: str, law: Callable[[Distributions], Law], verify: Rule) -> float:
    """The expected tokens per step over all trees."""
    target = enumerated_steps.model(case, 3, 0, draft=False)
    draft = enumerated_steps.model(case, 3, 0, draft=True)
    return sum(
        probability * expected_tokens(verify(children, target, draft))
        for probability, children in law(draft)
    )


@pytest.mark.parametrize("case", CASES)
def test_the_known_relations_between_rules(case: str) -> None:
    chain = chains(1, 3)
    by_token = mean_tokens(case, chain, walked(recursive_rejection))
    by_block = mean_tokens(case, chain, block)
    assert by_block > by_token - 1e-12
    assert mean_tokens(case, chain, traversal) == pytest.approx(by_block, abs=1e-12)
    assert mean_tokens(case, chain, best_chain) == pytest.approx(by_block, abs=1e-12)
    level = branching(2)
    recursive = mean_tokens(case, level, walked(recursive_rejection))
    assert mean_tokens(case, level, traversal) == pytest.approx(recursive, abs=1e-12)
    assert mean_tokens(case, beam(2, 2), traversal) > (
        mean_tokens(case, beam(2, 2), walked(recursive_rejection)) - 1e-12
    )


def test_choosing_among_chains_pays_only_for_a_draft_model_unlike_the_target() -> None:
    for case, sign in (("random", 1), ("nearly disjoint", 1), ("equal", -1)):
        two, one = mean_tokens(case, chains(2), best_chain), mean_tokens(case, chains(1), block)
        assert sign * (two - one) > 0.001


def test_a_block_accepts_more_than_its_tokens_one_by_one() -> None:
    gain = mean_tokens("random", chains(1, 3), block) - mean_tokens(
        "random", chains(1, 3), walked(recursive_rejection)
    )
    assert gain > 0.01


@pytest.mark.parametrize("case", CASES)
def test_greedy_drafting_reaches_its_optimum(case: str) -> None:
    """The chosen children's mass, and what the target shares with the drawn one's distribution."""
    target = enumerated_steps.model(case, 3, 0, draft=False)
    draft = enumerated_steps.model(case, 3, 0, draft=True)
    rest = draft(()).clone()
    chosen = int(rest.argmax())
    rest[chosen] = 0.0
    optimum = float(target(())[chosen])
    if float(rest.sum()) > 0:
        # The chosen token has no share in `rest`.
        optimum += float(torch.minimum(target(()), rest / rest.sum()).sum())
    assert mean_tokens(case, greedy(2), walked(greedy_drafting)) == pytest.approx(1 + optimum)


def test_chains_are_verified_in_a_batch_as_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    target, draft = torch.randn(2, 4, 3, 6, generator=generator).double().softmax(-1)
    tokens = torch.randint(0, 6, (4, 3), generator=generator)
    together = blocks.block_verification(target, draft, tokens)
    for row in range(4):
        alone = blocks.block_verification(*(x[row : row + 1] for x in (target, draft, tokens)))
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_rows[row])
    assert together[1].sum(1).tolist() == pytest.approx([1.0] * 4)
