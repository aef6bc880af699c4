"""The node budget chooses tree sizes for a drafter other than Token Recycling; replay of steps."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from drafttree.budget import NodeBudget
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.recording import (
    RECORD_VARIABLE,
    RecordedPlanner,
    RecordedStep,
    RecordingPlanner,
    read_recording,
)
from drafttree.budget.replay import Replay, allowances, changed_constants, replay
from drafttree.budget.tree_choice import TreeChoice
from drafttree.cli import app
from drafttree.drafter import ModelFreeDrafter
from drafttree.tree import DraftTree, Verified

SIZES = (0, 2, 4, 8)
FORWARDS = {1: 0.02, 4: 0.022, 16: 0.03, 64: 0.1}
Logits = torch.Tensor


class RepeatingDrafter(ModelFreeDrafter):
    """Drafts a chain that repeats the root; each token is expected to be accepted with `p`."""

    max_depth = SIZES[-1]

    def __init__(self, p: float, budget: NodeBudget) -> None:
        self.p = p
        self.budget = budget

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        if self.budget.should_skip_drafting(slots):
            return DraftTree.of_roots(roots)
        expected = [sum(self.p**depth for depth in range(size + 1)) for size in SIZES]
        size = self.budget.choose(slots, torch.tensor([expected] * len(slots)))
        if not size:
            return DraftTree.of_roots(roots)
        tokens = roots[:, None].repeat(1, size + 1)
        parents = torch.arange(-1, size, dtype=torch.int32).expand(len(roots), -1)
        return DraftTree(tokens, parents, torch.full_like(roots, size + 1))

    def observe(
        self, slots: torch.Tensor, tokens: torch.Tensor, previous: torch.Tensor, logits: Logits
    ) -> torch.Tensor:
        return logits.argmax(1).int()

    def on_verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        self.budget.verified(slots, trees, verified)


class Engine:
    """Decodes with a simulated clock; each draft token is accepted with a true probability."""

    def __init__(self, p: float, expected_p: float | None = None, seed: int = 3) -> None:
        self.now = 0.0
        self.p = p
        self.rng = np.random.default_rng(seed)
        self.budget = NodeBudget.from_forwards(SIZES, FORWARDS, self._clock)
        self.drafter = RepeatingDrafter(p if expected_p is None else expected_p, self.budget)
        self.sizes: list[int] = []

    def _clock(self) -> float:
        self.now += 1e-5
        return self.now

    def run(self, steps: int, batch_size: int = 1) -> None:
        slots = torch.arange(batch_size)
        roots = torch.ones(batch_size, dtype=torch.int32)
        for step in range(steps):
            trees = self.drafter.propose(slots, roots)
            size = trees.tokens.shape[1] - 1
            self.sizes.append(size)
            emitted = torch.full((batch_size, size + 1), -1, dtype=torch.int32)
            for row in range(batch_size):
                misses = np.flatnonzero(self.rng.random(size) >= self.p)
                emitted[row, : 1 + (misses[0] if len(misses) else size)] = 1
            counts = (emitted >= 0).sum(1).int()
            seconds = 0.02 + 0.0005 * batch_size * (size + 1)
            self.now += seconds * float(1 + 0.05 * self.rng.standard_normal())
            if step % 97 == 96:
                trees = DraftTree.of_roots(roots)  # the host truncated the trees
            self.drafter.on_verified(slots, trees, Verified(emitted, emitted, counts))
            if step % 61 == 60:
                self.budget.discard()


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recorded run whose acceptance is first overestimated and then estimated correctly."""
    file = tmp_path / "steps.jsonl"
    monkeypatch.setenv(RECORD_VARIABLE, str(file))
    engine = Engine(0.0, expected_p=0.7)
    engine.run(300)
    engine.p = 0.7
    engine.run(300)
    engine.run(200, batch_size=5)
    return file


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["budget", *map(str, arguments)])


