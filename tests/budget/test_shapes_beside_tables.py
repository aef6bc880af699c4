"""The planner of shapes beside tables: nothing is drafted, the tables draft alone, or the layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from drafttree.budget.level_acceptance import NO_DRAFTS
from drafttree.budget.planner import Planner
from drafttree.budget.shape_planner import ShapePlanner
from drafttree.tree import DraftTree, Verified
from drafttree.tree_shape import TreeShape

SIZES = (0, 3, 7, 15)
SHAPES = tuple(TreeShape(depth, 4, 4 * depth) for depth in (1, 2, 3))
LOOKUP = 0.0003
PLAIN, TABLES, LAYER = "plain", "tables", "layer"


@dataclass(frozen=True)
class Texts:
    """How likely drafts are accepted, and what the layer takes.

    Attributes:
        copied: Probability that the best node of the tables is accepted; of each further one it is
            four fifths of the one before.
        layer: Probability that the path goes on at a level of the layer's trees.
        level: Seconds of a level of the layer.
    """

    copied: float
    layer: float
    level: float = 0.002

    @property
    def scores(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return (self.copied * 0.8 ** np.arange(SIZES[-1])).astype(np.float32)


@dataclass(frozen=True)
class Done:
    kind: str
    seconds: float
    tokens: float


def forward(rows: int) -> float:
    return 0.03 + 0.0006 * rows


def best_rates(texts: Texts) -> dict[str, float]:
    """Tokens per second of one request with the best tree of each kind."""
    sums = texts.scores.cumsum()
    return {
        PLAIN: 1 / forward(1),
        TABLES: max((1 + sums[size - 1]) / (forward(1 + size) + LOOKUP) for size in SIZES[1:]),
        LAYER: max(
            sum(texts.layer**level for level in range(1 + shape.depth))
            / (forward(1 + shape.nodes) + (1 + shape.depth) * texts.level)
            for shape in SHAPES
        ),
    }


def run(
    texts_at: Callable[[int], Texts], steps: int, batch: int = 1, drift: float = 1.0, seed: int = 0
) -> list[Done]:
    """Steps as they are chosen; forwards take `drift` times as long as at the start."""
    rng = np.random.default_rng(seed)
    forwards = {rows: forward(rows) for rows in (1, 2, 4, 8, 16, 32, 64, 128)}
    base = Planner(SIZES, forwards)
    planner = ShapePlanner(SHAPES, forwards, base=base)
    done = []
    for step in range(steps):
        texts = texts_at(step)
        scores = np.tile(texts.scores, (batch, 1))
        plan = planner.choose(batch)
        shape, seconds = plan.shape, float(np.exp(0.03 * rng.standard_normal()))
        if shape.depth:
            base.choose_best_first(batch, scores)
            goes_on = (rng.random((batch, shape.depth)) < texts.layer).cumprod(1) > 0
            path = np.zeros((batch, 1 + shape.depth), np.int32)
            path[:, 1:] = np.where(goes_on, 1 + 4 * np.arange(shape.depth), -1)
            verified = Verified(torch.from_numpy(path), torch.empty(0), torch.empty(0))
            planner.acceptance.add(shape, beam(shape, batch), verified)
            kind, nodes, drafting = LAYER, shape.nodes, (1 + shape.depth) * texts.level
            tokens = batch + int(goes_on.sum())
            rows = batch * (1 + nodes)
            seconds = seconds * drift * forward(rows) + drafting
        else:
            choice, drafting = None, 0.0
            if not base.should_skip_drafting(batch):
                choice, drafting = base.choose_best_first(batch, scores), LOOKUP
            nodes = 0 if choice is None else choice.num_draft_tokens + choice.spine
            tokens = batch + int((rng.random((batch, nodes)) < texts.scores[:nodes]).sum())
            kind, rows = TABLES if nodes else PLAIN, batch * (1 + nodes)
            seconds = seconds * drift * forward(rows) + drafting
            chosen = base._plans[-1].choice
            base.record_step(batch, chosen, rows, seconds, drafting, tokens)
        planner.record_step(plan, batch, rows, seconds, drafting, tokens)
        done.append(Done(kind, seconds, tokens / batch))
    return done


def beam(shape: TreeShape, batch: int) -> DraftTree:
    """Trees whose levels are the children of the first node of the level above."""
    parents = [-1, *(max(1 + 4 * (level - 1), 0) for level in range(shape.depth) for _ in range(4))]
    tensor = torch.tensor(parents, dtype=torch.int32).expand(batch, -1)
    return DraftTree(tensor, tensor, torch.full((batch,), len(parents), dtype=torch.int32))


def rate(steps: Sequence[Done]) -> float:
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def share(steps: Sequence[Done], kind: str) -> float:
    return Counter(step.kind for step in steps)[kind] / len(steps)


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        pytest.param(Texts(0.01, 0.05), PLAIN, id="nothing is accepted"),
        pytest.param(Texts(0.6, 0.05), TABLES, id="tables"),
        pytest.param(Texts(0.6, 0.7, level=0.02), TABLES, id="the layer is dear"),
        pytest.param(Texts(0.05, 0.8), LAYER, id="layer"),
        pytest.param(Texts(0.3, 0.9), LAYER, id="the layer gives more"),
    ],
)
@pytest.mark.parametrize("drift", [1.0, 1.4])
def test_what_pays_most_is_drafted(texts: Texts, kind: str, drift: float) -> None:
    rates = best_rates(texts)
    assert max(rates, key=lambda each: rates[each]) == kind
    steps = run(lambda step: texts, 2500, drift=drift)
    assert share(steps[1000:], kind) > 0.9
    if drift == 1:
        # In a batch of steps of which a few explore.
        assert rate(steps[1000:]) > 0.95 * rates[kind]


def test_what_is_drafted_follows_the_texts() -> None:
    parts = {TABLES: Texts(0.6, 0.1), LAYER: Texts(0.01, 0.85), PLAIN: Texts(0.01, 0.03)}
    order = [TABLES, LAYER, PLAIN, LAYER, TABLES]
    steps = run(lambda step: parts[order[step // 1000]], 5000, batch=2)
    for part, kind in enumerate(order):
        assert share(steps[1000 * part + 600 : 1000 * (part + 1)], kind) > 0.8, kind


@pytest.mark.parametrize("copied", [0.01, 0.6])
def test_a_layer_that_gives_little_costs_little(copied: float) -> None:
    """From the first step on, compared with what the tables' own planner gives."""
    texts = Texts(copied, 0.2, level=0.004)
    forwards = {rows: forward(rows) for rows in (1, 2, 4, 8, 16)}
    best = max(best_rates(texts)[kind] for kind in (PLAIN, TABLES))
    assert rate(run(lambda step: texts, 2500)) > 0.965 * best
    assert ShapePlanner(SHAPES, forwards).choose(1).shape != NO_DRAFTS


def test_steps_of_both_are_reported_together() -> None:
    forwards = {rows: forward(rows) for rows in (1, 2, 4, 8, 16)}
    base = Planner(SIZES, forwards)
    planner = ShapePlanner(SHAPES, forwards, base=base)
    plan = planner.choose(1)
    assert plan.shape.depth
    planner.record_step(plan, 1, 1 + plan.shape.nodes, 0.04, 0.004, 2)
    clock = base.costs.clock
    assert clock == planner.costs.clock == 1
    assert not base.should_skip_drafting(1)
    choice = base.choose_best_first(1, Texts(0.9, 0.5).scores[None])
    assert choice.drafts
    base.record_step(1, choice, 1 + choice.num_draft_tokens + choice.spine, 0.04, LOOKUP, 3)
    reported = {row["num_draft_tokens"]: row["realised_tokens"] for row in planner.explain()}
    assert reported == {plan.shape.nodes: 2, choice.num_draft_tokens: 3}
