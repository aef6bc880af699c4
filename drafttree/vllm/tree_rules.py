"""Rules that choose for whole trees at once: the target's distributions after all nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from drafttree.acceptance_rules import TreeRule
from drafttree.transfer import on_device
from drafttree.tree import DraftTree
from drafttree.verify import Chosen
from drafttree.vllm.processors import GREEDY_BELOW, rows_with_state
from drafttree.vllm.row_settings import settings_of_rows
from drafttree.vllm.step_logits import StepLogits, max_rows

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata

    from drafttree.vllm.acceptance_sampler import AcceptanceSampler


class LogitsRows(NamedTuple):
    """The R rows of a step's logits.

    Attributes:
        of_nodes: The row of each node, `int64 [B, N]`.
        requests: The request of each row, `int64 [R]`.
    """

    of_nodes: torch.Tensor
    requests: torch.Tensor


def choose_whole(
    rule: TreeRule,
    sampler: AcceptanceSampler,
    metadata: SamplingMetadata,
    logits: StepLogits,
    rows: LogitsRows,
    drafts: DraftTree,
    outputs: list[list[int]],
    budgets: dict[int, Any],
) -> Chosen:
    """Let a rule choose for all requests whose distributions can be computed for all nodes.

    Args:
        rule: The rule.
        sampler: A sampler with the engine's settings.
        metadata: The engine's settings of the batch, in which not all requests are greedy.
        logits: The target's raw logits.
        rows: The rows of the logits.
        drafts: The trees.
        outputs: The requests' output lists, as the sampler reads them.
        budgets: The requests with a thinking budget, by row; the sampler must not see them.
    """
    requests = len(drafts.tokens)
    with_state = rows_with_state(metadata, budgets, requests)
    flags = np.zeros(requests, np.bool_)
    flags[sorted(with_state)] = True
    by_level = on_device(flags, drafts.tokens.device)
    if len(with_state) == requests:
        return Chosen(rule, torch.zeros_like(drafts.tokens), by_level)
    plain = replace(
        metadata, spec_token_ids=[], generators={}, max_num_logprobs=None, logprob_token_ids=None
    )
    reads_texts = not metadata.no_penalties or bool(metadata.bad_words_token_ids)
    if with_state or reads_texts:
        shown = drafts.on_host() if reads_texts else None
        target, places = _by_column(sampler, plain, logits, rows.of_nodes, shown, outputs)
    else:
        target, places = _by_row(sampler, plain, logits, rows.requests), rows.of_nodes
    tokens = rule.of_trees(target, places)
    return Chosen(rule, tokens, by_level if with_state else None)


def _by_row(
    sampler: AcceptanceSampler,
    metadata: SamplingMetadata,
    logits: StepLogits,
    requests: torch.Tensor,
) -> torch.Tensor:
    """The distributions after all R rows, `float32 [R, V]`, many rows at a time.

    Args:
        sampler: A sampler with the engine's settings.
        metadata: The engine's settings of the batch.
        logits: The target's raw logits.
        requests: The request of each row, `int64 [R]`.
    """
    count, vocab = len(requests), logits.first.shape[1]
    size = max_rows(4 * vocab)
    target = torch.empty(0)
    for start in range(0, count, size):
        rows = torch.arange(start, min(start + size, count), device=requests.device)
        chunk = logits.of(rows)
        if chunk is logits.first:
            chunk = chunk.clone()  # the sampler works in place
        probs = _distributions(sampler, chunk, settings_of_rows(metadata, requests[rows]))
        if len(probs) == count:
            return probs
        if start == 0:
            target = probs.new_empty(count, vocab)
        target[start : start + len(probs)] = probs
    return target


def _by_column(
    sampler: AcceptanceSampler,
    metadata: SamplingMetadata,
    logits: StepLogits,
    rows: torch.Tensor,
    shown: DraftTree | None,
    outputs: list[list[int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distributions after all nodes, one node of each request at a time.

    The engine's sampler then works as without speculation.

    Args:
        sampler: A sampler with the engine's settings.
        metadata: The engine's settings of the batch.
        logits: The target's raw logits.
        rows: The row of each node's logits, `int64 [B, N]`.
        shown: The trees on the host, where the sampler reads texts; else None.
        outputs: The requests' output lists, as the sampler reads them.

    Returns:
        `float32 [N * B, V]`, and the place of each node there, `int64 [B, N]`.
    """
    requests, width = rows.shape
    lengths = [len(output) for output in outputs]
    target = torch.empty(0)
    for column in range(width):
        if shown is not None:
            for row, output in enumerate(outputs):
                output.extend(shown.path(row, column))
        probs = _distributions(sampler, logits.of(rows[:, column]), metadata)
        if shown is not None:
            for output, length in zip(outputs, lengths, strict=True):
                del output[length:]
        if column == 0:
            target = probs.new_empty(width, *probs.shape)
        target[column] = probs
    places = torch.arange(width * requests, device=rows.device).view(width, requests).t()
    return target.flatten(0, 1), places


def _distributions(
    sampler: AcceptanceSampler, logits: torch.Tensor, metadata: SamplingMetadata
) -> torch.Tensor:
    """The distributions from which the engine's sampler would draw, `float32 [n, V]`.

    Those of greedy requests are one-hot.
    """
    found: list[torch.Tensor] = []

    def keep(target: torch.Tensor) -> torch.Tensor:
        found.append(target)
        return target.new_zeros(len(target))

    sampler.choose_with(keep)
    sampled = sampler(logits, metadata).sampled_token_ids
    (probs,) = found
    if metadata.all_random:
        return probs
    assert metadata.temperature is not None
    greedy = metadata.temperature < GREEDY_BELOW
    sure = torch.zeros_like(probs).scatter_(1, sampled.long(), 1.0)
    return torch.where(greedy[:, None], sure, probs)
