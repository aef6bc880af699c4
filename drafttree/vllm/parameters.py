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
    return (parameters.extra_args or {}).get(OPT_OUT) is False


def is_grammar_bound(parameters: SamplingParams | None) -> bool:
    """Whether a request's output follows a grammar; such requests are served without drafts."""
    bound = parameters is not None and parameters.structured_outputs is not None
    if bound:
        logger.warning_once("Requests with structured output are served without drafts")
    return bound
