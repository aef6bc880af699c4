"""The three time budgets that bound what the planner spends on learning."""

from __future__ import annotations

from dataclasses import dataclass

from drafttree.budget.constants import BudgetConstants


@dataclass
class TimeBudgets:
    """Seconds that may be lost; each budget is refilled by a small share of elapsed time.

    Attributes:
        probe: For looking up drafts that are not used while plain decoding is in use.
        trial: For steps at sizes other than the one in use.
        loss: For drafting that turned out slower than plain decoding. What drafting saves is
            credited to it, and a negative value forces plain steps.
    """

    probe: float = 0.0
    trial: float = 0.0
    loss: float = 0.0

    @classmethod
    def initial(cls, plain_seconds: float, constants: BudgetConstants) -> TimeBudgets:
        """The budgets at the first step, whose plain time is `plain_seconds`."""
        return cls(
            constants.probe_capacity * plain_seconds,
            constants.trial_initial * plain_seconds,
            constants.loss_initial * plain_seconds,
        )

    def refill(self, seconds: float) -> None:
        """Credit `seconds` to each budget."""
        self.probe += seconds
        self.trial += seconds
        self.loss += seconds

    def clamp(self, plain_seconds: float, constants: BudgetConstants) -> None:
        """Bound the budgets, and the loss budget's debt, so that it can be repaid."""
        self.probe = min(self.probe, constants.probe_capacity * plain_seconds)
        self.trial = min(self.trial, constants.trial_capacity * plain_seconds)
        most = constants.loss_capacity * plain_seconds
        self.loss = max(-most, min(self.loss, most))
