"""Which steps the node budget measures, and what it passes to the planner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from drafttree.budget import NodeBudget, candidate_sizes, measure_forwards
from drafttree.budget.calibration import VerifiedDrafts
from drafttree.budget.forward_profile import of_trees
from drafttree.budget.planner import Planner
from drafttree.budget.tree_choice import TreeChoice
from drafttree.transfer import AsyncHostCopy
from drafttree.tree import DraftTree, Verified

DRAFT_SECONDS = 0.25
"""Time spent looking up drafts, by the tests' clock."""


SCORES = torch.tensor([[1.0, 0.5, 0.1, 0.25, 0.2, 0.0, 0.0], [1.0, 0.9, 0.8, 0.9, 0.9, 0.8, 0.8]])
"""Scores of the nodes of two requests, the root's first."""

CHOICE = TreeChoice(3, 2, 0.5)


class FixedPlanner(Planner):
    """A planner that always chooses 3 draft tokens and stores the arguments of each call."""

    def __init__(self) -> None:
        super().__init__((0, 3, 7), {1: 1.0})
        self.expected: list[list[list[float]]] = []
        self.recorded: list[tuple[int, TreeChoice, int, float, float, float]] = []
        self.of_grammars: list[tuple[int, float]] = []
        self.verified = VerifiedDrafts(np.empty(0), np.empty(0))
        self.skips = False

    def should_skip_drafting(self, batch_size: int) -> bool:
        return self.skips

    def choose(self, batch_size: int, expected_tokens: np.ndarray[Any, Any]) -> int:
        self.expected.append(expected_tokens.tolist())
        return 3

    def choose_best_first(
        self, batch_size: int, scores: np.ndarray[Any, Any], *, extends: bool = True
    ) -> TreeChoice:
        self.choose(batch_size, self.expected_tokens(scores))
        return CHOICE if extends else TreeChoice(3)

    def record_step(
        self,
        batch_size: int,
        choice: TreeChoice,
        rows: int,
        seconds: float,
        draft_seconds: float,
        emitted_tokens: float,
        added_rows: int = 0,
        given_tokens: float = 0.0,
        verified: VerifiedDrafts | None = None,
    ) -> None:
        self.recorded.append((batch_size, choice, rows, seconds, draft_seconds, emitted_tokens))
        self.of_grammars.append((added_rows, given_tokens))
        assert verified is not None
        self.verified = verified


class Steps:
    """Two requests with trees of three draft tokens, timed by a clock that the test sets."""

    def __init__(self, late: int = 0, *, pads_trees: bool = False) -> None:
        self.now = 0.0
        self.planner = FixedPlanner()
        self.budget = NodeBudget(self.planner, lambda: self.now, late=late, pads_trees=pads_trees)

    def propose(self, *slots: int) -> None:
        batch = len(slots)
        self.slots = torch.tensor(slots)
        if self.budget.should_skip_drafting(self.slots):
            return
        self.now += DRAFT_SECONDS
        self.budget.choose_best_first(self.slots, SCORES[:batch])
        tokens = torch.arange(4, dtype=torch.int32).expand(batch, -1)
        parents = torch.tensor([-1, 0, 0, 1], dtype=torch.int32).expand(batch, -1)
        self.trees = DraftTree(tokens, parents, torch.full((batch,), 4, dtype=torch.int32))

    def verify(self, *emitted: int, trees: DraftTree | None = None) -> None:
        tokens = torch.full((len(emitted), 3), -1, dtype=torch.int32)
        for row, count in enumerate(emitted):
            tokens[row, :count] = 5
        counts = torch.tensor(emitted, dtype=torch.int32)
        self.budget.verified(self.slots, trees or self.trees, Verified(tokens, tokens, counts))


def test_a_step_lasts_from_one_proposal_to_the_next() -> None:
    steps = Steps()
    steps.propose(4, 2)
    steps.now = 2.0
    steps.verify(1, 3)
    steps.now = 3.0
    steps.propose(4, 2)
    assert steps.planner.recorded == [(2, CHOICE, 8, 3.0, DRAFT_SECONDS, 4)]
    steps.now = 3.5
    steps.verify(2, 1)
    steps.propose(4, 2)
    assert steps.planner.recorded[1:] == [(2, CHOICE, 8, 0.5, DRAFT_SECONDS, 3)]


def test_overlapping_steps_last_from_the_next_proposal_to_the_one_after_it() -> None:
    steps = Steps(late=1)
    for began, emitted in ((0.0, (1, 3)), (2.0, (2, 2)), (5.0, (1, 1)), (9.0, (3, 3))):
        steps.now = began
        steps.propose(4, 2)
        steps.verify(*emitted)
    expected = [(2, CHOICE, 8, seconds, DRAFT_SECONDS, 4) for seconds in (3.0, 4.0)]
    assert steps.planner.recorded == expected
    steps.propose(4)
    steps.verify(1)
    steps.propose(4)
    assert len(steps.planner.recorded) == 2, "another batch"


