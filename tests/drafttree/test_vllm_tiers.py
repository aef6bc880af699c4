"""The scheduler's decisions on tiers meet their outcomes, in order and with the right times."""

from __future__ import annotations

import pickle
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.outputs import ModelRunnerOutput

from drafttree.budget.model_drafts import ModelDrafts
from drafttree.budget.scores import expected_tokens
from drafttree.budget.tier_explanation import TierExplanation
from drafttree.tree_shape import TreeShape
from drafttree.vllm import patches
from drafttree.vllm.v2.draft_clock import DraftClock
from drafttree.vllm.v2.tier_report import ShapeReport, TierReport, TierReports
from drafttree.vllm.v2.tier_steps import TierSteps

SIZES = (0, 3, 7)
COSTS = {1: 0.01, 64: 0.011}
CHAINS = (TreeShape(1, 1, 1), TreeShape(3, 1, 3))


class Engine:
    """Schedules steps and delivers their outputs `ahead` steps later, as the engine does.

    Attributes:
        running: The requests.
        sizes: Draft tokens of each request in each step that was scheduled.
        explanation: What the scheduler has told of its choices.
        opted_out: Whether the places of the requests' draft tokens stay empty.
    """

    opted_out = False

    def __init__(self, ahead: int, table: list[int] | None = None) -> None:
        self.running = ["a", "b"]
        self.now = 100.0
        self.steps = TierSteps(table or [0, 7, 7, 3, 0], lambda: self.running, lambda: self.now)
        self.sizes: list[int] = []
        self.explanation = TierExplanation()
        self._ahead = ahead
        self._drafts = 0
        self._looked_up = False
        self._in_flight: list[Any] = []

    def step(self, prompts: int = 0, seconds: float = 0.01) -> None:
        self.steps.before_schedule()
        drafts = {request: [-1] * self._drafts for request in self.running if self._drafts}
        tokens = dict.fromkeys(self.running, 1 + self._drafts)
        tokens |= {f"prompt {number}": 20 for number in range(prompts)}
        self.sizes.append(self._drafts)
        size = self.steps[len(tokens)] if tokens else 7
        scheduled = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens=drafts,
            looked_up=self._looked_up,
        )
        self.steps.scheduled(scheduled)
        if tokens:
            self._drafts, self._looked_up = size, self.steps.looks_up
        self._in_flight.append(scheduled)
        if len(self._in_flight) > self._ahead:
            self.now += seconds
            self.deliver()

    def deliver(self) -> None:
        scheduled = self._in_flight.pop(0)
        requests = list(scheduled.num_scheduled_tokens)
        accepted = bool(scheduled.scheduled_spec_decode_tokens) and not self.opted_out
        output = SimpleNamespace(
            req_ids=requests,
            req_id_to_index={request: place for place, request in enumerate(requests)},
            sampled_token_ids=[[7] * (1 + accepted) for _ in requests],
        )
        patches.attach_report(output, self.report(scheduled))
        self.steps.arrived(scheduled, output)
        if (update := self.steps.take_update()) is not None:
            self.explanation.add(pickle.loads(pickle.dumps(update)))

    def report(self, scheduled: Any) -> TierReport | ShapeReport:
        assert scheduled.looked_up or not scheduled.scheduled_spec_decode_tokens
        expected = np.full((len(scheduled.num_scheduled_tokens), len(SIZES)), np.nan, np.float32)
        if scheduled.looked_up:
            expected[:] = (1, 2, 2)
        return TierReport(SIZES, COSTS, expected)


class Modelled(Engine):
    """A model drafts chains, of which the first token is accepted."""

    def report(self, scheduled: Any) -> TierReport | ShapeReport:
        drafts = scheduled.scheduled_spec_decode_tokens
        requests, size = (
            len(scheduled.num_scheduled_tokens),
            max(map(len, drafts.values()), default=0),
        )
        path = np.full((requests, 2), -1, np.int32)
        path[:, 0] = 0
        path[: len(drafts), 1] = -1 if self.opted_out else 1
        parents = np.tile(np.arange(-1, size, dtype=np.int32), (requests, 1))
        if self.opted_out:
            parents[:] = -1
        assert not scheduled.looked_up
        return ShapeReport(CHAINS, COSTS, ModelDrafts(parents, path, 0.001))


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_each_decision_meets_its_outcome(ahead: int) -> None:
    engine = Engine(ahead)
    for _ in range(300):
        engine.step()
    rows = {row["num_draft_tokens"]: row for row in engine.explanation.rows()}
    assert rows[3]["steps"] > 200
    assert rows[3]["expected_tokens"] == pytest.approx(2.0, rel=0.05)
    assert rows[3]["realised_tokens"] == pytest.approx(2.0)
    assert rows[0]["realised_tokens"] == pytest.approx(1.0)
    for size, row in rows.items():
        assert row["rows"] == 1 + size
        assert row["observed_ms"] == pytest.approx(10.0)
    # The first output only brings the costs.
    assert sum(row["steps"] for row in rows.values()) == 300 - ahead - 1


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_shapes_follow_from_what_a_model_reports(ahead: int) -> None:
    engine = Modelled(ahead)
    for step in range(300):
        engine.step(prompts=step % 10 == 0)
    rows = {row["num_draft_tokens"]: row for row in engine.explanation.rows()}
    assert rows.keys() <= {0, 1, 3}
    assert sum(row["steps"] for size, row in rows.items() if size) > 200
    for size, row in rows.items():
        assert row["rows"] == 1 + size
        assert row["realised_tokens"] == 1 + (size > 0)
    assert sum(row["steps"] for row in rows.values()) == pytest.approx(270, abs=6)
    assert engine.explanation.choices()