def test_any_drafter_drafts_where_its_tokens_are_accepted() -> None:
    good, bad = Engine(0.9), Engine(0.0, expected_p=0.9)
    good.run(400)
    bad.run(1000)
    assert np.mean(np.array(good.sizes[100:]) == 8) > 0.8
    assert np.mean(np.array(bad.sizes[100:]) == 0) > 0.9
    assert sum(row["steps"] for row in good.budget.explain()) > 350


def test_nothing_is_recorded_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RECORD_VARIABLE, raising=False)
    assert not isinstance(Engine(0.5).budget.planner, RecordingPlanner)


def test_a_recorded_run_replays_to_the_decisions_it_made(recording: Path) -> None:
    first, steps = read_recording(recording)
    assert first.candidate_sizes == SIZES
    assert first.forward_seconds == FORWARDS
    assert len(steps) > 780
    assert {step.seconds is None for step in steps} == {False, True}
    cut = [step for step in steps if step.rows < step.batch_size * (step.num_draft_tokens + 1)]
    assert any(step.rows for step in cut)
    result = replay(first, steps)
    recorded = [step.choice for step in steps]
    assert {TreeChoice(0), TreeChoice(8), None} <= set(recorded)
    assert result.choices == recorded
    assert result.replayed == result.recorded


def test_the_replay_ends_with_the_budgets_and_the_report_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "steps.jsonl"
    monkeypatch.setenv(RECORD_VARIABLE, str(file))
    engine = Engine(0.6)
    engine.run(200)
    result = replay(*read_recording(file))
    assert result.final == allowances(engine.budget.planner)
    assert result.rows == engine.budget.explain()
    assert result.lowest["trial"] < result.final["trial"]
    assert result.lowest["probe"] <= result.final["probe"]


def replayed(file: Path, planner: RecordingPlanner) -> tuple[list[RecordedStep], Replay]:
    """Check that a recording replays to what its planner has decided and reported.

    Returns:
        Its steps, and its replay with a margin that never drafts.
    """
    first, steps = read_recording(file)
    result = replay(first, steps)
    assert result.choices == [step.choice for step in steps]
    assert result.replayed == result.recorded
    assert result.rows == planner.explain()
    never = replay(first, steps, changed_constants(first.constants, {"margin": "50"}))
    assert never.replayed.drafted == 0
    return steps, never


def test_a_recorded_run_with_spines_replays_to_the_decisions_it_made(tmp_path: Path) -> None:
    """The first of four requests copies a text, the others' drafts are guesses."""
    file = tmp_path / "steps.jsonl"
    rng = np.random.default_rng(1)
    with file.open("w") as stream:
        planner = RecordingPlanner(SIZES, {1: 0.02, 64: 0.08}, stream)
        for _ in range(200):
            if planner.should_skip_drafting(4):
                planner.record_step(4, TreeChoice(0), 4, 0.024, 0.0, 4)
                continue
            scores = 0.4 * 0.6 ** np.arange(8) * rng.uniform(0.5, 1.0, (4, 1))
            scores[0] = 0.98
            choice = planner.choose_best_first(4, scores.astype(np.float32))
            rows = 4 + 4 * choice.num_draft_tokens + choice.spine
            emitted = 4 + choice.spine + choice.num_draft_tokens + (3 if choice.drafts else 0)
            planner.record_step(4, choice, rows, 0.02 + 1e-3 * rows, 0.001, emitted)
    steps, changed = replayed(file, planner)
    assert sum(step.spine > 0 for step in steps) > 100
    fewer = changed.replayed.tokens_per_second
    assert fewer < changed.recorded.tokens_per_second


