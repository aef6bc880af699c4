"""The conformance test of draft-model drafters finds faults that are planted into a good one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafttree import (
    DRAFT_MODEL,
    AcceptanceRule,
    DraftForward,
    DraftModelDrafter,
    DraftTree,
    Method,
    MethodOptions,
)
from drafttree.testing import check_drafter, check_method

COLUMNS = (-1, 0, 0, 1, 2)
NUM_DRAFT_TOKENS, DEPTH = 4, 2


class TwoBranches(DraftModelDrafter):
    """Drafts the two most likely tokens after the root, and the most likely one after each."""

    max_depth = DEPTH
    columns = COLUMNS

    def propose(
        self,
        slots: torch.Tensor,
        roots: torch.Tensor,
        seeds: torch.Tensor,
        lengths: torch.Tensor,
        sampled: torch.Tensor,
        forward: DraftForward,
    ) -> tuple[DraftTree, Any]:
        trees = self.grown(DraftTree.of_roots(roots), forward(DraftTree.of_roots(roots), 0), 2)
        trees = self.grown(trees, forward(trees, 1), 1)
        forward(trees, 3)
        return trees, None

    def grown(self, trees: DraftTree, probs: torch.Tensor, count: int) -> DraftTree:
        """The trees with children under each node of the last level."""
        first, width = trees.tokens.shape[1] - probs.shape[1], trees.tokens.shape[1]
        tokens = torch.cat([trees.tokens, probs.topk(count).indices.flatten(1).int()], 1)
        added = torch.arange(first, width, dtype=torch.int32).repeat_interleave(count)
        parents = torch.cat([trees.parents, added.expand(len(tokens), -1)], 1)
        return DraftTree(tokens, parents, torch.full_like(tokens[:, 0], tokens.shape[1]))


def check(drafter: DraftModelDrafter) -> int:
    return check_drafter(drafter, NUM_DRAFT_TOKENS, DEPTH)


def test_a_good_drafter_passes_and_is_accepted() -> None:
    assert check(TwoBranches()) > 50


def test_trees_may_be_smaller_than_the_largest() -> None:
    class OneLevel(TwoBranches):
        def propose(self, slots: Any, roots: Any, *given: Any) -> tuple[DraftTree, Any]:
            forward = given[-1]
            trees = DraftTree.of_roots(roots)
            probs = forward(trees, 0)
            if slots[0] % 2:
                return trees, None
            trees = self.grown(trees, probs, 2)
            forward(trees, 1)
            return trees, None

    assert check(OneLevel()) > 20


class LeavesUnread(TwoBranches):
    """Does not let the draft model read the leaves."""

    def propose(self, *given: Any) -> tuple[DraftTree, Any]:
        forward = given[-1]

        def all_but_leaves(trees: DraftTree, first: int) -> torch.Tensor:
            return torch.empty(0) if first == 3 else forward(trees, first)

        return super().propose(*given[:-1], all_but_leaves)


class ReadsAgain(TwoBranches):
    """Lets the draft model read whole trees at every level."""

    def propose(self, *given: Any) -> tuple[DraftTree, Any]:
        forward = given[-1]
        return super().propose(*given[:-1], lambda trees, first: forward(trees, 0)[:, first:])


class SortsChildren(TwoBranches):
    """Turns siblings around after the draft model has read them."""

    def propose(self, *given: Any) -> tuple[DraftTree, Any]:
        trees, drawn = super().propose(*given)
        order = [0, 2, 1, 4, 3]
        return DraftTree(trees.tokens[:, order], trees.parents, trees.tree_size), drawn


class OtherShape(TwoBranches):
    """Declares columns of another shape than it proposes."""

    columns = (-1, 0, 0, 0, 1)


class TooManyColumns(TwoBranches):
    """Declares more columns than its options do."""

    columns = (*COLUMNS, 2)


class ByRow(TwoBranches):
    """Drafts less likely tokens in the first row of the batch."""

    def grown(self, trees: DraftTree, probs: torch.Tensor, count: int) -> DraftTree:
        probs = probs.clone()
        probs[0].scatter_(-1, probs[0].argmax(-1, keepdim=True), 0.0)
        return super().grown(trees, probs, count)


class UsesLeaves(TwoBranches):
    """Looks at the distributions after the leaves, which hosts do not compute."""

    def propose(self, *given: Any) -> tuple[DraftTree, Any]:
        forward = given[-1]

        def used(trees: DraftTree, first: int) -> torch.Tensor:
            probs = forward(trees, first)
            assert probs[0].sum() > 0
            return probs

        return super().propose(*given[:-1], used)


class Ruled(TwoBranches):
    """Verifies by a rule of its own."""

    def undrafted_rule(self, *given: Any) -> AcceptanceRule:
        return self.rule

    def acceptance_rule(self, *given: Any) -> AcceptanceRule:
        return self.rule

    def rule(self, target: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        return target.argmax(-1).int()


class WrongDtype(Ruled):
    """Chooses tokens in int64."""

    def rule(self, target: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        return target.argmax(-1)


class Excluded(Ruled):
    """Chooses the least likely token, which filters have excluded."""

    def rule(self, target: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        return target.argmin(-1).int()


class Unrepeatable(Ruled):
    """Draws without regard to seeds."""

    def rule(self, target: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(target, 1)[:, 0].int()


def test_a_rule_of_its_own_passes() -> None:
    assert check(Ruled()) > 50


@pytest.mark.parametrize(
    ("faulty", "complaint"),
    [
        (LeavesUnread, "forward was called for 3 of 5 columns"),
        (ReadsAgain, "each must be read once, in order"),
        (SortsChildren, "were changed"),
        (OtherShape, "column 3 holds a node of depth 2, but columns says 1"),
        (TooManyColumns, "columns has 5 draft tokens, but num_draft_tokens=4"),
        (ByRow, "must not depend on the other requests"),
        (WrongDtype, r"a rule must return int32 \[1\], not torch.int64"),
        (Excluded, "a token that the target excludes"),
        (Unrepeatable, "must not depend on the other requests"),
    ],
)
def test_planted_faults_are_found(faulty: type[DraftModelDrafter], complaint: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match=complaint):
        check(faulty())


def test_the_result_for_leaves_is_no_distribution() -> None:
    with pytest.raises(IndexError):
        check(UsesLeaves())


class Options(MethodOptions):
    """Options of a method that drafts two branches."""

    model: str

    @property
    def num_draft_tokens(self) -> int:
        return NUM_DRAFT_TOKENS

    @property
    def depth(self) -> int:
        return DEPTH


def test_a_method_is_checked_in_one_line() -> None:
    method: Method[DraftModelDrafter] = Method(
        name="two_branches",
        title="Two branches",
        kind=DRAFT_MODEL,
        options=Options,
        make_drafter=lambda options, target: TwoBranches(),
    )
    assert check_method(method, {"model": "draft"}) > 50
    with pytest.raises(ValueError, match="needs the option 'model'"):
        check_method(method)