def test_steps_with_prompts_say_nothing_of_times() -> None:
    engine = Engine(1)
    for step in range(300):
        engine.step(prompts=step % 2, seconds=0.03 if step % 2 else 0.01)
    rows = engine.explanation.rows()
    assert sum(row["steps"] for row in rows) == pytest.approx(150, abs=2)
    # Outputs of a step with prompts arrive a step after it was scheduled.
    assert {round(row["observed_ms"]) for row in rows} == {30}


def test_a_pause_is_no_step() -> None:
    engine = Engine(1)
    for _ in range(100):
        engine.step()
    engine.deliver()
    running, engine.running = engine.running, []
    engine.now += 1000
    engine.step()
    engine.deliver()
    engine.running = running
    for _ in range(100):
        engine.step()
    assert max(row["observed_ms"] for row in engine.explanation.rows()) < 11


def test_what_arrives_after_a_pause_has_no_time() -> None:
    """An engine that is called for each answer leaves its last step under way until the next."""
    engine = Engine(1)
    for _ in range(10):
        for _ in range(20):
            engine.step()
        running, engine.running = engine.running, []
        engine.now += 1000
        # The engine begins to schedule before the next request runs.
        engine.steps.before_schedule()
        engine.running = running
    rows = engine.explanation.rows()
    assert sum(row["steps"] for row in rows) > 150
    assert max(row["observed_ms"] for row in rows) < 11


def test_a_pause_that_keeps_its_requests_is_no_step() -> None:
    engine = Engine(1)
    for _ in range(10):
        for _ in range(20):
            engine.step()
        engine.now += 1000
        engine.steps.restart_clock()
    rows = engine.explanation.rows()
    assert sum(row["steps"] for row in rows) > 150
    assert max(row["observed_ms"] for row in rows) < 11


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8, 300])
def test_a_session_whose_turn_opted_out_is_drafted_for_again(steps: int, ahead: int) -> None:
    """Steps with its drafts may be under way when that turn ends."""
    engine = Modelled(ahead)
    engine.running = ["session"]
    for _ in range(300):
        engine.step()
    engine.opted_out = True
    for _ in range(steps):
        engine.step()
    assert steps < 300 or set(engine.sizes[-100:]) == {0}
    engine.steps.forget("session")
    for _ in range(ahead):
        engine.deliver()
    engine.opted_out = False
    for _ in range(100):
        engine.step()
    assert {*engine.sizes[-20:]} == {3}


def test_the_table_of_the_engine_is_an_upper_bound() -> None:
    engine = Engine(1, [0, 7, 7, 3, 0])
    engine.running = ["a", "b", "c"]
    for _ in range(100):
        engine.step()
    assert set(engine.sizes) == {0, 3}
    engine.running = ["a", "b", "c", "d"]
    engine.sizes.clear()
    for _ in range(100):
        engine.step()
    assert set(engine.sizes[1:]) == {0}


def test_nothing_is_drafted_before_the_costs_have_arrived() -> None:
    engine = Engine(2)
    for _ in range(3):
        engine.step()
    assert engine.sizes == [0, 0, 0]


def test_the_report_travels_between_processes() -> None:
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    assert patches.report_of(output) is None
    reports = TierReports(SIZES)
    expected = torch.tensor([[0, 0, 0], [1, 2, 3]], dtype=torch.float32)
    reports.begin(expected, torch.tensor([1]))
    assert patches.report_of(reports.attach(output)) is None  # nothing was measured yet
    reports.forward_seconds = COSTS
    reports.begin(expected, torch.tensor([1]))
    report = patches.report_of(pickle.loads(pickle.dumps(reports.attach(output))))
    assert report.sizes == SIZES
    assert report.forward_seconds == COSTS
    assert report.expected.tolist() == [[1, 2, 3]]


def test_the_report_of_a_model_travels_between_processes() -> None:
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    reports, clock = TierReports((0, 1, 3), CHAINS), DraftClock(torch.device("cpu"))
    reports.forward_seconds = COSTS
    with clock.drafting():
        with clock.reading():
            clock.read_tokens = 4
        started = perf_counter()
        while perf_counter() < started + 0.002:
            pass
    parents, path = torch.tensor([[-1, 0]]).int(), torch.tensor([[0, 1, -1]]).int()
    reports.begin_drafts(parents, path, clock, 7)
    report = patches.report_of(pickle.loads(pickle.dumps(reports.attach(output))))
    assert report.shapes == CHAINS
    drafts = report.drafts
    assert (drafts.parents.tolist(), drafts.path.tolist()) == ([[-1, 0]], [[0, 1, -1]])
    assert (drafts.read_tokens, drafts.unread) == (4, 7)
    assert drafts.seconds >= 0.002
    assert 0 <= drafts.read_seconds < drafts.seconds


def test_expected_tokens_are_sums_of_the_best_scores() -> None:
    scores = torch.tensor([[0.25, 0.5, 0, 0.125, 0.25, 0, 0, 0], [0.5] * 8])
    assert expected_tokens(scores, SIZES).tolist() == [[1, 2, 2.125], [1, 2.5, 4.5]]
    assert expected_tokens(scores[:, :5], (0, 3, 80)).tolist() == [[1, 2, 2.125], [1, 2.5, 3.5]]
