"""What a tree worker keeps of its requests, indexed by their slots in the host's request pool.

With overlapping scheduling a step is prepared before the host has read the last one's result, so
what a step needs of the last one stays in tensors on the device.
"""

from __future__ import annotations

from typing import Any

import torch

OPT_OUT = "drafttree"
"""The key of a request's `custom_params` that turns drafting off for it when false."""


class RequestStates:
    """The states of all slots.

    Attributes:
        roots: `int32 [P]`, the last token that was emitted.
        limits: `int64 [P]`, the greatest length, prompt included.
        drafting: `bool [P]`, whether the request may have drafts.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.roots = torch.zeros(slots, dtype=torch.int32, device=device)
        self.limits = torch.zeros(slots, dtype=torch.int64, device=device)
        self.drafting = torch.zeros(slots, dtype=torch.bool, device=device)

    def join(self, slots: torch.Tensor, requests: list[Any]) -> None:
        """Requests begin, or begin anew, in `slots`, `int64 [B]`."""
        limits = [
            len(request.origin_input_ids) + request.sampling_params.max_new_tokens
            for request in requests
        ]
        self.limits[slots] = torch.tensor(limits, device=self.limits.device)
        drafting = [may_draft(request) for request in requests]
        self.drafting[slots] = torch.tensor(drafting, device=self.drafting.device)


def may_draft(request: Any) -> bool:
    """Whether a request wants drafts and they can be verified for it."""
    wanted = (request.sampling_params.custom_params or {}).get(OPT_OUT) is not False
    return wanted and not is_bound(request)


def is_bound(request: Any) -> bool:
    """Whether a request's tokens depend on state of the host that moves once a step.

    These are grammars and custom logit processors.
    """
    return request.grammar is not None or request.custom_logit_processor is not None
