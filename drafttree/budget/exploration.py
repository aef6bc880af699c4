"""Exploration: steps with drafts that show whether drafting pays, where it is not chosen.

What it may lose is saved up over the steps without a model's drafts. All amounts are in tokens of a
request.
"""

from __future__ import annotations

_SHARE = 0.005
"""Share of the time without a model's drafts that may be lost by exploring."""
_HOPELESS = 8.0
"""Saved up before a shape is tried that is predicted not to pay."""
_CAPACITY = 64.0
"""Most that is saved up."""
_MOST_OWED = 16.0
"""Most that is owed after a shape was tried: a long stall in the middle of a trial says little of
drafting, and must not put it off for hours."""
_AT_START = 4.0
"""Saved up at first, and the most that a depth's first drafts are charged."""
_READING_CREDIT = 16.0
"""Credit for reading texts until it is known whether drafting pays. Without it, where texts are
long and reading them is slow, drafting would not be tried for some thousand steps."""


class Exploration:
    """What may be lost by drafting where it is not chosen."""

    def __init__(self) -> None:
        self._saved = _AT_START
        self._reading_credit = _READING_CREDIT

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left to lose."""
        return self._saved <= 0

    @property
    def can_try_hopeless(self) -> bool:
        """Whether enough is saved up for a shape that is predicted not to pay."""
        return self._saved >= _HOPELESS

    def end_credit(self) -> None:
        """End the credit for reading texts, as it is known whether drafting pays."""
        self._reading_credit = 0.0

    def pay(self, loss: float, reading: float) -> bool:
        """Pay for a step with drafts, if enough is saved up.

        A step that is never measured, for example because a request ends, is paid for too.

        Args:
            loss: What is lost if nothing is accepted, reading included.
            reading: Part of it that reading texts takes.

        Returns:
            Whether it was paid for.
        """
        credit = min(reading, self._reading_credit)
        if self._saved + credit < min(loss, _CAPACITY):
            return False
        self._saved += credit - loss
        self._reading_credit -= credit
        return True

    def refill(self, tokens: float) -> None:
        """Save up the share of a step without the model that gave a request so many tokens."""
        self._add(_SHARE * tokens)

    def settle(self, paid: float, spent: float, tokens: float, *, warm: bool) -> None:
        """Account for a step that was paid for.

        What it gained is saved up as well, so that drafting goes on while it gains.

        Args:
            paid: What it was expected to lose.
            spent: What a request would have been given in its time without the model.
            tokens: What a request was given.
            warm: Whether its depth had been drafted before. What is loaded or compiled once says
                nothing of the steps that follow.
        """
        if not warm:
            spent = min(spent, _AT_START)
        self._add(paid - (spent - tokens))

    def renew(self) -> None:
        """Drafting may be tried again as at first."""
        self._saved = max(self._saved, _AT_START)
        self._reading_credit = _READING_CREDIT

    def _add(self, tokens: float) -> None:
        self._saved = min(_CAPACITY, max(-_MOST_OWED, self._saved + tokens))