def test_what_grammars_give_is_recorded_and_replayed(tmp_path: Path) -> None:
    """Each request has two tokens of a grammar after each token that it does not give."""
    file = tmp_path / "steps.jsonl"
    with file.open("w") as stream:
        planner = RecordingPlanner(SIZES, FORWARDS, stream)
        for _ in range(200):
            size = 0
            if not planner.should_skip_drafting(1):
                size = planner.choose(1, np.array([[1.0, 2.0, 2.0, 2.0]], np.float32))
            own = 2 if size else 1
            rows = 1 + size + 2 * own
            planner.record_step(
                *(1, TreeChoice(size), rows, 0.02 + 5e-4 * rows, 0.0, 3 * own),
                added_rows=2 * own,
                given_tokens=2 * own,
            )
    steps, never = replayed(file, planner)
    assert sum(step.num_draft_tokens for step in steps) > 100
    assert never.replayed.tokens == pytest.approx(3 * 200)
    (row,) = never.rows
    assert row["rows"] > 2.9


def test_other_constants_make_other_decisions(recording: Path) -> None:
    first, steps = read_recording(recording)
    never = replay(first, steps, changed_constants(first.constants, {"MARGIN": "100"}))
    assert never.replayed.drafted == 0
    assert never.recorded.drafted > 100
    assert never.replayed.tokens == sum(
        step.batch_size for step in steps if step.seconds is not None
    )
    # Plain steps take 0.0205 seconds here, and those of five requests 0.0225.
    assert 1 / 0.021 < never.replayed.tokens_per_second < 5 / 0.0225
    assert never.replayed.tokens_per_second < never.recorded.tokens_per_second


def test_a_step_that_is_drafted_in_the_replay_alone_has_the_predicted_outcome() -> None:
    """Looking up its drafts takes a tenth of the time of the rest."""
    expected = [[1.0, 2.0]]
    first = RecordedPlanner(
        candidate_sizes=(0, 3),
        forward_seconds={1: 1.0, 4: 1.0},
        constants=BudgetConstants(margin=50),
    )
    plain = RecordedStep(
        batch_size=1,
        expected_tokens=expected,
        rows=1,
        seconds=1.1,
        draft_seconds=0.1,
        emitted_tokens=1,
    )
    result = replay(first, [plain] * 40, BudgetConstants())
    assert result.recorded.drafted == 0
    assert result.replayed.drafted > 20
    drafted = result.replayed.drafted
    assert result.replayed.tokens == pytest.approx(40 + drafted)
    looked_up = sum(choice is not None for choice in result.choices)
    assert result.replayed.seconds == pytest.approx(40 + 0.1 * looked_up, rel=0.01)


def test_the_command_shows_the_replay(recording: Path) -> None:
    result = command(recording)
    assert result.exit_code == 0, result.output
    total = len(read_recording(recording)[1])
    assert f"{total} of {total} decisions as recorded" in result.output
    for word in ("draft", "wasted", "probe", "trial", "steps with drafts", "tokens/s"):
        assert word in result.output, word
    changed = command(recording, "--set", "MARGIN=100")
    assert changed.exit_code == 0, changed.output
    assert f"{total} of {total}" not in changed.output
    assert "0.0%" in changed.output


def test_the_command_names_what_is_wrong(recording: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"engine": "vllm"}, indent=2) + "\n")
    empty = tmp_path / "empty.jsonl"
    empty.write_text(recording.read_text().splitlines()[0] + "\n")
    lines = recording.read_text().splitlines()
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("\n".join([lines[0], '{"batch_size": 1, "expected_tokens": [[1.0]]}']) + "\n")
    many = tmp_path / "many.jsonl"
    many.write_text(
        "\n".join([lines[0], '{"batch_size": 1, "scores": [[9,8,7,6,5,4,3,2,1]]}']) + "\n"
    )
    for arguments, words in (
        ((tmp_path / "none.jsonl",), "cannot read"),
        ((report,), "DRAFTTREE_RECORD_STEPS=FILE"),
        ((empty,), "contains no steps"),
        ((wrong,), "line 2"),
        ((many,), "at most 8 values"),
        ((recording, "--set", "margin"), "NAME=VALUE"),
        ((recording, "--set", "marge=1.1"), "not a constant of the node budget"),
        ((recording, "--set", "margin=0.5"), "margin=0.5"),
    ):
        result = command(*arguments)
        assert result.exit_code == 2, result.output
        assert words in result.output


