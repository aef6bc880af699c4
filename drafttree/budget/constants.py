"""The tuned constants of the node budget, in one place so that a replay can change them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class BudgetConstants(BaseModel):
    """The constants of the planner, the cost model and the acceptance calibration.

    Durations are in seconds unless the description says otherwise. `docs/node_budget.md` explains
    the model that they belong to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Planner: choosing a size.
    margin: float = Field(
        default=1.02,
        ge=1,
        description="Drafting is chosen only if its predicted rate exceeds plain decoding's by "
        "this factor.",
    )
    hysteresis: float = Field(
        default=1.015,
        ge=1,
        description="A new size replaces the current one only if its predicted rate is higher by "
        "this factor.",
    )

    # Planner: time budgets.
    refill_rate: float = Field(
        default=0.005,
        ge=0,
        description="Share of elapsed time that is credited to each time budget.",
    )
    probe_capacity: float = Field(
        default=0.5, gt=0, description="Initial and largest probe budget, in plain steps."
    )
    trial_initial: float = Field(
        default=4.0, ge=0, description="Initial trial budget, in plain steps."
    )
    trial_capacity: float = Field(
        default=8.0, gt=0, description="Largest trial budget, in plain steps."
    )
    loss_initial: float = Field(
        default=6.0, ge=0, description="Initial loss budget, in plain steps."
    )
    loss_capacity: float = Field(
        default=20.0, gt=0, description="Largest loss budget, and largest debt, in plain steps."
    )

    # Planner: trials of sizes that are not in use.
    plain_retry_steps: int = Field(
        default=128, ge=1, description="Steps after which plain decoding is measured again."
    )
    neighbour_retry_steps: int = Field(
        default=256,
        ge=1,
        description="Steps after which the next smaller or larger size is tried again.",
    )
    draft_retry_steps: int = Field(
        default=128,
        ge=1,
        description="Steps of plain decoding after which drafting is tried again.",
    )
    retry_growth: int = Field(
        default=16,
        ge=1,
        description="A size measured k times is tried again after this number times k steps, if "
        "that is sooner than the retry interval.",
    )
    near_miss: float = Field(
        default=0.8,
        ge=0,
        le=1,
        description="While plain decoding is in use, the best size is tried in any step if its "
        "predicted rate reaches this share of the plain rate and the trial budget is half full.",
    )

    # Planner: time spent drafting.
    initial_draft_share: float = Field(
        default=0.03,
        gt=0,
        description="Assumed draft time before it is measured, as a share of a plain step.",
    )
    draft_smoothing: float = Field(
        default=1 / 8,
        gt=0,
        le=1,
        description="Weight of the last step in the averages of draft time and draft benefit.",
    )
    max_draft_ratio: float = Field(
        default=4.0,
        ge=1,
        description="A measured draft time counts as at most this multiple of the mean.",
    )

    # Acceptance calibration.
    sample_decay: float = Field(
        default=128,
        gt=0,
        description="Recorded steps after which an outcome has 1/e of its weight.",
    )
    age_decay: float = Field(
        default=2048,
        gt=0,
        description="Elapsed steps after which an outcome has 1/e of its weight.",
    )
    prior_weight: float = Field(
        default=12.0,
        gt=0,
        description="Weight of the ratio 1 against all outcomes, in expected draft tokens.",
    )
    batch_prior_weight: float = Field(
        default=16.0,
        gt=0,
        description="Weight of the ratio of all steps against the outcomes of one batch bucket.",
    )
    size_prior_weight: float = Field(
        default=32.0,
        gt=0,
        description="Weight of a batch bucket's ratio against the outcomes of one size in it.",
    )
    max_independent_requests: int = Field(
        default=8,
        ge=1,
        description="Requests of one step count as at most this number of independent samples.",
    )

    # Cost model.
    min_samples: int = Field(
        default=3,
        ge=2,
        description="Samples that make a first estimate, and consecutive outliers that replace "
        "the estimate of one size.",
    )
    consensus_samples: int = Field(
        default=5, ge=2, description="Consecutive outliers that move the global level."
    )
    stale_after: int = Field(
        default=32,
        ge=1,
        description="Steps without a sample after which a size counts as not in use.",
    )
    settled_samples: int = Field(
        default=32,
        ge=1,
        description="A size may move the global level after this number of samples.",
    )
    settled_visit: int = Field(
        default=8,
        ge=1,
        description="A size may move the global level after this number of samples since it was "
        "last stale.",
    )
    level_rate: float = Field(
        default=1 / 16, gt=0, le=1, description="Weight of one sample in the global level."
    )
    ratio_rate: float = Field(
        default=1 / 128,
        gt=0,
        le=1,
        description="Weight of one sample in the ratio of a size that also moves the level.",
    )
    min_ratio_rate: float = Field(
        default=1 / 24,
        gt=0,
        le=1,
        description="Least weight of one sample in the ratio of any other size.",
    )
    noise_rate: float = Field(
        default=1 / 32, gt=0, le=1, description="Weight of one sample in the estimate of the noise."
    )
    initial_noise: float = Field(
        default=0.05,
        gt=0,
        description="Mean deviation of the logarithm of a step's time, at first.",
    )
    min_noise: float = Field(
        default=0.01, gt=0, description="Least mean deviation of the logarithm of a step's time."
    )
    outlier_sigmas: float = Field(
        default=4.0, gt=0, description="Mean deviations beyond which a sample is an outlier."
    )
    drift_threshold: float = Field(
        default=0.1,
        gt=0,
        description="Change of the logarithm of the global level after which a size is measured "
        "again.",
    )
