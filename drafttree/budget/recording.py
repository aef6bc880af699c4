"""Records the steps that a planner decided on, for `drafttree budget` to replay.

A recording is a file of JSON lines. The first line has the planner's arguments, and each further
line has one step. The environment variable `DRAFTTREE_RECORD_STEPS` names the file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from drafttree.arrays import FloatArray
from drafttree.budget.calibration import VerifiedDrafts
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.planner import Planner
from drafttree.budget.tree_choice import TreeChoice

RECORD_VARIABLE = "DRAFTTREE_RECORD_STEPS"
MAX_RECORDED_STEPS = 100_000

logger = logging.getLogger(__name__)


class RecordedPlanner(BaseModel):
    """The first line of a recording: the arguments of `Planner`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate_sizes: tuple[int, ...]
    forward_seconds: dict[int, float]
    constants: BudgetConstants


class RecordedStep(BaseModel):
    """One step of a recording.

    Attributes:
        batch_size: Number of requests.
        expected_tokens: `[R, S]`, argument of `Planner.choose` if it was called.
        scores: Argument of `Planner.choose_best_first` if it was called, in thousandths; zeros at
            the end of a request's scores are left out.
        extends: Whether some requests might have further nodes.
        num_draft_tokens: The planner's choice, as in `TreeChoice`; 0 if drafting was skipped.
        spine: The same.
        min_score: The same.
        rows: Tokens that were verified, roots included.
        seconds: Duration of the step; None if its measurement was discarded.
        draft_seconds: Part of it that was spent looking up drafts.
        emitted_tokens: Tokens emitted for the whole batch.
        added_rows: Part of the rows that grammars have added.
        given_tokens: Part of the emitted tokens that grammars make certain or likely.
        draft_tokens: As in `VerifiedDrafts`; None if they are not known.
        accepted: As in `VerifiedDrafts`.
    """

    model_config = ConfigDict(extra="forbid")

    batch_size: int
    expected_tokens: list[list[float]] | None = None
    scores: list[list[int]] | None = None
    extends: bool = True
    num_draft_tokens: int = 0
    spine: int = 0
    min_score: float = 0.0
    rows: int = 0
    seconds: float | None = None
    draft_seconds: float = 0.0
    emitted_tokens: float = 0.0
    added_rows: int = 0
    given_tokens: float = 0.0
    draft_tokens: list[int] | None = None
    accepted: list[int] | None = None

    @property
    def choice(self) -> TreeChoice | None:
        """The planner's choice; None if drafting was skipped."""
        if self.expected_tokens is None and self.scores is None:
            return None
        return TreeChoice(self.num_draft_tokens, self.spine, self.min_score)

    @property
    def verified(self) -> VerifiedDrafts | None:
        """The drafts of each request; None if they are not known."""
        if self.draft_tokens is None or self.accepted is None:
            return None
        return VerifiedDrafts(np.array(self.draft_tokens), np.array(self.accepted))

    def score_array(self, most: int) -> FloatArray | None:
        """`scores` as they were passed to the planner, `float32 [R, most]`."""
        if self.scores is None:
            return None
        thousandths = np.zeros((len(self.scores), most), np.float32)
        for row, known in zip(thousandths, self.scores, strict=True):
            row[: len(known)] = known
        return thousandths / np.float32(1000)


