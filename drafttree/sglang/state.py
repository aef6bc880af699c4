"""Per-request state of a tree worker, by slot, and the state of one decode step.

A slot is a request's index in SGLang's request pool. With overlapping scheduling a step is prepared
before SGLang has read the last step's result, so whatever one step needs from the last one stays in
tensors on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from drafttree.acceptance_rules import AcceptanceRule
from drafttree.sglang.grammars import follows_trees
from drafttree.sglang.penalties import has_penalties
from drafttree.transfer import AsyncHostCopy, all_on_device, on_device
from drafttree.tree import DraftTree

if TYPE_CHECKING:
    from drafttree.sglang.grammars import BoundTrees
    from drafttree.sglang.penalties import Penalties

OPT_OUT = "drafttree"
"""Key in a request's `custom_params` that turns drafting off for it when false."""

MakeRule = Callable[[DraftTree], AcceptanceRule | None]


@dataclass(frozen=True)
class Proposal:
    """What was drafted for a step of B requests.

    Attributes:
        trees: The draft trees.
        rule: Makes the acceptance rule of the trees as they are verified; None if SGLang's sampler
            verifies them.
        most_proposed: `int32 [B]`, greatest number of the draft tokens to verify of each request
            whose grammar chooses among them, as the others may take the place of those that it
            forbids; 0 for other requests. None if there are no such requests.
    """

    trees: DraftTree
    rule: MakeRule | None = None
    most_proposed: torch.Tensor | None = None


@dataclass(frozen=True)
class Step:
    """One decode step of B requests, once its trees are known.

    Attributes:
        batch: SGLang's batch.
        trees: Draft trees as they are verified, N columns.
        depths: `int32 [B, N]`, depth of each node.
        deepest: The greatest depth of a node, `int32 []`, on its way to the host; None on a device
            where the requests' argmaxes are all that is asked for.
        penalties: Penalties by slot; None if no request of the batch has any.
        rule: See `Proposal`.
        bound: The trees as bound to the requests' grammars; None if no request has one.
    """

    batch: Any
    trees: DraftTree
    depths: torch.Tensor
    deepest: AsyncHostCopy | None
    penalties: Penalties | None = None
    rule: MakeRule | None = None
    bound: BoundTrees | None = None

    @classmethod
    def of(
        cls,
        batch: Any,
        trees: DraftTree,
        depths: torch.Tensor,
        penalties: Penalties | None,
        rule: MakeRule | None,
        bound: BoundTrees | None = None,
    ) -> Step:
        """A step, whose greatest depth starts its way to the host if that will need it."""
        is_unread = depths.device.type != "cpu" and is_plain_greedy(batch)
        deepest = None if is_unread else AsyncHostCopy.of(depths.max())
        return cls(batch, trees, depths, deepest, penalties, rule, bound)

    @property
    def max_depth(self) -> int:
        """The greatest depth of a node; waits for the drafts on a device, not for the forward."""
        assert self.deepest is not None
        return int(self.deepest.wait())


class RequestStates:
    """Tensors indexed by slot; S is the number of slots.

    Attributes:
        roots: `int32 [S]`, the last emitted token.
        limits: `int64 [S]`, greatest length before the last token, prompt included; 0 for requests
            that are not drafted for.
        drafting: `bool [S]`, whether the request is drafted for.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.roots = torch.zeros(slots, dtype=torch.int32, device=device)
        self.limits = torch.zeros(slots, dtype=torch.int64, device=device)
        self.drafting = torch.zeros(slots, dtype=torch.bool, device=device)

    def start(self, slots: torch.Tensor, requests: list[Any]) -> None:
        """Requests start, or restart after they were retracted, in `slots`, `int64 [B]`."""
        limits = [
            len(request.origin_input_ids) + request.sampling_params.max_new_tokens - 1
            for request in requests
        ]
        drafting = np.array([may_draft(request) for request in requests], np.bool_)
        arrays = np.array(limits, np.int64) * drafting, drafting
        self.limits[slots], self.drafting[slots] = all_on_device(arrays, self.limits.device)


def is_plain_greedy(batch: Any) -> bool:
    """Whether each request asks for the argmax of its raw logits and nothing else.

    Then the argmax that some drafters compute in `observe` can be used.
    """
    return batch.sampling_info.is_all_greedy and asks_for_tokens_alone(batch)


def asks_for_tokens_alone(batch: Any) -> bool:
    """Whether no request asks for logprobs or for logits other than the raw ones."""
    info = batch.sampling_info
    return (
        not has_penalties(batch)
        and info.logit_bias is None
        and not info.has_custom_logit_processor
        and not batch.has_grammar
        and not batch.return_logprob
    )


def may_draft(request: Any) -> bool:
    """Whether a request allows drafts and they can be verified for it."""
    given = request.sampling_params.custom_params
    # SGLang takes any JSON there, also what is no object.
    opted_out = isinstance(given, dict) and given.get(OPT_OUT) is False
    return not opted_out and why_undrafted(request) is None


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
    parts = are_parts(batch)
    if any(parts):
        sampled.masked_fill_(on_device(np.array(parts), sampled.device), -1)
    return sampled
