"""The tuned constants of the node budget, in one place so that a replay can change them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class BudgetConstants(BaseModel):
    """The constants of the planner, the cost model and the acceptance calibration.

    `docs/node_budget.md` explains the model that they belong to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Planner.
    margin: float = Field(
        default=1.035,
        ge=1,
        description="Drafting is chosen only if its predicted rate exceeds plain decoding's by "
        "this factor.",
    )
    learning_share: float = Field(
        default=0.004,
        gt=0,
        description="Share of the time that may be spent on trial steps, and again on looking up "
        "drafts that are not used.",
    )
    trial_capacity: float = Field(
        default=4.0, gt=0, description="Most that may be saved up for trial steps, in steps."
    )
    probe_capacity: float = Field(
        default=0.4,
        gt=0,
        description="Most that may be saved up for looking up drafts in vain, in steps.",
    )
    optimism: float = Field(
        default=1.0,
        ge=0,
        description="A size is worth a trial if it would be the best one with a cost lower than "
        "its estimate by this number of standard deviations.",
    )
    smoothing: float = Field(
        default=1 / 8,
        gt=0,
        le=1,
        description="Weight of the last step in the averages of draft time and draft benefit.",
    )

    max_draft_ratio: float = Field(
        default=4.0,
        ge=1,
        description="A measured draft time counts as at most this multiple of the usual one.",
    )

    # Decaying averages: acceptance and mean step times.
    memory: float = Field(
        default=128,
        gt=0,
        description="Recorded steps after which an outcome has 1/e of its weight.",
    )
    age_memory: float = Field(
        default=2048,
        gt=0,
        description="Elapsed steps after which an outcome has 1/e of its weight.",
    )
    prior_weight: float = Field(
        default=16.0,
        gt=0,
        description="Weight of the ratio of the next larger group of steps against the outcomes "
        "of one group, in expected draft tokens or in steps.",
    )
    most_expected: float = Field(
        default=4.0,
        gt=0,
        description="Expected draft tokens of a request count as at most this many outcomes, as a "
        "long copy is accepted as a whole or breaks off.",
    )
    most_paid: float = Field(
        default=60.0,
        gt=1,
        description="A step's time counts as at most this multiple of its prediction.",
    )
    most_of_one_stall: float = Field(
        default=8.0,
        gt=0,
        description="The longest stall of plain steps, or of steps with drafts, counts as at most "
        "this many predicted steps, unless all others together were longer.",
    )

    # Cost model.
    level_spread: float = Field(
        default=0.6,
        gt=0,
        description="Standard deviation of the logarithm of the factor that all sizes share.",
    )
    row_spread: float = Field(
        default=0.2,
        gt=0,
        description="Standard deviation of the logarithm of a size's own factor, for each "
        "doubling of its rows.",
    )
    forget_steps: float = Field(
        default=128,
        gt=0,
        description="Steps without samples after which a factor is as uncertain as at the start.",
    )
    initial_noise: float = Field(
        default=0.05,
        gt=0,
        description="Standard deviation of the logarithm of a step's time, at first.",
    )
    noise_rate: float = Field(
        default=1 / 32, gt=0, le=1, description="Weight of one sample in the estimate of the noise."
    )
    outlier_sigmas: float = Field(
        default=3.0, gt=0, description="Standard deviations beyond which a sample is an outlier."
    )
    recheck_steps: int = Field(
        default=16,
        ge=1,
        description="Steps after a lasting change at which drafting is tried again; then whenever "
        "twice as many have passed.",
    )
    recheck_share: float = Field(
        default=0.006,
        gt=0,
        description="Share of the time that may be spent on trying drafting again after a lasting "
        "change, so that it is tried no later than its cost allows.",
    )
    agreeing_outliers: int = Field(
        default=4,
        ge=2,
        description="Consecutive outliers of one size to one side after which all factors are "
        "measured anew.",
    )
