"""Rules that choose for whole trees at once: the target's distributions after all nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from drafttree.drafter import TreeRule
from drafttree.transfer import on_device
from drafttree.tree import DraftTree
from drafttree.verify import Chosen
from drafttree.vllm.processors import GREEDY_BELOW, rows_with_state
from drafttree.vllm.step_logits import StepLogits

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata

    from drafttree.vllm.acceptance_sampler import AcceptanceSampler


def choose_whole(
    rule: TreeRule,
    sampler: AcceptanceSampler,
    metadata: SamplingMetadata,
    logits: StepLogits,
    rows: torch.Tensor,
    drafts: DraftTree,
    outputs: list[list[int]],
    budgets: dict[int, Any],
) -> Chosen:
    """Let a rule choose for all requests whose distributions can be computed for all nodes.

    The engine's sampler gets one row of each request at a time, as without speculation.

    Args:
        rule: The rule.
        sampler: A sampler with the engine's settings.
        metadata: The engine's settings of the batch, in which not all requests are greedy.
        logits: The target's raw logits.
        rows: The row of each node's logits, `int64 [B, N]`.
        drafts: The trees.
        outputs: The requests' output lists, as the sampler reads them.
        budgets: The requests with a thinking budget, by row; the sampler must not see them.
    """
    requests, width = drafts.tokens.shape
    with_state = rows_with_state(metadata, budgets, requests)
    device = drafts.tokens.device
    flags = np.zeros(requests, np.bool_)
    flags[sorted(with_state)] = True
    by_level = on_device(flags, device)
    if len(with_state) == requests:
        return Chosen(rule, torch.zeros_like(drafts.tokens), by_level)
    plain = replace(
        metadata, spec_token_ids=[], generators={}, max_num_logprobs=None, logprob_token_ids=None
    )
    reads_texts = not metadata.no_penalties or bool(metadata.bad_words_token_ids)
    lengths = [len(output) for output in outputs]
    # The sampler reads texts on the host.
    shown = drafts.on_host() if reads_texts else drafts
    probs = torch.empty(0)

    def keep(target: torch.Tensor) -> torch.Tensor:
        nonlocal probs
        probs = target
        return target.new_zeros(len(target))

    sampler.choose_with(keep)
    target = torch.empty(0)
    for column in range(width):
        if reads_texts:
            for row, output in enumerate(outputs):
                output.extend(shown.path(row, column))
        sampled = sampler(logits.of(rows[:, column]), plain).sampled_token_ids
        if reads_texts:
            for output, length in zip(outputs, lengths, strict=True):
                del output[length:]
        if column == 0:
            target = probs.new_empty(width, *probs.shape)
        target[column] = probs
        if not metadata.all_random:
            assert metadata.temperature is not None
            greedy = metadata.temperature < GREEDY_BELOW
            sure = torch.zeros_like(probs).scatter_(1, sampled.long(), 1.0)
            target[column] = torch.where(greedy[:, None], sure, probs)
    row_of_node = torch.arange(width * requests, device=device).view(width, requests).t()
    tokens = rule.of_trees(target.flatten(0, 1), row_of_node)
    return Chosen(rule, tokens, by_level if with_state else None)