def test_a_late_step_is_recorded_with_the_plan_that_was_made_for_it() -> None:
    planner = Planner((0, 3), {1: 1.0, 4: 1.0}, late=1)
    expected = [np.array([[1.0, tokens]], np.float32) for tokens in (3.0, 2.0, 4.0)]
    for step, tokens in enumerate(expected):
        if step > 1:
            planner.record_step(1, TreeChoice(3), 4, 1.0, 0.0, 2.0)
        assert not planner.should_skip_drafting(1)
        assert planner.choose(1, tokens) == 3
    (row,) = (each for each in planner.explain() if each["num_draft_tokens"] == 3)
    assert row["expected_tokens"] == pytest.approx(3.0, rel=0.1)


def test_plain_steps_are_timed_too() -> None:
    steps = Steps()
    steps.planner.skips = True
    steps.propose(4, 2)
    steps.now = 2.0
    steps.verify(1, 1, trees=DraftTree.of_roots(torch.tensor([7, 8], dtype=torch.int32)))
    steps.propose(4, 2)
    assert steps.planner.recorded == [(2, TreeChoice(0), 2, 2.0, 0.0, 2)]


@pytest.mark.parametrize("now", [DRAFT_SECONDS, 0.0, -3600.0])
def test_steps_in_which_the_clock_stands_still_or_goes_back_are_discarded(now: float) -> None:
    steps = Steps()
    steps.propose(4, 2)
    steps.now = now
    steps.verify(1, 3)
    steps.propose(4, 2)
    assert steps.planner.recorded == []
    steps.now += 2.0
    steps.verify(1, 1)
    steps.propose(4, 2)
    assert [seconds for *_, seconds, _, _ in steps.planner.recorded] == [2.0 + DRAFT_SECONDS]


def test_rows_are_those_that_were_verified_if_the_outcome_says_so() -> None:
    steps = Steps()
    steps.propose(4, 2)
    steps.now = 2.0
    tokens = torch.tensor([[5, -1, -1], [5, 6, -1]], dtype=torch.int32)
    counts = torch.tensor([1, 2], dtype=torch.int32)
    steps.budget.verified(steps.slots, steps.trees, Verified(tokens, tokens, counts, rows=5))
    steps.propose(4, 2)
    assert steps.planner.recorded == [(2, CHOICE, 5, 2.0, DRAFT_SECONDS, 3)]


@pytest.mark.parametrize("further", [0, 3])
@pytest.mark.parametrize(("pads_trees", "chosen"), [(False, 6), (True, 4)])
def test_what_grammars_add_is_told_apart(pads_trees: bool, chosen: int, further: int) -> None:
    """Of two trees with the largest choice and with 2 nodes, which grammars have extended.

    What they add may have been among further candidates.
    """
    steps = Steps(pads_trees=pads_trees)
    steps.propose(4, 2)
    steps.now = 2.0
    tokens = torch.tensor([[5, 6, -1], [5, 6, 7]], dtype=torch.int32)
    counts = torch.tensor([2, 3], dtype=torch.int32)
    of_grammars = torch.tensor([[chosen + further, 0], [2, 2]])
    verified = Verified(tokens, tokens, counts, rows=14, bound=of_grammars)
    steps.budget.verified(steps.slots, steps.trees, verified)
    steps.propose(4, 2)
    assert [step[2] for step in steps.planner.recorded] == [14]
    assert steps.planner.of_grammars == [(6, 2)]
    draft_tokens, accepted = steps.planner.verified
    assert (draft_tokens.tolist(), accepted.tolist()) == (2 * [chosen - 1], [1, 0])
    steps.verify(1, 1)
    steps.now = 4.0
    steps.propose(4, 2)
    assert steps.planner.of_grammars[1:] == [(0, 0)]


def test_a_request_for_which_nothing_was_proposed_has_no_drafts_beside_grammars() -> None:
    steps = Steps()
    steps.propose(4, 2)
    steps.now = 2.0
    tokens = torch.tensor([[5, 6, -1], [5, -1, -1]], dtype=torch.int32)
    counts = torch.tensor([2, 1], dtype=torch.int32)
    bound = torch.tensor([[4, 0], [1, 0]])
    verified = Verified(tokens, tokens, counts, rows=5, bound=bound)
    steps.budget.verified(steps.slots, steps.trees, verified)
    steps.propose(4, 2)
    draft_tokens, accepted = steps.planner.verified
    assert (draft_tokens.tolist(), accepted.tolist()) == ([5, 0], [1, 0])


def test_the_expected_tokens_of_a_size_are_those_of_its_best_nodes() -> None:
    steps = Steps()
    steps.propose(4, 2)
    first, second = steps.planner.expected[0]
    assert first == pytest.approx([1.0, 1.95, 2.05])
    assert second == pytest.approx([1.0, 3.7, 6.1])


