"""What a request's sampling parameters say about drafting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")

OPT_OUT = "drafttree"
"""The key of `SamplingParams.extra_args` that turns drafting off for a request when false."""


def has_opted_out(parameters: SamplingParams | None) -> bool:
    """Whether a request must not be drafted for, by its own wish or for want of parameters."""
    if parameters is None:
        return True
    # Over HTTP (`vllm_xargs`) there are numbers only.
    return (parameters.extra_args or {}).get(OPT_OUT) in (False, 0)


def is_grammar_bound(parameters: SamplingParams | None) -> bool:
    """Whether a request's output follows a grammar."""
    return parameters is not None and parameters.structured_outputs is not None


def announce_undrafted(reason: str) -> None:
    """Say once that requests with structured output are served without drafts, and why."""
    logger.warning_once("Requests with structured output are served without drafts: %s", reason)
