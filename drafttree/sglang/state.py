"""Per-request state of a tree worker, by slot, and the state of one decode step.

A slot is a request's index in SGLang's request pool. With overlapping scheduling a step is prepared
before SGLang has read the last step's result, so whatever one step needs from the last one stays in
tensors on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from drafttree.sglang.grammars import follows_trees
from drafttree.transfer import AsyncHostCopy, all_on_device
from drafttree.tree import DraftTree

if TYPE_CHECKING:
    from drafttree.sglang.grammars import BoundTrees
    from drafttree.sglang.penalties import Penalties

OPT_OUT = "drafttree"
"""Key in a request's `custom_params` that turns drafting off for it when false."""


@dataclass(frozen=True)
class Step:
    """One decode step of B requests, once its trees are known.

    Attributes:
        batch: SGLang's batch.
        trees: Draft trees as they are verified, N columns.
        depths: `int32 [B, N]`, depth of each node.
        deepest: The greatest depth of a node, `int32 []`, on its way to the host.
        penalties: Penalties by slot; None if no request of the batch has any.
        drawn: What `DraftModelDrafter.propose` returned beside the trees.
        bound: The trees as bound to the requests' grammars; None if no request has one.
    """

    batch: Any
    trees: DraftTree
    depths: torch.Tensor
    deepest: AsyncHostCopy
    penalties: Penalties | None = None
    drawn: Any = None
    bound: BoundTrees | None = None

    @classmethod
    def of(
        cls,
        batch: Any,
        trees: DraftTree,
        depths: torch.Tensor,
        penalties: Penalties | None,
        drawn: Any,
        bound: BoundTrees | None = None,
    ) -> Step:
        """A step, whose greatest depth starts its way to the host."""
        return cls(batch, trees, depths, AsyncHostCopy.of(depths.max()), penalties, drawn, bound)

    @property
    def max_depth(self) -> int:
        """The greatest depth of a node; waits for the drafts on a device, not for the forward."""
        return int(self.deepest.wait())


class RequestStates:
    """Tensors indexed by slot; S is the number of slots.

    Attributes:
        roots: `int32 [S]`, the last emitted token.
        limits: `int64 [S]`, greatest length, prompt included.
        drafting: `bool [S]`, whether the request is drafted for.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.roots = torch.zeros(slots, dtype=torch.int32, device=device)
        self.limits = torch.zeros(slots, dtype=torch.int64, device=device)
        self.drafting = torch.zeros(slots, dtype=torch.bool, device=device)

    def start(self, slots: torch.Tensor, requests: list[Any]) -> None:
        """Requests start, or restart after they were retracted, in `slots`, `int64 [B]`."""
        limits = [
            len(request.origin_input_ids) + request.sampling_params.max_new_tokens
            for request in requests
        ]
        drafting = [may_draft(request) for request in requests]
        arrays = np.array(limits, np.int64), np.array(drafting, np.bool_)
        self.limits[slots], self.drafting[slots] = all_on_device(arrays, self.limits.device)


def may_draft(request: Any) -> bool:
    """Whether a request allows drafts and they can be verified for it."""
    allowed = (request.sampling_params.custom_params or {}).get(OPT_OUT) is not False
    return allowed and why_undrafted(request) is None


def why_undrafted(request: Any) -> str | None:
    """What of a request cannot follow a tree's branches; None if everything can."""
    if request.custom_logit_processor is not None:
        return "a custom logit processor"
    if request.grammar is None:
        return None
    if not follows_trees(request.grammar):
        return f"a grammar of type {type(request.grammar).__name__}"
    # Beyond the end of its grammar SGLang would drop tokens that were verified.
    return "a grammar and ignore_eos" if request.sampling_params.ignore_eos else None


def is_drafted_bound(request: Any) -> bool:
    """Whether a request has a grammar and is drafted for."""
    return request.grammar is not None and may_draft(request)


def are_parts(batch: Any) -> list[bool]:
    """Whether more of each request's prompt follows in later batches."""
    return [
        length < len(request.origin_input_ids) + len(request.output_ids)
        for request, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)
    ]


def sampled_tokens(batch: Any, next_tokens: torch.Tensor) -> torch.Tensor:
    """The tokens that a prefill sampled, `int32 [B]`; -1 after a part of a prompt.

    SGLang drops what is sampled after a part of a prompt.
    """
    sampled = next_tokens.to(torch.int32, copy=True)
    for row, is_part in enumerate(are_parts(batch)):
        if is_part:
            sampled[row] = -1
    return sampled
