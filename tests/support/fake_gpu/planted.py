"""Faults that are planted into a drafter's steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Fault:
    """What takes the place of a part of a step.

    Attributes:
        method: The method whose steps it spoils.
        owner: The class or module that has the part.
        part: Its name there.
        wrong: What takes its place.
        error: What is raised then; None if nothing is, and other drafts are made.
    """

    method: str
    owner: Any
    part: str
    wrong: Callable[..., Any]
    error: type[Exception] | None = None

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in until the end of the test."""
        monkeypatch.setattr(self.owner, self.part, self.wrong)

    def check_refused(
        self, serve: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Serving requests with the method must raise the error."""
        assert self.error is not None
        self.plant(monkeypatch)
        with pytest.raises(self.error):
            serve(self.method)


def nothing(*args: Any) -> None:
    """Forget to do something."""
