"""Requests whose text is nearly certain take further nodes; the others do not wait for them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from planner_policy import SIZES, Planned
from simulated_decoding import Decoder, Scenario

from drafttree.budget import NodeBudget, TreeChoice
from drafttree.budget.calibration import VerifiedDrafts
from drafttree.budget.planner import Planner

FORWARDS = {rows: 0.03 + 0.0006 * rows for rows in (1, 8, 64, 512, 2560)}
FloatArray = np.ndarray[Any, Any]


def guesses(batch_size: int) -> FloatArray:
    """Scores of drafts of which 2 to 3 are accepted."""
    scores = 0.4 * 0.85 ** np.arange(80.0)
    return np.tile(scores, (batch_size, 1)).astype(np.float32)


def with_copies(batch_size: int, copies: int, length: int = 40) -> FloatArray:
    """The same, but the first requests copy a text of `length` tokens."""
    scores = guesses(batch_size)
    scores[:copies] = 0.0
    scores[:copies, :length] = 0.98
    return scores


def chosen(scores: FloatArray, forwards: dict[int, float] = FORWARDS) -> TreeChoice:
    """The usual choice for the same scores in each step, trials aside."""
    batch_size, planner = len(scores), Planner(SIZES, forwards)
    choices: list[TreeChoice] = []
    for _ in range(200):
        choice, lookup = TreeChoice(0), 0.0
        if not planner.should_skip_drafting(batch_size):
            choice, lookup = planner.choose_best_first(batch_size, scores), 0.0005
        nodes = choice.num_draft_tokens
        taken = scores[:, nodes : nodes + choice.spine] >= choice.min_score
        tokens = scores[:, :nodes].sum() + (scores[:, nodes : nodes + choice.spine] * taken).sum()
        rows = batch_size * (1 + nodes) + int(taken.sum())
        seconds = planner.costs.curve.seconds(rows) + lookup
        planner.record_step(batch_size, choice, rows, seconds, lookup, batch_size + float(tokens))
        choices.append(choice)
    sizes = Counter((choice.num_draft_tokens, choice.spine) for choice in choices[100:])
    usual = sizes.most_common(1)[0][0]
    return next(
        choice for choice in reversed(choices) if (choice.num_draft_tokens, choice.spine) == usual
    )


@pytest.mark.parametrize("batch_size", [2, 4, 8])
def test_one_request_that_copies_takes_many_nodes_and_the_others_few(batch_size: int) -> None:
    alone, mixed = chosen(guesses(batch_size)), chosen(with_copies(batch_size, 1))
    assert alone.spine == 0
    assert mixed.num_draft_tokens <= 15
    assert mixed.num_draft_tokens + mixed.spine >= 40
    assert mixed.num_draft_tokens + mixed.spine <= SIZES[-1]
    further = with_copies(batch_size, 1)[:, mixed.num_draft_tokens :] >= mixed.min_score
    assert further[0].sum() == 40 - mixed.num_draft_tokens
    assert not further[1:].any()


def test_a_sure_copy_is_worth_its_rows_for_one_request() -> None:
    choice = chosen(with_copies(1, 1))
    scores = with_copies(1, 1)[0]
    nodes = choice.num_draft_tokens
    further = scores[nodes : nodes + choice.spine] >= choice.min_score
    assert nodes + further.sum() >= 40


def test_no_further_nodes_where_rows_cost_more_than_they_save() -> None:
    assert not chosen(with_copies(4, 1), {1: 0.03, 2: 0.06, 1000: 30.0}).drafts


def test_min_score_rises_with_the_cost_of_a_row() -> None:
    cheap, dear = (
        chosen(with_copies(4, 1), {1: 0.03, 2560: 0.03 + 2560 * by_row})
        for by_row in (0.0003, 0.0009)
    )
    assert cheap.spine > 0
    assert dear.spine > 0
    assert cheap.min_score < dear.min_score


def test_many_requests_that_copy_do_not_make_the_others_slower_than_plain() -> None:
    """With further nodes, the mean time per token of the requests is below that of plain steps."""
    curve = Planner(SIZES, FORWARDS).costs.curve
    seen = 0
    for copies in range(1, 33, 3):
        scores = with_copies(32, copies)
        choice = chosen(scores)
        nodes = choice.num_draft_tokens
        if not choice.spine:
            continue
        taken = scores[:, nodes : nodes + choice.spine] >= choice.min_score
        rows = 32 * (1 + nodes) + int(taken.sum())
        further = scores[:, nodes : nodes + choice.spine] * taken
        tokens = 1 + scores[:, :nodes].sum(1) + further.sum(1)
        seconds, plain = curve.seconds(rows), curve.seconds(32)
        assert seconds * float((1 / tokens).mean()) <= plain * 1.001
        seen += 1
    assert seen > 3


def test_scores_that_prove_too_high_end_the_further_nodes() -> None:
    planner = Planner(SIZES, FORWARDS)
    scores = with_copies(4, 1)
    spines, spent, emitted = [], 0.0, 0
    for step in range(450):
        if step == 120:
            spent = emitted = 0
        if planner.should_skip_drafting(4):
            planner.record_step(4, TreeChoice(0), 4, 0.0324, 0.0, 4)
            spent, emitted = spent + 0.0324, emitted + 4
            continue
        choice = planner.choose_best_first(4, scores)
        further = 40 - choice.num_draft_tokens if choice.spine else 0
        rows = 4 * (1 + choice.num_draft_tokens) + further
        nodes = np.array([choice.num_draft_tokens + further, *3 * [choice.num_draft_tokens]])
        accepted = np.array([nodes[0], 1, 1, 1] if step < 120 else [0, 1, 0, 0])
        step_seconds, tokens = 0.03 + 0.0006 * rows, 4 + int(accepted.sum())
        planner.record_step(
            *(4, choice, rows, step_seconds, 0.0005, tokens),
            verified=VerifiedDrafts(nodes, accepted),
        )
        spent, emitted = spent + step_seconds, emitted + tokens
        spines.append(choice.spine > 0)
    assert sum(spines[60:120]) > 40
    assert sum(spines[-50:]) <= 5
    assert emitted / spent > 0.7 * 4 / 0.0324


@pytest.mark.parametrize(("batch_size", "gain"), [(1, 0.97), (4, 1.03), (8, 1.03), (16, 1.0)])
def test_spines_make_batches_with_copies_faster(batch_size: int, gain: float) -> None:
    scenario = Scenario(copies=0.3, batch=lambda step: batch_size)
    rates = [
        sum(
            Decoder(scenario, seed).run(Planned(scenario, spines=spines), 800).tokens_per_second()
            for seed in range(4)
        )
        for spines in (False, True)
    ]
    assert rates[1] > gain * rates[0]


def test_the_rows_of_a_step_decide_its_cost() -> None:
    """Steps of a batch of 4 with 3 draft tokens each, and of one request with 40 further ones."""
    planner = Planner(SIZES, {1: 0.05, 2560: 0.05})
    for _ in range(100):
        planner.record_step(4, TreeChoice(3), 16, 0.04, 0.0, 4)
        planner.record_step(4, TreeChoice(3, 44, 0.5), 56, 0.08, 0.0, 40)
    assert planner.costs.seconds(4, 16) == pytest.approx(0.04, rel=0.05)
    assert planner.costs.seconds(4, 56) == pytest.approx(0.08, rel=0.05)
    assert 0.05 < planner.costs.seconds(4, 36) < 0.075


def test_fewer_scores_than_nodes_are_taken_as_they_are() -> None:
    budget = NodeBudget.from_forwards(SIZES, FORWARDS)
    slots = torch.arange(2)
    scores = torch.tensor([[1.0, 0.1, 0.98, 0.97, 0.96], [1.0, 0.3, 0.2, 0.1, 0.05]])
    choice = budget.choose_best_first(slots, scores)
    assert isinstance(choice, TreeChoice)
    assert choice.num_draft_tokens + choice.spine <= SIZES[-1]
    assert choice.drafts