def test_a_recording_is_bounded_and_may_be_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    with file.open("w") as stream:
        planner = RecordingPlanner(SIZES, FORWARDS, stream, max_steps=3)
        for _ in range(5):
            if not planner.should_skip_drafting(1):
                planner.choose(1, np.ones((1, 4), np.float32))
            planner.record_step(1, TreeChoice(0), 1, 0.02, 0.0, 1)
    assert len(read_recording(file)[1]) == 3
    file.write_text(file.read_text()[:-10])
    assert len(read_recording(file)[1]) == 2


def test_the_process_id_may_be_part_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getpid", lambda: 4321)
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "steps-%p.jsonl"))
    Engine(0.5)
    assert (tmp_path / "steps-4321.jsonl").exists()


def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "missing" / "steps.jsonl"))
    engine = Engine(0.5)
    assert not isinstance(engine.budget.planner, RecordingPlanner)
    assert "steps are not recorded" in caplog.text


class FullDisk(io.StringIO):
    """Takes some lines, and half of the next one."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.lines = lines
        self.kept = ""

    def write(self, text: str) -> int:
        if not self.lines:
            self.kept += text[: len(text) // 2]
            raise OSError(errno.ENOSPC, "no space left on device")
        self.lines -= 1
        self.kept += text
        return len(text)


def test_a_disk_that_fills_up_ends_a_recording_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(lines=3)
    planner = RecordingPlanner(SIZES, FORWARDS, disk)
    for _ in range(5):
        if not planner.should_skip_drafting(1):
            planner.choose(1, np.ones((1, 4), np.float32))
        planner.record_step(1, TreeChoice(0), 1, 0.02, 0.0, 1)
    assert caplog.text.count("no further steps are recorded") == 1
    file = tmp_path / "steps.jsonl"
    file.write_text(disk.kept)
    assert len(read_recording(file)[1]) == 2


def test_a_disk_that_is_full_at_start_records_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(RECORD_VARIABLE, "/dev/full")
    Engine(0.5).run(20)
    assert caplog.text.count("no further steps are recorded") == 1


@pytest.mark.parametrize("pads_trees", [False, True])
def test_further_nodes_of_one_request_are_chosen_unless_trees_are_padded(pads_trees: bool) -> None:
    """One of four requests copies a long text; the drafts of the others are guesses."""
    sizes = (0, 2, 4, 32)
    forwards = {1: 0.02, 4: 0.021, 160: 0.04}
    budget = NodeBudget.from_forwards(sizes, forwards, pads_trees=pads_trees)
    scores = torch.zeros(4, 60)
    scores[:, 1:5] = torch.tensor([0.3, 0.1, 0.05, 0.02])
    scores[0, 1:50] = 0.99
    slots = torch.arange(4)
    assert not budget.should_skip_drafting(slots)
    choice = budget.choose_best_first(slots, scores)
    assert (choice.spine > 0) == (not pads_trees)
    # A request alone is not padded: its further nodes cost their own rows.
    assert not budget.should_skip_drafting(slots[:1])
    alone = budget.choose_best_first(slots[:1], scores[:1])
    assert alone.num_draft_tokens + alone.spine == 32
    width = 1 + alone.num_draft_tokens + alone.spine
    tokens = torch.full((1, width), -1, dtype=torch.int32)
    tokens[0, :3] = 7
    trees = DraftTree(tokens, torch.full_like(tokens, -1), torch.tensor([3], dtype=torch.int32))
    one = torch.tensor([[7]], dtype=torch.int32)
    budget.verified(slots[:1], trees, Verified(one * 0, one, one[0]))
    budget.should_skip_drafting(slots[:1])
    (row,) = budget.explain()
    assert row["rows"] == (width if pads_trees else 3)
