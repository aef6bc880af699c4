"""Records the steps that a planner decided on, for `drafttree budget` to replay.

A recording is a file of JSON lines. The first line has the planner's arguments, and each further
line has one step. The environment variable `DRAFTTREE_RECORD_STEPS` names the file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from drafttree.budget.constants import BudgetConstants
from drafttree.budget.planner import FloatArray, Planner

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
        expected_tokens: `[R, S]`, argument of `Planner.choose`; None if drafting was skipped.
        num_draft_tokens: Draft tokens of each request that the planner chose.
        seconds: Duration of the step; None if its measurement was discarded.
        draft_seconds: Part of it that was spent looking up drafts.
        emitted_tokens: Tokens emitted for the whole batch.
        is_truncated: Whether fewer draft tokens were verified than were chosen.
    """

    model_config = ConfigDict(extra="forbid")

    batch_size: int
    expected_tokens: list[list[float]] | None = None
    num_draft_tokens: int = 0
    seconds: float | None = None
    draft_seconds: float = 0.0
    emitted_tokens: float = 0.0
    is_truncated: bool = False

    def expected_array(self) -> FloatArray | None:
        """`expected_tokens` as they were passed to the planner, `float32 [R, S]`."""
        if self.expected_tokens is None:
            return None
        return np.array(self.expected_tokens, np.float32)


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
        self._file.write(first.model_dump_json() + "\n")

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

    def record_step(
        self,
        batch_size: int,
        num_draft_tokens: int,
        seconds: float,
        draft_seconds: float,
        emitted_tokens: float,
    ) -> None:
        super().record_step(batch_size, num_draft_tokens, seconds, draft_seconds, emitted_tokens)
        self._write(seconds, draft_seconds, emitted_tokens)

    def record_truncated_step(self, batch_size: int, seconds: float, emitted_tokens: float) -> None:
        super().record_truncated_step(batch_size, seconds, emitted_tokens)
        self._write(seconds, 0.0, emitted_tokens, is_truncated=True)

    def _write(
        self,
        seconds: float | None = None,
        draft_seconds: float = 0.0,
        emitted_tokens: float = 0.0,
        *,
        is_truncated: bool = False,
    ) -> None:
        step, self._step = self._step, None
        if step is None or not self._left:
            return
        step.seconds, step.draft_seconds = seconds, draft_seconds
        step.emitted_tokens, step.is_truncated = emitted_tokens, is_truncated
        self._file.write(step.model_dump_json(exclude_defaults=True) + "\n")
        self._left -= 1
        if not self._left:
            self._file.close()


def make_planner(candidate_sizes: Sequence[int], forward_seconds: Mapping[int, float]) -> Planner:
    """A planner that records its steps if `DRAFTTREE_RECORD_STEPS` names a file.

    `%p` in the name is replaced by the process id, for hosts of several engines. If the file
    cannot be written, a warning says so and nothing is recorded.
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
    return first, steps
