"""An allowance limits what is spent on learning to a share of the time."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Allowance:
    """What may be spent, in steps; a share of each step is added to it.

    It is never negative, so a step that cost much delays the next by `capacity / share` steps at
    most.

    Attributes:
        share: Share of each step that is added.
        capacity: Most that is saved up; half of it is there at first.
        left: What is left.
    """

    share: float
    capacity: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = 0.0
        self.renew()

    def renew(self) -> None:
        """Allow as much as at first, as there is everything to learn again."""
        self.left = max(self.left, self.capacity / 2)

    @property
    def is_full(self) -> bool:
        """Whether nothing more can be saved up."""
        return self.left >= self.capacity

    def refill(self) -> None:
        """Add the share of one step."""
        self.left = min(self.capacity, self.left + self.share)

    def covers(self, cost: float) -> bool:
        """Whether `cost` may be spent: it is left, or all is left that can be saved up."""
        return self.left >= min(cost, self.capacity)

    def charge(self, cost: float) -> None:
        """Spend `cost`; nothing if it is negative."""
        self.left = max(0.0, self.left - max(0.0, cost))
