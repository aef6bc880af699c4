"""Sampling along draft trees with SGLang's own sampler.

On a CPU, and for logprobs, the sampler gets one row per request at each level of a tree, exactly as
without speculation. SGLang's own verification does not sample on a CPU: there it takes the argmax,
whatever the temperature.

On a GPU the sampler gets all nodes at once, and one kernel walks along the accepted path, so the
host waits for nothing. Requests that sample from a plain softmax need no more than one kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from tree_kernels.adjacency import top_candidates

from drafttree.acceptance_rules import AcceptanceRule, TreeRule
from drafttree.sglang.node_sampler import NodeSampler, can_sample_all
from drafttree.sglang.state import Step, asks_for_tokens_alone, is_plain_greedy
from drafttree.transfer import on_device
from drafttree.tree import Verified
from drafttree.verify import Chosen, draw_ahead, draws_ahead, verify_sampled, verify_target


def verify_trees(
    sampler: Any,
    step: Step,
    max_depth: int,
    output: LogitsProcessorOutput,
    argmax: torch.Tensor | None = None,
    rule: AcceptanceRule | None = None,
) -> Verified:
    """Verify a step's trees and write the logprobs that were asked for into `output`.

    Args:
        sampler: The target runner's sampler; an `AcceptanceSampler` if there is a rule.
        step: The step.
        max_depth: Greatest depth of any draft token of the method.
        output: The target's output, with the raw logits of all nodes, `[B * N, V]`.
        argmax: `int32 [B * N]`, the most likely token of each row, if it is known already.
        rule: Chooses tokens in place of the sampler's draw; None leaves the draw to the sampler.
    """
    batch, trees = step.batch, step.trees
    batch_size, width = trees.tokens.shape
    if trees.tokens.device.type == "cpu":
        max_depth = step.max_depth
    if is_plain_greedy(batch):
        if argmax is None:
            argmax = top_candidates(output.next_token_logits, 1)
        return verify_target(trees, argmax.view(batch_size, width), max_depth)
    logits = output.next_token_logits.view(batch_size, width, -1)
    if rule is None and draws_ahead(logits) and _draws_from_softmax(sampler, batch):
        temperatures = batch.sampling_info.temperatures.expand(-1, width).flatten()
        target = draw_ahead(logits.flatten(0, 1), temperatures).view(batch_size, width)
        return verify_target(trees, target, max_depth)
    nodes, info = NodeSampler(sampler, step, logits), batch.sampling_info
    if isinstance(rule, TreeRule) and not info.is_all_greedy:
        rule = _choose_whole(nodes, step, rule)
        if rule.by_level is None and not batch.return_logprob:
            return verify_target(trees, rule.tokens, max_depth)
    elif draws_ahead(logits) and can_sample_all(batch) and (rule is None or info.is_all_greedy):
        return verify_target(trees, nodes.of_all(None), max_depth)
    draw = _Draw(nodes, batch, rule)
    # Each level is a draw for all requests, so no more levels than this step's trees have.
    verified = verify_sampled(trees, draw, step.max_depth)
    if batch.return_logprob:
        draw.write_logprobs(output)
    return verified


def _choose_whole(nodes: NodeSampler, step: Step, rule: TreeRule) -> Chosen:
    """Let a rule choose for whole trees, before the first level is sampled.

    Requests with a custom processor, which have no drafts, are left to the first level.
    """
    target: list[torch.Tensor] = []

    def keep(probs: torch.Tensor, of_nodes: torch.Tensor) -> torch.Tensor:
        target.append(probs)
        return torch.zeros_like(of_nodes)

    nodes.of_all(keep)
    tokens, batch = step.trees.tokens, step.batch
    by_level = None
    if batch.sampling_info.has_custom_logit_processor:
        custom = [each.custom_logit_processor is not None for each in batch.reqs]
        by_level = on_device(np.array(custom), tokens.device)
    rows = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
    return Chosen(rule, rule.of_trees(torch.cat(target), rows), by_level)


def _draws_from_softmax(sampler: Any, batch: Any) -> bool:
    """Whether `draw_ahead` samples as SGLang's own sampler would.

    It does where each request samples, unseeded, from the softmax of its raw logits at its
    temperature. In a mixed batch SGLang treats greedy requests as requests with a top-k of 1.
    """
    info = batch.sampling_info
    filtered = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    # Masks and watermarks are missing in 0.5.17.
    marked = getattr(info, "has_watermark_candidates", False)
    masked = getattr(info, "sampling_mask_batch_indices", None) is not None
    return (
        type(sampler) is Sampler
        and not (info.is_all_greedy or filtered or marked or masked)
        and info.sampling_seed is None
        and asks_for_tokens_alone(batch)
    )


class _Draw:
    """Samples one level of the trees after another, as a `verify.Draw`."""

    def __init__(self, nodes: NodeSampler, batch: Any, rule: AcceptanceRule | None) -> None:
        self._nodes = nodes
        self._batch = batch
        self._rule = rule
        self._levels: list[LogitsProcessorOutput] = []
        count, device = len(batch.seq_lens), batch.seq_lens.device
        self._path = torch.empty(count, 0, dtype=torch.int32, device=device)

    def __call__(self, node: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        tokens, output = self._nodes.of_level(self._rule, node, self._path)
        self._levels.append(output)
        self._path = torch.cat((self._path, tokens[:, None]), 1)
        return tokens

    def write_logprobs(self, output: LogitsProcessorOutput) -> None:
        """Write the logprobs of all levels into `output`, request by request."""
        levels = self._levels
        output.next_token_logprobs = torch.stack([each.next_token_logprobs for each in levels], 1)
        for field in (
            "next_token_top_logprobs_val",
            "next_token_top_logprobs_idx",
            "next_token_token_ids_logprobs_val",
            "next_token_token_ids_logprobs_idx",
        ):
            if getattr(levels[0], field):
                by_level = [getattr(each, field) for each in levels]
                flat = [values[row] for row in range(len(self._path)) for values in by_level]
                setattr(output, field, flat)