def test_steps_that_were_not_verified_as_proposed_are_discarded() -> None:
    def another_batch(steps: Steps) -> None:
        steps.verify(1, 1)
        steps.propose(4)

    def a_prefill_between(steps: Steps) -> None:
        steps.verify(1, 1)
        steps.budget.discard()

    def a_partial_prefill(steps: Steps) -> None:
        steps.verify(1, 0)

    def the_last_part_of_a_prompt(steps: Steps) -> None:
        one = torch.ones(2, 1, dtype=torch.int32)
        read = Verified(one - 1, one, one[:, 0], reads_prompts=True)
        steps.budget.verified(steps.slots, DraftTree.of_roots(one[:, 0]), read)

    def two_steps(steps: Steps) -> None:
        steps.verify(1, 1)
        steps.verify(1, 1)

    def never_verified(steps: Steps) -> None:
        pass

    for happens in (
        another_batch,
        a_prefill_between,
        a_partial_prefill,
        the_last_part_of_a_prompt,
        two_steps,
        never_verified,
    ):
        steps = Steps()
        steps.propose(4, 2)
        steps.now = 1.0
        happens(steps)
        steps.now = 2.0
        steps.propose(4, 2)
        assert steps.planner.recorded == [], happens.__name__


def test_steps_that_the_host_truncated_count_with_their_rows() -> None:
    steps = Steps()
    steps.propose(4, 2)
    cut = DraftTree(
        steps.trees.tokens[:, :2], steps.trees.parents[:, :2], steps.trees.tree_size - 2
    )
    steps.verify(1, 2, trees=cut)
    steps.now = 2.0
    steps.propose(4, 2)
    assert steps.planner.recorded == [(2, CHOICE, 4, 2.0, DRAFT_SECONDS, 3)]
    draft_tokens, accepted = steps.planner.verified
    assert (draft_tokens.tolist(), accepted.tolist()) == ([1, 1], [0, 1])


def test_forwards_of_several_trees_are_measured() -> None:
    shapes: list[tuple[int, int, int, bool, int]] = []

    def forwards(*shape: int | bool) -> list[float]:
        shapes.append(shape)  # type: ignore[arg-type]
        return [1.0]

    measure = of_trees(forwards, 16, longest=100, pool=600)
    measured = [measure(num_tokens) for num_tokens in (1, 16, 24, 33, 128, 256, 81)]
    assert measured == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, pytest.approx(81 / 78)]
    assert shapes == [
        (1, 1, 99, False, 1),
        (1, 16, 84, True, 1),
        (2, 12, 88, True, 1),
        (3, 11, 89, True, 1),
        (8, 16, 59, True, 1),
        (16, 16, 21, True, 1),
        (6, 13, 87, True, 1),
    ]


def test_forwards_are_measured_up_to_the_largest_step() -> None:
    measured: list[int] = []

    def measure_forward(num_tokens: int) -> float:
        measured.append(num_tokens)
        return 1.0 + num_tokens

    seconds = measure_forwards(measure_forward, 17)
    assert seconds == {count: 1.0 + count for count in (1, 2, 4, 8, 12, 16, 17)}
    assert set(measured) == set(seconds)
    assert measure_forwards(measure_forward, 1) == {1: 2.0}


def test_short_forwards_are_measured_more_often_than_long_ones() -> None:
    times = [9.0, 0.01, 0.03, 0.02, 9.0, 0.2]
    seconds = measure_forwards(lambda _: times.pop(0), 2)
    assert seconds == {1: 0.02, 2: 0.2}
    assert not times


def test_the_candidate_sizes_end_with_the_largest() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert candidate_sizes(80, cpu)[-2:] == (63, 80)
    assert candidate_sizes(10, cpu) == (0, 3, 7, 10)
    assert candidate_sizes(1, cpu) == (0, 1)
    assert candidate_sizes(80, cuda) == (0, 3, 7, 15, 31, 80)
    assert candidate_sizes(20, cuda) == (0, 3, 7, 15, 20)


@pytest.fixture
def in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to the host take a while."""

    def start(tensor: torch.Tensor) -> AsyncHostCopy:
        return AsyncHostCopy(tensor, torch.Event("cpu"))

    monkeypatch.setattr(AsyncHostCopy, "of", start)
    monkeypatch.setattr(AsyncHostCopy, "wait", lambda copy: copy.values)


def test_scores_of_a_device_are_read_two_steps_later_if_steps_overlap(in_flight: None) -> None:
    steps = Steps(late=1)
    for worth in (0.9, 0.8, 0.7, 0.6):
        scores = torch.full((1, 7), worth)
        steps.budget.choose_best_first(torch.tensor([4]), scores)
    most = [round(each[0][-1], 1) for each in steps.planner.expected]
    assert most == [1.0, 1.0, pytest.approx(1 + 6 * 0.9), pytest.approx(1 + 6 * 0.8)]


def test_scores_of_a_device_are_read_in_the_next_step(in_flight: None) -> None:
    steps = Steps()
    steps.propose(4, 2)
    first = steps.planner.expected[0]
    better = torch.tensor([[1.0, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]])
    steps.budget.choose_best_first(torch.tensor([4]), better)
    assert steps.planner.expected[1] == first
    steps.budget.choose_best_first(torch.tensor([4]), better)
    assert steps.planner.expected[2] == [pytest.approx([1.0, 3.7, 6.4])]
