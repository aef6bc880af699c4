"""The planner of shapes beside tables: nothing is drafted, the tables draft alone, or a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from simulated_drafting import alike, beams

from drafttree.budget.level_acceptance import NO_DRAFTS
from drafttree.budget.planner import Planner
from drafttree.budget.shape_planner import ShapePlanner
from drafttree.tree import Verified
from drafttree.tree_shape import TreeShape
from lyanna_plugin import LyannaOptions
from rsd_plugin import RsdOptions

SIZES = (0, 3, 7, 15)
LYANNA = LyannaOptions(model="any", nodes="auto", tables=True).shapes
RSD = RsdOptions(model="any", tree="auto", tables=True).shapes
LOOKUP = 0.0003
ANSWER = 256
"""Most tokens of a request that a model can have missed."""
PLAIN, TABLES, MODEL = "plain", "tables", "model"


@dataclass(frozen=True)
class Texts:
    """How likely drafts are accepted, and what the model takes.

    Attributes:
        copied: Probability that the best node of the tables is accepted; of each further one it is
            four fifths of the one before.
        model: Probability that the path goes on at a level of the model's trees.
        level: Seconds of a level of the model.
        read: Seconds of each token that the model has missed, once it is to draft.
    """

    copied: float
    model: float
    level: float = 0.002
    read: float = 0.0

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


def planners(shapes: Sequence[TreeShape]) -> tuple[Planner, ShapePlanner]:
    """The planner of the tables' trees, and that of a model's shapes beside it."""
    forwards = {rows: forward(rows) for rows in (1, 2, 4, 8, 16, 32, 64, 128)}
    base = Planner(SIZES, forwards)
    return base, ShapePlanner(shapes, forwards, base=base)


def best_rates(texts: Texts, shapes: Sequence[TreeShape]) -> dict[str, float]:
    """Tokens per second of one request with the best tree of each kind."""
    sums = texts.scores.cumsum()
    return {
        PLAIN: 1 / forward(1),
        TABLES: max((1 + sums[size - 1]) / (forward(1 + size) + LOOKUP) for size in SIZES[1:]),
        MODEL: max(
            sum(texts.model**level for level in range(1 + shape.depth))
            / (forward(1 + shape.nodes) + (1 + shape.depth) * texts.level)
            for shape in shapes
        ),
    }


def run(
    texts_at: Callable[[int], Texts],
    steps: int,
    shapes: Sequence[TreeShape],
    batch: int = 1,
    drift: float = 1.0,
    seed: int = 0,
) -> list[Done]:
    """Steps as they are chosen; forwards take `drift` times as long as at the start."""
    rng = np.random.default_rng(seed)
    base, planner = planners(shapes)
    done, unread = [], 0
    for step in range(steps):
        texts = texts_at(step)
        scores = np.tile(texts.scores, (batch, 1))
        missed = unread * texts.read
        plan = planner.choose(batch, lambda: missed)  # noqa: B023
        shape, seconds = plan.shape, float(np.exp(0.03 * rng.standard_normal()))
        if shape.depth:
            base.choose_best_first(batch, scores)
            goes_on = (rng.random((batch, shape.depth)) < texts.model).cumprod(1) > 0
            path = np.zeros((batch, 1 + shape.depth), np.int32)
            path[:, 1:] = np.where(goes_on, 1 + shape.width * np.arange(shape.depth), -1)
            verified = Verified(torch.from_numpy(path), torch.empty(0), torch.empty(0))
            planner.acceptance.add(shape, beams(shape, batch), verified)
            kind, nodes, drafting = MODEL, shape.nodes, (1 + shape.depth) * texts.level
            tokens = batch + int(goes_on.sum())
            rows = batch * (1 + nodes)
            seconds = seconds * drift * forward(rows) + drafting
            catch_up, unread = missed, 0
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
            catch_up, unread = 0.0, min(unread + tokens, batch * ANSWER)
        planner.record_step(
            *(plan, batch, rows, seconds, drafting, tokens),
            *alike(batch, rows // batch - 1, tokens),
            catch_up,
        )
        done.append(Done(kind, seconds + catch_up, tokens / batch))
    return done


def rate(steps: Sequence[Done]) -> float:
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def share(steps: Sequence[Done], kind: str) -> float:
    return Counter(step.kind for step in steps)[kind] / len(steps)


of_both = pytest.mark.parametrize("shapes", [LYANNA, RSD], ids=["lyanna", "rsd"])


@of_both
@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        pytest.param(Texts(0.01, 0.05), PLAIN, id="nothing is accepted"),
        pytest.param(Texts(0.6, 0.05), TABLES, id="tables"),
        pytest.param(Texts(0.6, 0.7, level=0.02), TABLES, id="the model is dear"),
        pytest.param(Texts(0.05, 0.8), MODEL, id="model"),
        pytest.param(Texts(0.3, 0.9), MODEL, id="the model gives more"),
    ],
)
@pytest.mark.parametrize("drift", [1.0, 1.4])
def test_what_pays_most_is_drafted(
    texts: Texts, kind: str, drift: float, shapes: Sequence[TreeShape]
) -> None:
    rates = best_rates(texts, shapes)
    assert max(rates, key=lambda each: rates[each]) == kind
    steps = run(lambda step: texts, 2500, shapes, drift=drift)
    assert share(steps[1000:], kind) > 0.9
    if drift == 1:
        # In a batch of steps of which a few explore.
        assert rate(steps[1000:]) > 0.95 * rates[kind]


@pytest.mark.parametrize(
    ("shapes", "read"), [(LYANNA, 0.0), (RSD, 0.0), (RSD, 0.0001)], ids=["lyanna", "rsd", "reads"]
)
def test_what_is_drafted_follows_the_texts(shapes: Sequence[TreeShape], read: float) -> None:
    parts = {
        TABLES: Texts(0.6, 0.1, read=read),
        MODEL: Texts(0.01, 0.85, read=read),
        PLAIN: Texts(0.01, 0.03, read=read),
    }
    order = [TABLES, MODEL, PLAIN, MODEL, TABLES]
    steps = run(lambda step: parts[order[step // 1000]], 5000, shapes, batch=2)
    for part, kind in enumerate(order):
        assert share(steps[1000 * part + 600 : 1000 * (part + 1)], kind) > 0.8, kind


@of_both
@pytest.mark.parametrize("copied", [0.01, 0.6])
def test_a_model_that_gives_little_costs_little(copied: float, shapes: Sequence[TreeShape]) -> None:
    """From the first step on, compared with what the tables' own planner gives."""
    texts = Texts(copied, 0.2, level=0.004, read=0.0001 if shapes is RSD else 0.0)
    best = max(best_rates(texts, shapes)[kind] for kind in (PLAIN, TABLES))
    assert rate(run(lambda step: texts, 2500, shapes)) > 0.965 * best
    assert planners(shapes)[1].choose(1).shape != NO_DRAFTS


def test_steps_of_both_are_reported_together() -> None:
    base, planner = planners(LYANNA)
    plan = planner.choose(1)
    assert plan.shape.depth
    nodes = plan.shape.nodes
    planner.record_step(plan, 1, 1 + nodes, 0.04, 0.004, 2, *alike(1, nodes, 2))
    clock = base.costs.clock
    assert clock == planner.costs.clock == 1
    assert not base.should_skip_drafting(1)
    choice = base.choose_best_first(1, Texts(0.9, 0.5).scores[None])
    assert choice.drafts
    base.record_step(1, choice, 1 + choice.num_draft_tokens + choice.spine, 0.04, LOOKUP, 3)
    reported = {row["num_draft_tokens"]: row["realised_tokens"] for row in planner.explain()}
    assert reported == {plan.shape.nodes: 2, choice.num_draft_tokens: 3}