class RecordingPlanner(Planner):
    """A planner that writes each of its steps to a file, `max_steps` at most."""

    def __init__(
        self,
        candidate_sizes: Sequence[int],
        forward_seconds: Mapping[int, float],
        file: IO[str],
        max_steps: int = MAX_RECORDED_STEPS,
    ) -> None:
        super().__init__(candidate_sizes, forward_seconds)
        self._file = file
        self._left = max_steps
        self._step: RecordedStep | None = None
        first = RecordedPlanner(
            candidate_sizes=self.candidate_sizes,
            forward_seconds=dict(forward_seconds),
            constants=self.constants,
        )
        self._write_line(first.model_dump_json())

    def should_skip_drafting(self, batch_size: int) -> bool:
        self._write()  # The measurement of the step before was discarded.
        self._step = RecordedStep(batch_size=batch_size)
        return super().should_skip_drafting(batch_size)

    def choose(self, batch_size: int, expected_tokens: FloatArray) -> int:
        chosen = super().choose(batch_size, expected_tokens)
        if self._step is not None:
            self._step.expected_tokens = expected_tokens.tolist()
            self._step.num_draft_tokens = chosen
        return chosen

    def choose_best_first(
        self, batch_size: int, scores: FloatArray, *, extends: bool = True
    ) -> TreeChoice:
        # Chosen from the rounded scores, so that a replay makes the same choice.
        thousandths = np.round(scores * 1000).astype(np.int32)
        rounded = thousandths.astype(np.float32) / np.float32(1000)
        chosen = super().choose_best_first(batch_size, rounded, extends=extends)
        if self._step is not None:
            counts = (thousandths > 0).sum(1).tolist()
            self._step.scores = [
                row[:count].tolist() for row, count in zip(thousandths, counts, strict=True)
            ]
            self._step.extends = extends
            self._step.num_draft_tokens = chosen.num_draft_tokens
            self._step.spine, self._step.min_score = chosen.spine, chosen.min_score
        return chosen

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
        super().record_step(
            batch_size,
            choice,
            rows,
            seconds,
            draft_seconds,
            emitted_tokens,
            added_rows,
            given_tokens,
            verified,
        )
        if self._step is not None:
            self._step.rows, self._step.seconds = rows, seconds
            self._step.draft_seconds = draft_seconds
            self._step.emitted_tokens = emitted_tokens
            self._step.added_rows, self._step.given_tokens = added_rows, given_tokens
            if choice.drafts and verified is not None:
                self._step.draft_tokens = verified.draft_tokens.tolist()
                self._step.accepted = verified.accepted.tolist()
        self._write()

    def _write(self) -> None:
        step, self._step = self._step, None
        if step is None or not self._left:
            return
        self._left -= 1
        self._write_line(step.model_dump_json(exclude_defaults=True))

    def _write_line(self, line: str) -> None:
        try:
            self._file.write(line + "\n")
            if not self._left:
                self._file.close()
        except OSError as error:
            logger.warning(
                "%s: no further steps are recorded, as the file cannot be written: %s",
                *(RECORD_VARIABLE, error),
            )
            self._left = 0
            with suppress(OSError):
                self._file.close()


def make_planner(candidate_sizes: Sequence[int], forward_seconds: Mapping[int, float]) -> Planner:
    """A planner that records its steps if `DRAFTTREE_RECORD_STEPS` names a file.

    `%p` in the name is replaced by the process id, for hosts of several engines. If the file
    cannot be opened, or a later write fails, a warning says so and nothing more is recorded.
    """
    if name := os.environ.get(RECORD_VARIABLE):
        try:
            # Line-buffered, because a host may kill its engine processes.
            file = open(  # noqa: SIM115
                name.replace("%p", str(os.getpid())), "w", buffering=1, encoding="utf-8"
            )
        except OSError as error:
            logger.warning(
                "%s=%s cannot be written, steps are not recorded: %s", RECORD_VARIABLE, name, error
            )
        else:
            return RecordingPlanner(candidate_sizes, forward_seconds, file)
    return Planner(candidate_sizes, forward_seconds)


def read_recording(path: Path) -> tuple[RecordedPlanner, list[RecordedStep]]:
    """Read a recording.

    A last line that was cut off, because the engine was killed, is ignored.

    Raises:
        ValueError: The file cannot be read, or is not a recording.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    lines = text.splitlines()
    if not text.endswith("\n"):
        lines = lines[:-1]
    try:
        first = RecordedPlanner.model_validate_json(lines[0])
    except (IndexError, ValidationError) as error:
        raise ValueError(
            f"{path} is not a recording of steps: run the engine, or drafttree bench, with "
            f"{RECORD_VARIABLE}=FILE and give FILE"
        ) from error
    steps = []
    for number, line in enumerate(lines[1:], 2):
        try:
            steps.append(RecordedStep.model_validate_json(line))
        except ValidationError as error:
            raise ValueError(f"{path}, line {number}: this is not a step: {error}") from error
    sizes = len(first.candidate_sizes)
    for number, step in enumerate(steps, 2):
        if any(len(row) != sizes for row in step.expected_tokens or ()):
            raise ValueError(
                f"{path}, line {number}: expected_tokens must have a value for each of the "
                f"{sizes} candidate sizes"
            )
        if any(len(row) > first.candidate_sizes[-1] for row in step.scores or ()):
            raise ValueError(
                f"{path}, line {number}: scores must have at most {first.candidate_sizes[-1]} "
                "values, the largest candidate size"
            )
    return first, steps
