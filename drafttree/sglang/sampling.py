"""Sampling along draft trees with SGLang's own sampler.

At each level of a tree the sampler gets one row per request, exactly as without speculation. So
temperature, top-k, top-p, min-p, penalties, biases, grammars, seeds and logprobs need no second
implementation. SGLang's own verification does not sample on a CPU: there it takes the argmax,
whatever the temperature.

On a GPU, requests that sample from a plain softmax are handled without a loop over levels: a token
is drawn for every row at once, and one kernel walks along the accepted path.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from tree_kernels.adjacency import top_candidates
from tree_kernels.mask import tree_mask

from drafttree.drafter import AcceptanceRule, TreeRule
from drafttree.sglang.acceptance_sampler import AcceptanceSampler
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
    draw = _Draw(sampler, step, logits, rule)
    if isinstance(rule, TreeRule) and not batch.sampling_info.is_all_greedy:
        chosen = draw.choose_whole(rule)
        if chosen.by_level is None and not batch.return_logprob:
            return verify_target(trees, chosen.tokens, max_depth)
    # Each level is a draw for all requests, so no more levels than this step's trees have.
    verified = verify_sampled(trees, draw, step.max_depth)
    if batch.return_logprob:
        draw.write_logprobs(output)
    return verified


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

    def __init__(
        self, sampler: Any, step: Step, logits: torch.Tensor, rule: AcceptanceRule | None
    ) -> None:
        self._sampler = sampler
        self._step = step
        self._batch = step.batch
        self._logits = logits
        self._penalties = step.penalties
        self._bound = step.bound
        self._rule = rule
        self._rows = torch.arange(len(logits), device=logits.device)
        # SGLang's penalties count one token of the last step; `Penalties` counts all.
        self._info = dataclasses.replace(
            step.batch.sampling_info, acc_additive_penalties=None, acc_scaling_penalties=None
        )
        self._levels: list[LogitsProcessorOutput] = []
        self._path = torch.empty(len(logits), 0, dtype=torch.int32, device=logits.device)

    def choose_whole(self, rule: TreeRule) -> Chosen:
        """Let a rule choose for whole trees, before the first level is sampled.

        The sampler gets one column of the trees at a time. Requests with a custom processor, which
        have no drafts, are left to the first level.
        """
        trees = self._step.trees
        requests, width = trees.tokens.shape
        masks = tree_mask(trees.parents, trees.tree_size)
        columns: list[torch.Tensor] = []

        def keep(target: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
            columns.append(target)
            return torch.zeros_like(nodes)

        info = self._info
        has_custom = info.has_custom_logit_processor
        info.has_custom_logit_processor = False
        for column in range(width):
            node = (trees.tree_size - 1).clamp(max=column)
            path = trees.tokens.masked_fill(~masks[self._rows, node.long()], -1)
            depth = self._step.depths[self._rows, node.long()]
            self._sample(keep, node, path[:, 1:], depth, are_roots=column == 0)
        info.has_custom_logit_processor = has_custom
        by_level = None
        if has_custom:
            custom = [each.custom_logit_processor is not None for each in self._batch.reqs]
            by_level = on_device(np.array(custom), masks.device)
        # One row for each column and request.
        rows = torch.arange(width * requests, device=masks.device).view(width, requests).t()
        tokens = rule.of_trees(torch.stack(columns).flatten(0, 1), rows)
        self._rule = chosen = Chosen(rule, tokens, by_level)
        return chosen

    def __call__(self, node: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        level, info = len(self._levels), self._info
        if level > 0:
            # Requests with a custom processor have no drafts, so none are left here.
            info.has_custom_logit_processor = False
        tokens, output = self._sample(
            *(self._rule, node, self._path, level),
            are_roots=level == 0,
            return_logprob=self._batch.return_logprob,
        )
        self._levels.append(output)
        self._path = torch.cat((self._path, tokens[:, None]), 1)
        return tokens

    def _sample(
        self,
        rule: AcceptanceRule | None,
        node: torch.Tensor,
        path: torch.Tensor,
        depth: torch.Tensor | int,
        *,
        are_roots: bool,
        return_logprob: bool = False,
    ) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """Sample a token after one node of each request.

        Args:
            rule: Chooses the tokens in place of the sampler's draw.
            node: The nodes, `int32 [B]`.
            path: The tokens on the paths to them, `int32 [B, D]`; -1 for none.
            depth: Their depths.
            are_roots: Whether they are all roots.
            return_logprob: Whether to compute the logprobs that were asked for.

        Returns:
            The tokens, `int32 [B]`, and the sampler's output.
        """
        info, batch = self._info, self._batch
        if self._bound is not None:
            info.grammar_mask = self._bound.of_nodes(node)
        elif are_roots:
            info.update_regex_vocab_mask()
        else:
            # Requests whose grammars cannot follow trees have no drafts, so none are left here.
            info.grammar_mask = None
        # Indexing copies, as the sampler overwrites its input.
        rows = self._logits[self._rows, node.long()]
        if self._penalties is not None:
            self._penalties.apply(rows, batch.req_pool_indices, path)
        info.apply_logits_bias(rows)
        output = LogitsProcessorOutput(next_token_logits=rows)
        by_rule = isinstance(self._sampler, AcceptanceSampler)
        with self._sampler.using(rule, node) if by_rule else nullcontext():
            tokens = self._sampler(
                output,
                info,
                return_logprob,
                batch.top_logprobs_nums,
                batch.token_ids_logprobs,
                # Seeds are combined with a node's position: one level is one position.
                batch.seq_lens + depth,
            )
        return tokens.to(torch.int32), output

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
                flat = [values[row] for row in range(len(self._logits)) for values in by_level]
                setattr(output, field, flat)
